"""Concurrent jobs and edits in one loom: separate operations, ordered events, separate undo."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from serving import Event, Served, events, model_paused, serving
from weft.service.server import ServerConfig
from weft.service.server.growth import Attribution
from weft.service.store.library import Library

Json = dict[str, Any]
Events = list[Event]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("together") / "weft.db"


@pytest.fixture(scope="module")
def served(file: Path) -> Iterator[Served]:
    """A server whose database another process may open, too."""
    with serving(ServerConfig(port=0, db=f"sqlite:///{file}")) as server:
        yield server


class Shared:
    """A loom with a job that goes on, of whose branches one has ended."""

    def __init__(self, served: Served, prompt: str = "Use 1 2 3 4 to make 24.") -> None:
        self.client = served.client
        created = self.client.post("/api/v1/looms", json={"prompt": prompt})
        self.id = created.json()["id"]
        self.base = f"/api/v1/looms/{self.id}"
        ends = served.service.models.lm().text.stop_ids
        self.endless = {"max_tokens": 4000, "logit_bias": {str(each): -1e6 for each in ends}}
        self.job = ""

    def post(self, path: str, status: int = 200, **body: Any) -> Json:
        answer = self.client.post(f"{self.base}{path}", json=body)
        assert answer.status_code == status, answer.text
        reply: Json = answer.json()
        return reply

    def grow(self, at: int = 0) -> list[int]:
        """Begin to grow two branches of a node, and end the first one."""
        growth = self.post(f"/nodes/{at}/generate", 202, n=2, **self.endless)
        self.job = growth["job"]
        numbers = [each["node"] for each in growth["branches"]]
        self.until(lambda: self.node(numbers[0])["n_tokens"] > 3)
        self.client.post(f"/api/v1/jobs/{self.job}/cancel", json={"branches": [0]})
        self.until(lambda: not self.node(numbers[0])["growing"])
        return numbers

    def node(self, number: int) -> Json:
        reply: Json = self.client.get(f"{self.base}/nodes/{number}").json()
        return reply

    def end(self) -> None:
        """End the job."""
        if not self.job:
            return
        self.client.post(f"/api/v1/jobs/{self.job}/cancel")
        self.until(lambda: self.status(self.job) != "running")

    def status(self, job: str) -> str:
        return str(self.client.get(f"/api/v1/jobs/{job}").json()["status"])

    def nodes(self) -> list[Json]:
        page: Json = self.client.get(f"{self.base}/nodes", params={"limit": 1000}).json()
        return list(page["data"])

    def there(self) -> list[int]:
        return sorted(each["node"] for each in self.nodes())

    def log(self) -> list[tuple[str, str, int]]:
        """The operations, the first one first: kind, state, nodes added."""
        rows = self.client.get(f"{self.base}/history").json()["data"][::-1]
        return [(each["kind"], each["state"], each["n_added"]) for each in rows]

    def until(self, is_so: Any) -> None:
        while not is_so():
            time.sleep(0.02)


@pytest.fixture
def shared(served: Served) -> Iterator[Shared]:
    shared_loom = Shared(served)
    yield shared_loom
    shared_loom.end()


def read(shared: Shared, until: Any, begun: threading.Event | None = None, **query: Any) -> Events:
    """Return the events of all that happens in a loom, to the first of which something is so.

    begun: set with the first one, from which on nothing is missed.
    """
    received: Events = []
    query = {"tokens": True, **query}
    path = f"{shared.base}/events"
    with shared.client.stream("GET", path, params=query, timeout=None) as answer:
        for event in events(answer.iter_lines()):
            received.append(event)
            if begun is not None:
                begun.set()
            if until(received):
                break
    return received


def test_undo_of_an_edit_keeps_concurrent_growth(shared: Shared) -> None:
    first, second = shared.grow()
    (added,) = shared.post("/nodes", 201, text=" there")["added"]
    assert shared.log() == [("create", "first", 1), ("grow", "done", 1), ("add", "done", 1)]
    assert shared.post("/undo")["removed"] == [added["node"]]
    assert shared.there() == [0, first, second]
    assert [each["node"] for each in shared.post("/redo")["added"]] == [added["node"]]
    shared.end()
    assert shared.log()[-1] == ("grow", "done", 1)
    assert shared.there() == [0, first, second, added["node"]]
    assert shared.post("/undo")["removed"] == [second]


def test_undo_and_redo_keep_growing_nodes(shared: Shared) -> None:
    (added,) = shared.post("/nodes", 201, text=" there")["added"]
    first, second = shared.grow()
    assert shared.post("/undo")["removed"] == [added["node"]]
    assert shared.there() == [0, first, second]
    assert [each["node"] for each in shared.post("/redo")["added"]] == [added["node"]]
    shared.end()
    assert shared.there() == [0, added["node"], first, second]
    assert sorted(shared.post("/undo")["removed"]) == [first, second]
    assert shared.there() == [0, added["node"]]


def test_operations_of_a_running_job_are_not_undone(shared: Shared) -> None:
    shared.grow()
    (added,) = shared.post("/nodes", 201, text=" there")["added"]
    shared.post("/undo")
    answer = shared.client.post(f"{shared.base}/undo")
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "revision_mismatch")
    assert "still running" in answer.json()["error"]["message"]
    shared.end()
    assert shared.post("/undo")["removed"]


def test_undo_of_a_search_keeps_concurrent_growth(shared: Shared, file: Path) -> None:
    (added,) = shared.post("/nodes", 201, text=" there")["added"]
    left = [0, added["node"], *shared.grow(added["node"])]
    shared.post("/runs", strategy="tot", breadth=2, n=3, seed=1, wait=True, budget_tokens=300)
    nodes = shared.there()
    assert len(nodes) > 6
    kinds = [kind for kind, _, _ in shared.log()]
    assert kinds[:2] == ["create", "add"]
    assert set(kinds[2:]) == {"run"}
    shared.post("/undo")
    assert shared.there() == left
    shared.post("/redo")
    assert shared.there() == nodes
    with Library(f"sqlite:///{file}") as other:
        kept = other.open(shared.id)
        kept.undo()
        shared.until(lambda: shared.there() == left)
        kept.redo()
        shared.until(lambda: shared.there() == nodes)
    shared.end()
    assert sorted(shared.post("/undo")["removed"]) == left[2:]


def test_running_search_is_not_undone_and_ends_if_its_nodes_are_removed(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = Shared(served, prompt="Tell me a story.")

    def has_scores() -> bool:
        live = served.service.looms.get_open(shared.id)
        return live is not None and any(node.score is not None for node in live.stored.loom.walk())

    body = {"strategy": "beam", "breadth": 2, "seed": 3, "budget_tokens": 6000, "max_tokens": 8}
    with model_paused(monkeypatch, when=has_scores):  # in the second round
        job = shared.post("/runs", 202, **body)["job"]
        shared.until(has_scores)
        assert shared.client.post(f"{shared.base}/undo").status_code == 409
        answer = shared.client.delete(f"{shared.base}/nodes/0", params={"what": "children"})
        assert answer.status_code == 200
    shared.until(lambda: shared.status(job) != "running")
    reply = shared.client.get(f"/api/v1/jobs/{job}").json()
    assert reply["status"] == "failed", reply
    assert "was removed" in reply["error"]["message"]
    assert shared.there() == [0]


def test_feed_of_two_jobs_is_ordered_and_resumable(
    shared: Shared,
) -> None:
    resumable: Events = []
    begun = threading.Event()

    def over(received: Events) -> bool:
        return sum(name == "done" for _, name, _ in received) == 2

    def breaks_off(received: Events) -> bool:
        return len(received) >= 4 or over(resumable + received)

    with ThreadPoolExecutor(2) as pool:
        uninterrupted = pool.submit(read, shared, over, begun)
        assert begun.wait()
        body = {"n": 2, **shared.endless, "max_tokens": 100}
        jobs = [shared.post("/nodes/0/generate", 202, **body)["job"] for _ in range(2)]
        resumable += read(shared, lambda received: sum(n == "tok" for _, n, _ in received) == 3)
        while not over(resumable):
            resumable += read(shared, breaks_off, after=resumable[-1][0])
        received = uninterrupted.result()
    ids = [number for number, _, _ in received]
    assert ids == list(range(ids[0], ids[0] + len(ids)))
    by_id = {number: (name, data) for number, name, data in received}
    resumed = [each for each in resumable if each[1] != "snapshot"]
    assert [number for number, _, _ in resumed] == list(range(resumed[0][0], ids[-1] + 1))
    assert all(by_id[number] == (name, data) for number, name, data in resumed)
    for job in jobs:
        own = [(name, data) for _, name, data in received if data.get("job") == job]
        names = [name for name, _ in own]
        assert (names[0], names[-1]) == ("job", "done")
        for branch in range(2):
            end = next(i for i, (n, d) in enumerate(own) if n == "branch" and d["branch"] == branch)
            tokens = [i for i, (n, d) in enumerate(own)
                    if n == "tok" and any(entry[0] == branch for entry in d["t"])]  # fmt: skip
            assert max(tokens) < end
    assert sorted(shared.post("/undo")["removed"]) in ([1, 2], [3, 4], [1, 2, 3, 4])


def test_removed_node_of_a_running_job_gives_404(
    shared: Shared,
) -> None:
    first, _ = shared.grow()
    assert shared.client.delete(f"{shared.base}/nodes/{first}").status_code == 200
    assert shared.client.get(f"{shared.base}/nodes/{first}").status_code == 404


def test_bookmark_change_is_logged_with_its_actor(shared: Shared) -> None:
    shared.client.patch(
        f"{shared.base}/nodes/0", json={"bookmark": "x"}, headers={"X-Weft-Actor": "me"}
    )
    rows = shared.client.get(f"{shared.base}/history").json()["data"]
    assert (rows[0]["kind"], rows[0]["actor"]) == ("bookmark", "me")


def test_snapshot_has_no_incomplete_character(served: Served, shared: Shared) -> None:
    body = {"n": 4, "max_tokens": 1500, "choices": ["\N{GRINNING FACE}" * 60]}
    job = served.service.jobs.get(shared.post("/nodes/0/generate", 202, **body)["job"])

    async def look() -> list[str]:
        return [each["text"] for each in job.snapshot()["texts"]]

    texts: list[str] = []
    while job.ended is None:
        texts += served.on_loop(look())
    assert len(texts) > 20
    assert {text.strip("\N{GRINNING FACE}") for text in texts} == {""}


def test_long_query_does_not_block_its_loom(
    served: Served, shared: Shared, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ThreadPoolExecutor(1) as pool:
        with model_paused(monkeypatch):
            query = pool.submit(shared.post, "/nodes/0/next", candidates=[*range(40, 104)], ahead=3)
            shared.until(lambda: served.service.n_works == 1)
            (added,) = shared.post("/nodes", 201, text=" there")["added"]
            assert shared.node(added["node"])["text"] == " there"
            assert not query.done()
        assert len(query.result()["candidates"]) == 64


def test_rename_by_another_process_is_published_during_growth(shared: Shared, file: Path) -> None:
    shared.grow()
    with ThreadPoolExecutor(1) as pool, Library(f"sqlite:///{file}") as other:
        begun = threading.Event()
        received = pool.submit(read, shared, lambda received: received[-1][1] == "renamed", begun)
        assert begun.wait()
        other.rename(shared.id, f"new-{shared.id}")
        assert received.result()[-1][2]["name"] == f"new-{shared.id}"


def test_commit_is_published_if_its_job_is_cancelled(served: Served, shared: Shared) -> None:
    rev = shared.client.get(f"{shared.base}/nodes").json()["rev"]
    live = served.service.looms.get_open(shared.id)
    assert live is not None

    async def work() -> None:
        async with live.lock:
            live.stored.loom.add(" there")
            keeping = asyncio.create_task(live.commit(Attribution("run")))
            await asyncio.sleep(0)  # it has begun, in a thread
            keeping.cancel()
            with pytest.raises(asyncio.CancelledError):
                await keeping

    served.on_loop(work())
    page = shared.client.get(f"{shared.base}/nodes", params={"since": rev}).json()
    assert [each["text"] for each in page["data"]][1:] == [" there"]


def test_branch_undone_before_its_start_does_not_grow(served: Served, shared: Shared) -> None:
    (added,) = shared.post("/nodes", 201, text=" there")["added"]
    live = served.service.looms.get_open(shared.id)
    assert live is not None
    served.on_loop(live.lock.acquire())
    with ThreadPoolExecutor(2) as pool:  # each waits for the lock, and the growth once more
        path = f"{shared.base}/nodes/{added['node']}/generate"
        grown = pool.submit(shared.client.post, path, json={"n": 2, "max_tokens": 5})
        shared.until(lambda: n_waiting(live.lock) == 1)
        undone = pool.submit(shared.client.post, f"{shared.base}/undo")
        shared.until(lambda: n_waiting(live.lock) == 2)
        served.loop.call_soon_threadsafe(live.lock.release)
        assert undone.result().json()["removed"] == [added["node"]]
        answer = grown.result()
    assert (answer.status_code, served.service.n_works) == (409, 0), answer.text
    assert shared.there() == [0]
    assert shared.post("/redo")["added"]
    assert len(shared.post(f"/nodes/{added['node']}/generate", n=2, wait=True)["nodes"]) == 2


def n_waiting(lock: asyncio.Lock) -> int:
    """Return how many wait for a lock."""
    return len(lock._waiters or ())
