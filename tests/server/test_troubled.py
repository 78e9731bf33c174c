"""A database that cannot be written for a while: what had grown is kept, what failed is not."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

import weft
from serving import serving
from weft.server import ServerConfig

with weft.load("tiny") as _lm:
    NO_END = {str(token): -1e6 for token in _lm.text.stop_ids}


def test_what_has_grown_outlives_an_edit_that_could_not_be_kept(tmp_path: Path) -> None:
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
            for ask in (
                lambda: client.post(f"{loom}/nodes", json={"text": "lost"}),
                lambda: client.post(f"{loom}/nodes/{kept}/move", json={"parent": 0, "index": 0}),
                lambda: client.patch(f"{loom}/nodes/{kept}", json={"score": 0.5}),
                lambda: client.delete(f"{loom}/nodes/{kept}"),
            ):
                answer = ask()
                assert answer.status_code == 503, answer.text
                assert answer.json()["error"]["code"] == "store_unavailable"
            assert client.post("/api/v1/looms/restore").status_code == 503
            assert client.post(f"{loom}/undo").status_code == 503
            until = time.monotonic() + 20
            while client.get(f"/api/v1/jobs/{job}").json()["status"] == "running":
                assert time.monotonic() < until
                time.sleep(0.05)
            assert client.get("/healthz").status_code == 200
        finally:
            other.close()
        until = time.monotonic() + 10  # without anybody asking
        while len(nodes := library_nodes(file)) < 4 and time.monotonic() < until:
            time.sleep(0.1)
        assert nodes == [(0, None, None), (1, 0, None), (2, 0, "length"), (3, 0, "length")]
        told = client.get(f"{loom}/nodes").json()["data"]
        assert sorted((each["node"], each["parent"], each["finish_reason"]) for each in told) == [
            (0, None, None),
            (1, 0, None),
            (2, 0, "length"),
            (3, 0, "length"),
        ]
        assert sorted(client.post(f"{loom}/undo").json()["removed"]) == [2, 3]


def test_without_its_database_a_server_is_not_ready(tmp_path: Path) -> None:
    file, away = tmp_path / "weft.db", tmp_path / "away.db"
    with serving(ServerConfig(port=0, db=f"sqlite:///{file}")) as served:
        file.rename(away)
        answer = served.client.get("/readyz")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unavailable")
        assert served.client.get("/healthz").status_code == 200
        away.rename(file)
        assert served.client.get("/readyz").status_code == 200


def library_nodes(file: Path) -> list[tuple[int, int | None, str | None]]:
    """Return number, parent and end of the nodes that are whole in the rows."""
    rows = sqlite3.connect(file)
    try:
        query = "SELECT number, parent, finish_reason FROM nodes WHERE NOT removed"
        return rows.execute(f"{query} AND writer IS NULL ORDER BY number").fetchall()
    finally:
        rows.close()
