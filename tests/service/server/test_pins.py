"""Pinned and offloaded KV over HTTP; pins follow their nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from serving import Served, serving
from weft import AsyncClient, Client
from weft.errors import KVFull, Unsupported
from weft.service.server import ServerConfig

pytestmark = pytest.mark.programs

SLOTS = 160
SLOT = 8192  # bytes
LONG = "One more long text that fills the memory. " * 2  # about 40 tokens


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    config = ServerConfig(port=0, kv_budget=SLOTS * SLOT, offload=SLOTS * SLOT)
    with serving(config) as server:
        assert server.service.models.lm().info.kv_bytes_per_token == SLOT
        yield server


@pytest.fixture
def client(served: Served) -> Iterator[Client]:
    with Client(served.url) as client:
        yield client
        for row in client.looms(limit=200).data:
            client.remove_loom(row.id, purge=True)
        lm = served.service.models.lm()
        lm.driver.exclusive(lm.scheduler.close_idle_sequences)
        assert lm.tree.budget.unevictable == 0, "a pin was left"
        lm.clear_cache()


def grown_loom(
    client: Client, n: int = 1, prompt: str = "Once upon a time"
) -> tuple[str, list[int]]:
    """A loom with branches; their numbers."""
    loom = client.create_loom(prompt).id
    done = client.begin(loom, 0, n=n, max_tokens=12, seed=3, wait=True)
    assert [node.n_tokens for node in done.nodes or ()] == n * [12]
    return loom, [node.node for node in done.nodes or ()]


def kv(client: Client, loom: str, node: int) -> Any:
    info = client.node(loom, node, fields=["kv"]).kv
    assert info is not None
    return info


def pinned(client: Client, loom: str) -> list[int]:
    return [each.node for each in client.loom_kv(loom).pinned]


def must(served: Served) -> int:
    lm = served.service.models.lm()
    lm.driver.exclusive(lm.scheduler.close_idle_sequences)
    return int(lm.tree.budget.unevictable)


def press(client: Client) -> None:
    for i in range(3):
        client.handle_kv(client.create_loom(f"{i} {2 * LONG}").id, 0, "warm")


def test_pinned_node_survives_memory_pressure(served: Served, client: Client) -> None:
    loom, (first, second) = grown_loom(client, 2)
    info = client.handle_kv(loom, first, "pin").kv
    assert info is not None
    assert (info.state, info.pinned, info.bytes) == ("hot", True, 12 * SLOT)
    press(client)
    assert kv(client, loom, first).state == "hot"
    assert kv(client, loom, second).state != "hot"
    assert not kv(client, loom, 0).pinned
    (pin,) = client.loom_kv(loom).pinned
    assert (pin.node, pin.bytes) == (first, pin.tokens * SLOT)
    assert must(served) == pin.tokens
    client.handle_kv(loom, first, "pin")  # again
    assert must(served) == pin.tokens
    assert pinned(client, loom) == [first]
    assert client.kv(looms=True).looms is not None
    assert client.forget_kv(loom).hot == 2, "the prompt, and what is pinned"
    info = client.handle_kv(loom, first, "unpin").kv
    assert info is not None
    assert (info.state, info.pinned) == ("hot", False)
    client.handle_kv(loom, first, "unpin")  # again
    assert must(served) == 0
    press(client)
    assert kv(client, loom, first).state != "hot"


@pytest.mark.parametrize("op", ["evict", "offload"])
def test_pinned_kv_is_neither_evicted_nor_offloaded(client: Client, op: str) -> None:
    loom, (node,) = grown_loom(client)
    client.handle_kv(loom, node, "pin")
    for number, which in ((node, "is pinned"), (0, f"on the way to node {node}")):
        with pytest.raises(Exception, match=which) as raised:
            client.handle_kv(loom, number, op)
        assert getattr(raised.value, "code", "kv_pinned") == "kv_pinned"
    assert kv(client, loom, node).state == "hot"


def test_kv_is_offloaded_and_restored(client: Client) -> None:
    loom, (node,) = grown_loom(client)
    client.handle_kv(loom, node, "warm")
    info = client.handle_kv(loom, node, "offload").kv
    assert info is not None
    assert (info.state, info.bytes, info.pinned) == ("host", 0, False)
    assert client.loom_kv(loom).offloaded_tokens == 12
    assert client.kv().data[0].offloaded_bytes >= 12 * SLOT
    before = client.kv().data[0].prefilled
    info = client.handle_kv(loom, node, "pin").kv
    assert info is not None
    assert (info.state, info.bytes) == ("hot", 12 * SLOT)
    assert client.kv().data[0].prefilled == before


def test_a_pin_follows_its_node_through_every_edit(served: Served, client: Client) -> None:
    loom, (node, other) = grown_loom(client, 2)
    n = client.node(loom, node).n_tokens
    depth = n + client.node(loom, 0).n_tokens
    client.handle_kv(loom, node, "pin")

    lower = client.split(loom, node, at_token=5).added[0].node
    assert sorted(pinned(client, loom)) == sorted([node, lower])
    assert must(served) == depth
    client.handle_kv(loom, node, "unpin")
    assert pinned(client, loom) == [lower]
    assert must(served) == depth

    client.merge(loom, lower)  # what takes in a pinned one is pinned
    assert pinned(client, loom) == [node]
    assert must(served) == depth

    client.undo(loom)
    client.undo(loom)
    assert pinned(client, loom) == [node]
    client.edit(loom, node, text=" lived a fox", in_place=True)
    assert pinned(client, loom) == [node]
    now = client.node(loom, node, fields=["kv"])
    assert now.kv is not None
    assert (now.kv.state, now.kv.pinned) == ("partly", True)
    assert must(served) == depth - n + now.n_tokens
    client.handle_kv(loom, node, "warm")
    press(client)
    assert kv(client, loom, node).state == "hot"

    client.edit(loom, 0, text="Twice upon a time", in_place=True)
    assert pinned(client, loom) == [node]
    client.move(loom, node, other)
    assert pinned(client, loom) == [node]
    client.clip(loom, other, keep=3, children="drop")
    assert pinned(client, loom) == [], "what stood below what was clipped is gone"
    assert must(served) == 0
    client.undo(loom)
    assert pinned(client, loom) == [], "Undo brings nodes back, and not their pins"


@pytest.mark.parametrize("what", ["node", "loom", "purge", "unload"])
def test_pin_ends_with_its_node_loom_or_model(served: Served, client: Client, what: str) -> None:
    loom, (node,) = grown_loom(client)
    client.handle_kv(loom, node, "pin")
    assert must(served) > 0
    if what == "node":
        client.remove(loom, node)
    elif what == "unload":
        client.unload_model("tiny", force=True)
        client.load_model("tiny", wait=True)
        assert pinned(client, loom) == []
        assert not kv(client, loom, node).pinned
    else:
        client.remove_loom(loom, purge=what == "purge")
    assert must(served) == 0


def test_pins_that_fill_the_memory_are_reported(client: Client) -> None:
    loom = client.create_loom("Short").id
    for i in range(8):
        node = client.add(loom, 0, text=f" {i} {LONG}").added[0].node
        if client.node(loom, node).n_tokens * (i + 1) > SLOTS:
            break
        client.handle_kv(loom, node, "pin")
    assert len(pinned(client, loom)) == i > 1
    for op in ("pin", "warm"):
        with pytest.raises(KVFull, match="pinned by hand") as raised:
            client.handle_kv(loom, node, op)
        assert raised.value.hint.startswith("unpin")
    for number in pinned(client, loom):
        client.handle_kv(loom, number, "unpin")
    client.handle_kv(loom, node, "warm")


def test_idle_loom_with_a_pin_stays_open(served: Served, client: Client) -> None:
    loom, (node,) = grown_loom(client)
    live = served.service.looms.get_open(loom)
    assert live is not None
    assert live.is_idle
    client.handle_kv(loom, node, "pin")
    assert not live.is_idle
    live.is_stale = True  # as after a failed commit: the server opens the loom a second time
    assert pinned(client, loom) == [node]
    assert served.service.looms.get_open(loom) is not live


def test_concurrent_pins_and_unpins(served: Served, client: Client) -> None:
    loom, nodes = grown_loom(client, 4)

    async def work() -> None:
        async with AsyncClient(served.url) as many:
            for _ in range(3):
                ops = [(node, op) for node in nodes for op in ("pin", "warm", "unpin", "pin")]
                await asyncio.gather(*(many.handle_kv(loom, node, op) for node, op in ops))

    asyncio.run(work())
    for node in nodes:
        client.handle_kv(loom, node, "unpin")
    assert must(served) == 0
    assert pinned(client, loom) == []


def test_offload_without_host_budget_is_rejected_by_name() -> None:
    with serving(ServerConfig(port=0)) as server, Client(server.url) as client:
        loom, (node,) = grown_loom(client)
        with pytest.raises(Unsupported, match="loaded without offload"):
            client.handle_kv(loom, node, "offload")
        answer = server.client.post(f"/api/v1/looms/{loom}/nodes/{node}/kv", json={"op": "drop"})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "op")


def test_kv_of_several_nodes_is_returned_at_once(client: Client) -> None:
    loom, grown = grown_loom(client, n=3)
    page = client.nodes(loom, nodes=[grown[2], 0, 999, grown[1]], fields=["kv"])
    assert [node.node for node in page.data] == [0, grown[1], grown[2]]
    assert all(node.kv is not None for node in page.data)
    page = client.nodes(loom, nodes=[grown[0], grown[2]], limit=1)
    assert ([node.node for node in page.data], page.next) == ([grown[0]], str(grown[0]))
    page = client.nodes(loom, nodes=[grown[0], grown[2]], limit=1, after=page.next)
    assert ([node.node for node in page.data], page.next) == ([grown[2]], None)
    assert client.nodes(loom, nodes=[0, grown[2]], under=grown[2]).data[0].node == grown[2]
    assert client.nodes(loom, nodes=[-1]).data == []
    with pytest.raises(ValueError, match="nodes"):
        client.nodes(loom, nodes=range(201))


def test_pin_follows_without_room_for_both_paths(served: Served, client: Client) -> None:
    loom, (node,) = grown_loom(client, prompt=3 * LONG)
    client.handle_kv(loom, node, "pin")
    before = must(served)
    assert SLOTS / 2 < before < SLOTS - 8
    client.edit(loom, 0, text=f"Now {3 * LONG}", in_place=True)
    assert pinned(client, loom) == [node]
    assert SLOTS / 2 < must(served) < SLOTS
    client.handle_kv(loom, node, "warm")
    assert kv(client, loom, node).state == "hot"
    client.handle_kv(loom, node, "unpin")
