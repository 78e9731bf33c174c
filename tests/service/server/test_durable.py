"""Data that a client has received survives the server."""

from __future__ import annotations

import json
from pathlib import Path

import sqlalchemy as sa

from serving import Served, events, serving
from weft.service.server import ServerConfig
from weft.service.store.library import Library
from weft.service.store.tables import nodes, pieces


def test_end_event_follows_the_write_of_all_tokens(tmp_path: Path) -> None:
    """The end of a branch does not wait for the other branches of its job."""
    db = f"sqlite:///{tmp_path}/weft.db"
    with serving(ServerConfig(port=0, db=db)) as server, Library(db) as library:
        loom = server.client.post("/api/v1/looms", json={"prompt": "Once upon a time"}).json()
        body = {"n": 4, "max_tokens": 120, "temperature": 1.5, "seed": 1, "stream": True}
        path = f"/api/v1/looms/{loom['id']}/nodes/0/generate"
        n_ends, name = 0, ""
        with server.client.stream("POST", path, json=body) as answer:
            for line in answer.iter_lines():
                if line.startswith("event: "):
                    name = line[7:]
                elif line.startswith("data: ") and name == "branch":
                    end = json.loads(line[6:])
                    assert end["kept"]
                    assert durable(library, end["node"]) == end["n_tokens"]
                    ended = (end["finish_reason"], end["stop_string"], end["ended"])
                    assert durable_end(library, end["node"]) == ended
                    n_ends += 1
    assert n_ends == 4


def durable(library: Library, number: int) -> int:
    """Return how many tokens of a node are in the database."""
    finished = sa.select(nodes.c.n_tokens).where(nodes.c.number == number, nodes.c.writer.is_(None))
    parts = sa.select(sa.func.coalesce(sa.func.sum(pieces.c.n_tokens), 0))

    def work(connection: sa.Connection) -> int:
        n_tokens = connection.execute(finished).scalar()
        if n_tokens is None:
            n_tokens = connection.execute(parts.where(pieces.c.number == number)).scalar_one()
        return int(n_tokens)

    return library.database.read(work)


def durable_end(library: Library, number: int) -> tuple[str | None, str | None, bool]:
    """Return how a node ended, as the database has it: reason, stop string, whether by a token."""
    ends = sa.select(nodes.c.finish_reason, nodes.c.stop_string, nodes.c.terminal)
    query = ends.where(nodes.c.number == number)
    reason, stop, is_terminal = library.database.read(lambda each: each.execute(query).one())
    return reason, stop, is_terminal


def test_reader_of_an_earlier_server_gets_a_snapshot(tmp_path: Path) -> None:
    """Event ids of an earlier server never match events of this one."""
    config = ServerConfig(port=0, db=f"sqlite:///{tmp_path}/weft.db")
    with serving(config) as server:
        loom = server.client.post("/api/v1/looms", json={"prompt": "Once upon a time"}).json()
        path = f"/api/v1/looms/{loom['id']}"
        number, name, _ = first_event(server, path)
        assert name == "snapshot"
        for _ in range(3):
            server.client.post(f"{path}/nodes", json={"parent": 0, "text": " in"})
        number, name, rev = first_event(server, path)
    with serving(config) as server:
        for _ in range(5):
            server.client.post(f"{path}/nodes", json={"parent": 0, "text": " in"})
            _, name, now = first_event(server, path, after=number)
            assert name == "snapshot"
            assert now > rev


def first_event(server: Served, path: str, after: int | None = None) -> tuple[int, str, int]:
    """Return id, name and revision of the first event that a follower of a loom gets."""
    query = {"tokens": True} if after is None else {"tokens": True, "after": after}
    with server.client.stream("GET", f"{path}/events", params=query, timeout=None) as answer:
        number, name, data = next(events(answer.iter_lines()))
    assert number is not None
    return number, name, data["rev"]
