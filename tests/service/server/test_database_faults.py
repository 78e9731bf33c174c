"""A temporarily unavailable database: generated nodes are saved later, failed edits are not."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from pathlib import Path

import pytest

import weft
from serving import serving
from weft._core.sampling.params import SamplingParams
from weft.errors import StaleHandle
from weft.loom import Loom
from weft.loom.grow import plan
from weft.service.server import ServerConfig
from weft.service.store.library import Library

with weft.load("tiny") as _lm:
    NO_END = {str(token): -1e6 for token in _lm.text.stop_ids}


def test_failed_edit_keeps_generated_nodes(tmp_path: Path) -> None:
    file = tmp_path / "weft.db"
    with serving(ServerConfig(port=0, db=f"sqlite:///{file}")) as served:
        client, database = served.client, served.service.looms.library.database
        loom = f"/api/v1/looms/{client.post('/api/v1/looms', json={'prompt': 'a'}).json()['id']}"
        kept = client.post(f"{loom}/nodes", json={"text": "kept"}).json()["added"][0]["node"]
        body = {"n": 2, "max_tokens": 40, "logit_bias": NO_END}
        job = client.post(f"{loom}/nodes/0/generate", json=body).json()["job"]
        database.patience_s = 0.1
        database.close()  # new connections wait no longer than that
        other = sqlite3.connect(file, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        try:
            for send in (
                lambda: client.post(f"{loom}/nodes", json={"text": "lost"}),
                lambda: client.post(f"{loom}/nodes/{kept}/move", json={"parent": 0, "index": 0}),
                lambda: client.patch(f"{loom}/nodes/{kept}", json={"score": 0.5}),
                lambda: client.delete(f"{loom}/nodes/{kept}"),
            ):
                answer = send()
                assert answer.status_code == 503, answer.text
                assert answer.json()["error"]["code"] == "store_unavailable"
            assert client.post("/api/v1/looms/restore").status_code == 503
            assert client.post(f"{loom}/undo").status_code == 503
            while client.get(f"/api/v1/jobs/{job}").json()["status"] == "running":
                time.sleep(0.05)
            error = client.get(f"/api/v1/jobs/{job}").json()["error"]
            assert error["code"] == "store_unavailable"
            assert "not saved yet" in error["message"]
            assert "saved automatically" in error["hint"]
            assert client.get("/healthz").status_code == 200
        finally:
            other.close()
        while len(nodes := library_nodes(file)) < 4:
            time.sleep(0.1)
        assert nodes == [(0, None, None), (1, 0, None), (2, 0, "length"), (3, 0, "length")]
        listed = client.get(f"{loom}/nodes").json()["data"]
        assert sorted((each["node"], each["parent"], each["finish_reason"]) for each in listed) == [
            (0, None, None),
            (1, 0, None),
            (2, 0, "length"),
            (3, 0, "length"),
        ]
        assert sorted(client.post(f"{loom}/undo").json()["removed"]) == [2, 3]


def test_server_without_database_is_not_ready(tmp_path: Path) -> None:
    file, away = tmp_path / "weft.db", tmp_path / "away.db"
    with serving(ServerConfig(port=0, db=f"sqlite:///{file}")) as served:
        file.rename(away)
        answer = served.client.get("/readyz")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unavailable")
        assert served.client.get("/healthz").status_code == 200
        away.rename(file)
        assert served.client.get("/readyz").status_code == 200


def library_nodes(file: Path) -> list[tuple[int, int | None, str | None]]:
    """Return number, parent and finish reason of the nodes that no process is growing."""
    rows = sqlite3.connect(file)
    try:
        query = "SELECT number, parent, finish_reason FROM nodes WHERE NOT removed"
        return rows.execute(f"{query} AND writer IS NULL ORDER BY number").fetchall()
    finally:
        rows.close()


def test_loom_purged_during_growth_is_released(tmp_path: Path) -> None:
    with serving(ServerConfig(port=0, db=f"sqlite:///{tmp_path}/weft.db")) as served:
        client, service = served.client, served.service
        loom = client.post("/api/v1/looms", json={"prompt": "a"}).json()["id"]
        live = service.looms.get_open(loom)
        assert live is not None
        body = {"n": 2, "max_tokens": 4000, "logit_bias": NO_END}
        job = client.post(f"/api/v1/looms/{loom}/nodes/0/generate", json=body).json()["job"]
        while not any(
            each["n_tokens"] for each in client.get(f"/api/v1/jobs/{job}").json()["branches"]
        ):
            time.sleep(0.02)
        gone = client.delete(f"/api/v1/looms/{loom}", params={"purge": True})
        assert gone.status_code == 200
        while client.get(f"/api/v1/jobs/{job}").json()["status"] == "running":
            time.sleep(0.02)
        while live._flusher is not None:  # it would try to keep it for ever
            time.sleep(0.02)
        assert service.n_works == 0


def test_readers_of_a_reopened_loom_reconnect(tmp_path: Path) -> None:
    """A change that could not be kept is in no tree; who listens must not listen to a dead one."""
    file = tmp_path / "weft.db"
    with serving(ServerConfig(port=0, db=f"sqlite:///{file}")) as served:
        client, library = served.client, served.service.looms.library
        kept = library.create(Loom(None, "texts alone"))
        loom = f"/api/v1/looms/{kept.id}"
        begun, ended = threading.Event(), threading.Event()

        def listen() -> None:
            with client.stream("GET", f"{loom}/events", params={"tokens": True}) as answer:
                for _ in answer.iter_lines():
                    begun.set()
            ended.set()

        thread = threading.Thread(target=listen)
        thread.start()
        assert begun.wait()
        library.database.patience_s = 0.1
        library.database.close()
        other = sqlite3.connect(file, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        try:
            assert client.patch(f"{loom}/nodes/0", json={"score": 1}).status_code == 503
        finally:
            other.close()
        assert ended.wait()
        thread.join()
        assert client.get(f"{loom}/nodes/0").json()["score"] is None
        assert client.patch(f"{loom}/nodes/0", json={"score": 1}).status_code == 200


def test_failed_start_leaves_nothing_growing(tmp_path: Path) -> None:
    file = tmp_path / "weft.db"
    with serving(ServerConfig(port=0, db=f"sqlite:///{file}")) as served:
        client, database = served.client, served.service.looms.library.database
        loom = f"/api/v1/looms/{client.post('/api/v1/looms', json={'prompt': 'a'}).json()['id']}"
        (added,) = client.post(f"{loom}/nodes", json={"text": " b"}).json()["added"]
        growth = f"{loom}/nodes/{added['node']}/generate"
        database.patience_s = 0.1
        database.close()
        other = sqlite3.connect(file, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        try:
            assert client.post(growth, json={"n": 4}).status_code == 503
        finally:
            other.close()
        assert served.service.n_works == 0
        assert client.get(loom).json()["growing"] == 0
        assert client.post(f"{loom}/undo").json()["removed"] == [added["node"]]
        client.post(f"{loom}/redo")
        # The same if the model is closed.
        job = client.post(growth, json={"n": 4, "max_tokens": 3000, "logit_bias": NO_END}).json()
        served.service.models.lm().close()
        while (reply := client.get(f"/api/v1/jobs/{job['job']}").json())["status"] == "running":
            time.sleep(0.02)
        assert reply["status"] in ("failed", "cancelled")
        rows = sqlite3.connect(file)
        try:
            query = "SELECT number FROM nodes WHERE writer IS NOT NULL AND NOT removed"
            assert rows.execute(query).fetchall() == []
        finally:
            rows.close()


def test_branches_rejected_by_the_model_are_ended() -> None:
    async def work() -> None:
        lm = weft.load("tiny")
        params = SamplingParams.resolve({"n": 2}, lm.defaults)
        growth = plan([Loom(lm, "a")], params, force=False, streamed=True)
        lm.close()
        with pytest.raises(StaleHandle):
            await anext(growth.aupdates())
        assert [each.over for each in growth.branches] == [True, True]

    asyncio.run(work())


def test_search_at_shutdown_is_interrupted_and_saved(tmp_path: Path) -> None:
    db = f"sqlite:///{tmp_path}/weft.db"
    with serving(ServerConfig(port=0, db=db, grace_s=0.0)) as served:
        client = served.client
        loom = client.post("/api/v1/looms", json={"prompt": "Use 1 2 3"}).json()["id"]
        body = {"strategy": "best-of-n", "n": 3, "max_tokens": 4000, "logit_bias": NO_END}
        job = client.post(f"/api/v1/looms/{loom}/runs", json=body).json()["job"]
        while not any(
            each["n_tokens"] for each in client.get(f"/api/v1/jobs/{job}").json()["branches"]
        ):
            time.sleep(0.02)
    with Library(db) as library:
        kept = library.open(loom)
        ends = [node.finish_reason for node in kept.loom.walk()][1:]
        assert ends == ["interrupted"] * len(ends)
        assert [each.kind for each in kept.history()] == ["run", "create"]
        assert not any(row.is_growing for row in kept.nodes())
