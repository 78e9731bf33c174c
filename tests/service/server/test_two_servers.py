"""Two servers over one database: one of them grows a loom, and the other takes it over."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from serving import Served, serving
from weft.service.server import ServerConfig, open_loom
from weft.service.server.open_loom import OpenLoom
from weft.service.store.library import Library
from weft.service.store.tables import leases, pieces

pytestmark = pytest.mark.programs


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[tuple[Served, Served]]:
    config = ServerConfig(port=0, db=f"sqlite:///{tmp_path}/weft.db")
    with ExitStack() as stack:
        yield stack.enter_context(serving(config)), stack.enter_context(serving(config))


def new_loom(server: Served) -> str:
    answer = server.client.post("/api/v1/looms", json={"prompt": "Once upon a time"})
    assert answer.status_code == 201, answer.text
    return f"/api/v1/looms/{answer.json()['id']}"


def grown(server: Served, loom: str, **body: Any) -> Any:
    return server.client.post(f"{loom}/nodes/0/generate", json={"force": True, **body})


def begun(server: Served, loom: str) -> Any:
    """Begin to grow eight branches that no end token ends; return their job."""
    ends = server.service.models.lm().text.stop_ids
    bias = {str(token): -1e6 for token in ends}
    return job_of(server, grown(server, loom, max_tokens=1500, n=8, logit_bias=bias))


def job_of(server: Served, answer: Any) -> Any:
    assert answer.status_code == 202, answer.text
    return server.client.get(f"/api/v1/jobs/{answer.json()['job']}").json()


def reasons(server: Served, loom: str) -> list[str | None]:
    nodes = server.client.get(f"{loom}/nodes").json()["data"]
    return [node["finish_reason"] for node in nodes if node["parent"] is not None]


def test_a_loom_that_another_server_grows_is_busy(servers: tuple[Served, Served]) -> None:
    one, other = servers
    loom = new_loom(one)
    job = begun(one, loom)
    refused = grown(other, loom, max_tokens=4)
    assert refused.status_code == 429, refused.text
    assert int(refused.headers["retry-after"]) >= 1
    assert "another server" in refused.json()["error"]["message"]
    one.client.post(f"/api/v1/jobs/{job['id']}/cancel")
    while grown(other, loom, max_tokens=4, wait=True).status_code == 429:
        time.sleep(0.1)
    assert "length" in reasons(one, loom)


def test_server_that_lost_the_lease_reports_it(
    servers: tuple[Served, Served], tmp_path: Path
) -> None:
    one, other = servers
    loom = new_loom(one)
    job = begun(one, loom)
    while n_durable(tmp_path) < 8:
        time.sleep(0.05)
    while True:  # one keeps it while it can
        let_pass(tmp_path, 60)
        heir = grown(other, loom, max_tokens=4, wait=True)
        if heir.status_code != 429:
            break
    assert heir.status_code == 200, heir.text
    while (lost := one.client.get(f"/api/v1/jobs/{job['id']}").json())["status"] == "running":
        time.sleep(0.1)
    assert lost["status"] == "failed"
    assert lost["error"]["code"] == "lease_lost"
    for server in servers:
        assert sorted(map(str, reasons(server, loom))) == ["interrupted"] * 8 + ["length"]
    third = grown(one, loom, max_tokens=4, wait=True)
    assert third.status_code == 200, third.text


def n_durable(folder: Path) -> int:
    """Return how many nodes have tokens that would outlive their server."""
    with Library(f"sqlite:///{folder}/weft.db") as library:
        n = sa.select(sa.func.count(sa.distinct(pieces.c.number)))
        return int(library.database.read(lambda connection: connection.execute(n).scalar_one()))


def let_pass(folder: Path, seconds: float) -> None:
    with Library(f"sqlite:///{folder}/weft.db") as library:
        aged = sa.update(leases).values(expires=leases.c.expires - seconds)
        library.database.write(lambda connection: connection.execute(aged))


@pytest.mark.parametrize("for_good", [False, True])
def test_removal_by_another_server_is_published(tmp_path: Path, for_good: bool) -> None:
    db = f"sqlite:///{tmp_path}/weft.db"
    with serving(ServerConfig(port=0, db=db)) as server, Library(db) as library:
        loom = server.client.post("/api/v1/looms", json={"prompt": "a"}).json()
        received: list[str] = []
        begun = threading.Event()

        def listen() -> None:
            with server.client.stream("GET", f"/api/v1/looms/{loom['id']}/events") as answer:
                begun.set()
                received.extend(line for line in answer.iter_lines() if line.startswith("event"))

        thread = threading.Thread(target=listen)
        thread.start()
        assert begun.wait()
        library.remove(loom["id"])
        if for_good:
            library.purge([loom["id"]])
        thread.join()
        assert received == ["event: removed"]


def test_edit_of_a_node_changed_by_another_server_conflicts(
    servers: tuple[Served, Served],
) -> None:
    one, other = servers
    node = f"{new_loom(one)}/nodes/0"
    if_match = {"If-Match": one.client.get(node).headers["etag"]}
    for score in range(1, 6):
        # Both servers have cached the node, so the first does not notice the other's change.
        for server in servers:
            server.client.get(node)
        done = other.client.patch(node, json={"score": score}, headers=if_match)
        assert done.status_code == 200, done.text
        for late in ({"score": -score}, {"bookmark": "late"}):
            refused = one.client.patch(node, json=late, headers=if_match)
            assert refused.status_code == 409, refused.text
            assert refused.json()["error"]["code"] == "revision_mismatch"
        if_match = {"If-Match": done.headers["etag"]}
        row = one.client.get(node).json()
        assert (row["score"], row["bookmark"]) == (score, None)


def test_change_by_another_server_before_the_commit_conflicts(
    servers: tuple[Served, Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = servers
    node = f"{new_loom(one)}/nodes/0"
    if_match = {"If-Match": one.client.get(node).headers["etag"]}
    commit_finished = OpenLoom.commit_finished

    async def overtaken(live: OpenLoom) -> None:
        await commit_finished(live)
        monkeypatch.undo()
        done = await asyncio.to_thread(other.client.patch, node, json={"score": 1})
        assert done.status_code == 200, done.text

    monkeypatch.setattr(OpenLoom, "commit_finished", overtaken)
    refused = one.client.patch(node, json={"score": 2}, headers=if_match)
    assert refused.status_code == 409, refused.text
    assert refused.json()["error"]["code"] == "revision_mismatch"
    monkeypatch.setattr(open_loom, "FRESH_S", 60.0)  # the edit has just read the database
    for server in servers:
        assert server.client.get(node).json()["score"] == 1
    # The server knows the other's change, as any other.
    later = one.client.patch(node, json={"score": 2}, headers=if_match)
    assert later.status_code == 409, later.text
