"""Two replicas over one PostgreSQL behind Ray Serve; one is killed while clients grow looms.

    python benchmarks/scale.py                       200 looms, 16 clients, 20 calls a loom
    python benchmarks/scale.py --db postgresql://…   over a database of yours

What must hold: each node whose end a client has received is in the database with its tokens; each
call ends well, after trying again where its replica died; nine calls of ten find the KV of their
path. Needs the extra `ray`, and initdb of PostgreSQL where no --db is given.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx2 as httpx
from common import ROOT, median, report

NEW_TOKENS = 12
PATIENCE_S = 60.0  # before a call counts as lost
FELT_S = 3.0  # when the calls of a replica that was killed have broken off
WORDS = "river lamp engine winter garden paper signal copper meadow anchor violet thunder".split()


@dataclass
class Results:
    """Results of the clients; `lock` guards writes."""

    # Tokens by loom and node.
    reported: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    # Nodes whose end an event reported before the response was cut off.
    half_reported: dict[str, dict[str, list[int]]] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    # Cached tokens, prompt tokens, is the loom's first call.
    cached_of_calls: list[tuple[int, int, bool]] = field(default_factory=list)
    retries: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Client:
    """One client, with looms of its own; every other one follows its calls by events."""

    def __init__(self, url: str, index: int, results: Results) -> None:
        self.http = httpx.Client(base_url=url, timeout=PATIENCE_S)
        self.streams = index % 2 == 1
        self.results = results
        self.random = random.Random(index)
        self.tips: dict[str, int] = {}

    def make(self, n: int) -> None:
        """Make looms."""
        for _ in range(n):
            words = " ".join(self.random.choices(WORDS, k=24))
            loom = self.retry(lambda words=words: self.post("/api/v1/looms", {"prompt": words}))
            self.tips[loom["id"]] = 0

    def grow_all(self, n: int, done: threading.Semaphore) -> None:
        """Grow each of them by a node, so many times."""
        for turn in range(n):
            for loom in self.tips:
                self.grow(loom, is_first=turn == 0)
                done.release()

    def grow(self, loom: str, *, is_first: bool) -> None:
        """Grow the tip of a loom by one node."""
        path = f"/api/v1/looms/{loom}/nodes/{self.tips[loom]}/generate"
        # force: whatever the model takes for an end is grown on.
        body = {"max_tokens": NEW_TOKENS, "seed": self.random.randrange(1 << 30), "force": True}
        call = self.streamed if self.streams else self.waited
        began = time.monotonic()
        try:
            node, number, tokens, usage = self.retry(lambda: call(path, body))
        except TimeoutError as error:
            with self.results.lock:
                self.results.lost.append(str(error))
            return
        took = time.monotonic() - began
        self.tips[loom] = number
        with self.results.lock:
            self.results.reported.setdefault(loom, {})[node] = tokens
            self.results.seconds.append(took)
            cached, prompt = usage["cached_tokens"], usage["prompt_tokens"]
            self.results.cached_of_calls.append((cached or 0, prompt, is_first))

    def waited(self, path: str, body: dict[str, Any]) -> Any:
        """Make a call that answers when it has ended."""
        reply = self.post(path, {**body, "wait": True})
        branch = reply["branches"][0]
        return branch["id"], branch["node"], reply["nodes"][0]["token_ids"], reply["usage"]

    def streamed(self, path: str, body: dict[str, Any]) -> Any:
        """Make a call and follow its events."""
        tokens: list[int] = []
        branch: dict[str, Any] = {}
        half: dict[str, list[int]] = {}
        with self.http.stream("POST", path, json={**body, "stream": True}) as answer:
            if answer.status_code >= 400:
                answer.read()
                answer.raise_for_status()
            name = ""
            for line in answer.iter_lines():
                if line.startswith("event: "):
                    name = line[7:]
                elif line.startswith("data: "):
                    data = json.loads(line[6:])
                    if name == "job":
                        branch = data["branches"][0]
                    elif name == "tok":
                        tokens += [entry[1] for entry in data["t"] if entry[1] is not None]
                    elif name == "branch" and data["n_tokens"]:  # without one there is no node
                        half = self.results.half_reported.setdefault(path.split("/")[4], {})
                        half[branch["id"]] = tokens
                    elif name == "done":
                        half.pop(branch["id"], None)
                        if data["status"] != "ok":
                            raise ConnectionError(f"the job has {data['status']}")
                        return branch["id"], branch["node"], tokens, data["usage"]
        raise ConnectionError("the events broke off")

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """Make a call. Raises: HTTPStatusError."""
        answer = self.http.post(path, json=body)
        answer.raise_for_status()
        return answer.json()

    def retry(self, call: Any) -> Any:
        """Make a call until it ends well. Raises: TimeoutError."""
        until = time.monotonic() + PATIENCE_S
        while True:
            try:
                return call()
            except (httpx.HTTPStatusError, httpx.TransportError, ConnectionError) as error:
                if isinstance(error, httpx.HTTPStatusError):
                    status = error.response.status_code
                    error_body = error.response.json()["error"]
                    why = f"{status} {error_body['code']}: {error_body['message']}"
                    if status < 500 and status not in (409, 429):
                        raise
                    wait = float(error.response.headers.get("retry-after", 0.2))
                else:
                    why, wait = "the connection broke", 0.2
                with self.results.lock:
                    self.results.retries[why] += 1
                if time.monotonic() > until:
                    raise TimeoutError(why) from error
                time.sleep(wait)


@contextmanager
def replicas(n: int, port: int, *, haproxy: bool) -> Iterator[str]:
    """Serve with Ray until the end; yields the address."""
    os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_SERVE_LOG_TO_STDERR="0")
    if haproxy:
        os.environ["RAY_SERVE_ENABLE_HA_PROXY"] = "1"
    import ray
    from ray import serve

    from weft.service.scale import app

    folder = tempfile.mkdtemp(prefix="weft-ray-")
    ray.init(
        num_cpus=n,
        include_dashboard=False,
        object_store_memory=128 << 20,
        log_to_driver=False,
        _temp_dir=folder,
        logging_level="error",
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(app({"models": ["tiny"]}), name="weft")
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def pids() -> list[int]:
    """Return the processes of the replicas that this program has started."""
    numbers = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            is_replica = entry.read_bytes().startswith(b"ray::ServeReplica:weft:Replica")
            if is_replica and os.getpid() in ancestors(int(entry.parts[2])):
                numbers.append(int(entry.parts[2]))
        except OSError:
            continue
    return sorted(numbers)


def ancestors(pid: int) -> Iterator[int]:
    """Yield the processes above one."""
    while pid > 1:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        pid = int(stat.rpartition(")")[2].split()[1])
        yield pid


def wrongs(all_reported: dict[str, dict[str, list[int]]], db: str) -> list[str]:
    """Return the differences between the nodes that clients received and those in the database."""
    from weft.service.store.library import Library

    wrong = []
    with Library(db) as library:
        for loom, nodes in all_reported.items():
            kept = library.open(loom)
            there = {node.id: list(node.tokens) for node in kept.loom.walk()}
            kept.close()
            for node, tokens in nodes.items():
                if there.get(node) != tokens:
                    wrong.append(f"{loom} {node}: received {tokens}, stored {there.get(node)}")
    return wrong


def kill_until_felt(results: Results, growing: list[Future[None]]) -> None:
    """Kill a replica; another one, if the first was between two calls, as it seldom is."""
    n_before = results.retries.total()
    while results.retries.total() == n_before and not all(each.done() for each in growing):
        for victim in pids()[:1]:
            os.kill(victim, signal.SIGKILL)
        until = time.monotonic() + FELT_S
        while results.retries.total() == n_before and time.monotonic() < until:
            time.sleep(0.05)


def run(arguments: argparse.Namespace, db: str) -> int:
    """Grow looms, kill a replica in the middle, and report; 0 if all holds."""
    results = Results()
    with replicas(2, arguments.port, haproxy=arguments.haproxy) as url:
        clients = [Client(url, index, results) for index in range(arguments.clients)]
        shares = [len(range(at, arguments.looms, len(clients))) for at in range(len(clients))]
        n_calls = arguments.looms * arguments.calls
        done = threading.Semaphore(0)
        with ThreadPoolExecutor(len(clients)) as pool:
            list(pool.map(Client.make, clients, shares))
            began = time.monotonic()
            growing = [pool.submit(each.grow_all, arguments.calls, done) for each in clients]
            for _ in range(n_calls // 2):
                done.acquire(timeout=PATIENCE_S)
            kill_until_felt(results, growing)
            for future in growing:
                future.result()
        seconds = time.monotonic() - began
        n_replicas = len(pids())
    wrong, half_wrong = wrongs(results.reported, db), wrongs(results.half_reported, db)
    n_half = sum(map(len, results.half_reported.values()))
    later = [each for each in results.cached_of_calls if not each[2]]
    rows = [
        {"what": "looms", "figure": arguments.looms, "must": ""},
        {"what": "calls", "figure": len(results.seconds), "must": n_calls},
        {"what": "calls a second", "figure": len(results.seconds) / seconds, "must": ""},
        {"what": "median ms a call", "figure": 1e3 * median(results.seconds), "must": ""},
        {"what": "slowest call, s", "figure": max(results.seconds), "must": ""},
        {"what": "retries", "figure": sum(results.retries.values()), "must": ""},
        {"what": "calls that did not end well", "figure": len(results.lost), "must": 0},
        {
            "what": "nodes reported",
            "figure": sum(map(len, results.reported.values())),
            "must": n_calls,
        },
        {"what": "of them gone or different", "figure": len(wrong), "must": 0},
        {"what": "ends in responses that were cut off", "figure": n_half, "must": ""},
        {"what": "of them gone or different", "figure": len(half_wrong), "must": 0},
        {
            "what": "calls with cached KV",
            "figure": cached_share(results.cached_of_calls),
            "must": 0.9,
        },
        {"what": "the same, a loom's first left out", "figure": cached_share(later), "must": 0.9},
        {"what": "replicas at the end", "figure": n_replicas, "must": 2},
    ]
    report(
        "scale",
        rows,
        retries=dict(results.retries),
        wrong=(wrong + half_wrong)[:5],
        lost=results.lost[:5],
    )
    is_well = not (wrong or results.lost) and cached_share(later) >= 0.9
    return 0 if is_well and len(results.seconds) == n_calls else 1


def cached_share(calls: list[tuple[int, int, bool]]) -> float:
    """Return the share of calls that had to compute no more than two tokens of their path."""
    return sum(prompt - cached <= 2 for cached, prompt, _ in calls) / max(len(calls), 1)


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--looms", type=int, default=200)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--calls", type=int, default=20, help="of each loom")
    parser.add_argument("--port", type=int, default=8117)
    parser.add_argument("--haproxy", action="store_true", help="HAProxy before the entrance")
    parser.add_argument("--db", help="a PostgreSQL; default: one of its own")
    arguments = parser.parse_args()
    with nullcontext(arguments.db) if arguments.db else own_database() as db:
        os.environ["WEFT_DB"] = db
        return run(arguments, db)


@contextmanager
def own_database() -> Iterator[str]:
    """Start a PostgreSQL for the run; yields its URL."""
    sys.path.insert(0, str(ROOT / "tests"))
    from postgres import cluster

    with cluster() as server:
        yield server.url("scale")


if __name__ == "__main__":
    sys.exit(main())
