"""The server against the library: many clients that stream from one prompt, and one batched call.

    python -m benchmarks.server [--clients 64] [--tokens 64] [--rounds 5] [--model tiny]

Both sides in turn, in one run; what counts is the median of the rounds' ratios. The clients are
real ones, over HTTP, in a process of their own: they compete with the server for the cores. So they
are cheap: a socket each, which reads the chunks of its answer, and the JSON of every event that
comes. With --library they are those of httpx2, which cost three times as much, on the cores that
the server runs on; clients elsewhere cost it nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

Events = AsyncIterator[dict[str, Any]]
PROMPT = "Once upon a time there was a fox who lived at the edge of a wood. " * 4


def main() -> None:
    """Run both sides and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--surface", choices=("native", "openai"), default="native")
    parser.add_argument("--library", action="store_true", help="clients of an HTTP library")
    parser.add_argument("--as-clients", metavar="URL", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_clients:
        print(json.dumps(asyncio.run(clients(args.as_clients, args))), flush=True)
        return
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    compare(args)


def compare(args: argparse.Namespace) -> None:
    """Measure the library and the server in turn, over one loaded model each."""
    import weft

    lm = weft.load(args.model)
    ends = dict.fromkeys(lm.text.stop_ids, -1e6)
    with Server(args.model) as server:
        args.bias = {str(token): value for token, value in ends.items()}
        rounds = []
        for at in range(args.rounds + 1):
            result = {**by_library(lm, ends, args, at), **by_clients(server, args, at)}
            result["ratio"] = result["rate"] / result["library"]
            print(f"library {result['library']:8.0f} tok/s   server {result['rate']:8.0f} tok/s"
                  f"   first token {1000 * result['first_s']:.0f} ms")  # fmt: skip
            rounds.append(result)
        # The first round warms both.
        median = {name: statistics.median(r[name] for r in rounds[1:]) for name in rounds[0]}
        print(f"\n{args.clients} clients x {args.tokens} tokens, {args.surface}:"
              f" {median['ratio']:.2f} of the library's {median['library']:.0f} tok/s;"
              f" median time to the first token {1000 * median['first_s']:.0f} ms")  # fmt: skip
        thousands = args.clients * args.tokens / 1000
        library, serving, asking = (
            median[name] / thousands for name in ("library_cpu_s", "server_cpu_s", "clients_cpu_s")
        )
        print(f"CPU seconds a thousand tokens: library {library:.3f}, server {serving:.3f},"
              f" clients {asking:.3f}")  # fmt: skip
        four_levels(server.url)
        short_answers(server.url)


def by_library(
    lm: Any, ends: dict[int, float], args: argparse.Namespace, at: int
) -> dict[str, float]:
    """Grow all branches in one call; tokens a second, and the CPU's seconds."""
    import weft

    loom = weft.Loom(lm, f"{at} {PROMPT}", template=False)
    began, cpu = time.perf_counter(), time.process_time()
    nodes = loom.grow(n=args.clients, max_tokens=args.tokens, logit_bias=ends, seed=at)
    rate = sum(len(node.tokens) for node in nodes) / (time.perf_counter() - began)
    return {"library": rate, "library_cpu_s": time.process_time() - cpu}


def by_clients(server: Server, args: argparse.Namespace, at: int) -> dict[str, float]:
    """Let a process of clients stream, each one branch of one loom."""
    command = [sys.executable, "-m", "benchmarks.server", "--as-clients", server.url]
    command += ["--clients", str(args.clients), "--tokens", str(args.tokens)]
    command += ["--model", args.model, "--surface", args.surface]
    command += ["--library"] * args.library
    given = json.dumps({"at": at, "bias": args.bias})
    cpu = server.cpu_s()
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=True)
    return {**json.loads(done.stdout), "server_cpu_s": server.cpu_s() - cpu}


async def clients(url: str, args: argparse.Namespace) -> dict[str, float]:
    """Be all clients: one connection each, all at once."""
    given = json.loads(sys.stdin.read())
    prompt = f"{given['at']} {PROMPT}"
    loom = post(url, "/api/v1/looms", {"prompt": prompt, "template": False})["id"]
    if args.surface == "native":
        path = f"/api/v1/looms/{loom}/nodes/0/generate"
        body = {"stream": True, "max_tokens": args.tokens, "logit_bias": given["bias"]}
    else:
        path = "/v1/completions"
        body = {
            "model": args.model, "prompt": prompt, "stream": True, "max_tokens": args.tokens,
            "logit_bias": {token: -100 for token in given["bias"]}, "temperature": 1,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
    read = by_httpx(url, args.clients) if args.library else partial(by_socket, url)
    began, cpu = time.perf_counter(), time.process_time()
    work = (one(read(path, {**body, "seed": at}), began) for at in range(args.clients))
    results = await asyncio.gather(*work)
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    n_tokens = sum(n for n, _ in results)
    if n_tokens != args.clients * args.tokens:
        raise SystemExit(f"{n_tokens} tokens came, of {args.clients * args.tokens}")
    firsts = statistics.median(first for _, first in results)
    return {"rate": n_tokens / seconds, "first_s": firsts, "clients_cpu_s": cpu}


async def one(events: Events, began: float) -> tuple[int, float]:
    """Stream once; return how many tokens came, and when the first did."""
    n, first = 0, 0.0
    async for data in events:
        has_text = any(choice.get("text") for choice in data.get("choices") or ())
        if not first and (data.get("t") or has_text):
            first = time.perf_counter() - began
        # A chunk of /v1 has several tokens: they are counted by the usage, which comes last.
        usage = data.get("usage") or {} if "choices" in data else {}
        n += len(data.get("t", ())) or usage.get("completion_tokens", 0)
    return n, first


async def by_socket(url: str, path: str, body: dict[str, Any]) -> Events:
    """Post a request and yield the JSON of each event of its answer."""
    host = urlsplit(url)
    reader, writer = await asyncio.open_connection(host.hostname, host.port)
    content = json.dumps(body).encode()
    writer.write(
        f"POST {path} HTTP/1.1\r\nHost: {host.netloc}\r\nContent-Type: application/json\r\n"
        f"Accept: */*\r\nContent-Length: {len(content)}\r\n\r\n".encode()
        + content
    )
    head = await reader.readuntil(b"\r\n\r\n")
    if b" 200 " not in head.partition(b"\r\n")[0] or b"chunked" not in head:
        raise SystemExit(head.decode())
    left = b""
    while n_bytes := int(await reader.readuntil(b"\r\n"), 16):
        chunk = await reader.readexactly(n_bytes + 2)
        *events, left = (left + chunk[:-2]).split(b"\n\n")
        for event in events:
            for line in event.split(b"\n"):
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])
    writer.close()


def by_httpx(url: str, n: int) -> Callable[[str, dict[str, Any]], Events]:
    """Return the same by an HTTP library, with so many connections."""
    import httpx2 as httpx

    client = httpx.AsyncClient(base_url=url, timeout=600, limits=httpx.Limits(max_connections=n))

    async def events(path: str, body: dict[str, Any]) -> Events:
        async with client.stream("POST", path, json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    yield json.loads(line[6:])

    return events


def post(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Post a request and return its answer."""
    request = Request(url + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urlopen(request, timeout=600) as answer:
        reply: dict[str, Any] = json.load(answer)
        return reply


def four_levels(url: str) -> None:
    """Grow 4 x 4 x 4 and say how much of it was read."""
    import httpx2 as httpx

    with httpx.Client(base_url=url, timeout=600) as client:
        prompt = {"prompt": f"Another one. {PROMPT}", "template": False}
        loom = client.post("/api/v1/looms", json=prompt).json()["id"]
        before = client.get("/api/v1/kv").json()["data"][0]
        for _ in range(3):
            body = {"n": 4, "max_tokens": 8, "wait": True, "force": True}
            client.post(f"/api/v1/looms/{loom}/generate", json=body).raise_for_status()
        after = client.get("/api/v1/kv").json()["data"][0]
        n = client.get(f"/api/v1/looms/{loom}/nodes/0").json()["n_tokens"]
        read, reused = (after[name] - before[name] for name in ("prefilled", "reused"))
        print(f"4 x 4 x 4 from {n} tokens: prefilled {read}, reused {reused}")


def short_answers(url: str, n: int = 100) -> None:
    """Say how long short answers take, one after the other on a connection that is kept."""
    connection, took = HTTPConnection(urlsplit(url).netloc, timeout=60), []
    for _ in range(n):
        began = time.perf_counter()
        connection.request("GET", "/v1/models")
        connection.getresponse().read()
        took.append(time.perf_counter() - began)
    connection.close()
    took.sort()
    print(f"a short answer: {1000 * took[n // 2]:.1f} ms (median of {n}),"
          f" {1000 * took[n * 95 // 100]:.1f} ms (95th of a hundred)")  # fmt: skip


class Server:
    """`weft serve` in a process of its own, on a free port, with looms of its own."""

    def __init__(self, model: str) -> None:
        self.model = model

    def __enter__(self) -> Server:
        self._home = tempfile.TemporaryDirectory()
        environment = {**os.environ, "WEFT_HOME": self._home.name, "OPENBLAS_NUM_THREADS": "1"}
        environment.pop("WEFT_DB", None)
        command = [sys.executable, "-m", "weft", "serve", self.model, "--port", "0"]
        self._process = subprocess.Popen(
            command, env=environment, stderr=subprocess.PIPE, text=True
        )
        assert self._process.stderr is not None
        lines = (line.split(" at ") for line in self._process.stderr)
        self.url = next(parts[1].strip() for parts in lines if parts[-1].startswith("http"))
        self._wait()
        return self

    def cpu_s(self) -> float:
        """Return the seconds of CPU that it has used; 0 where the system does not say so."""
        stat = Path(f"/proc/{self._process.pid}/stat")
        if not stat.exists():
            return 0.0
        # After the name, which may have spaces: state … utime stime.
        fields = stat.read_text().rpartition(")")[2].split()
        return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")

    def _wait(self) -> None:
        import httpx2 as httpx

        until = time.monotonic() + 600
        with httpx.Client(base_url=self.url) as client:
            while client.get("/readyz").status_code != 200 and time.monotonic() < until:
                time.sleep(0.1)

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(30)
        self._home.cleanup()


if __name__ == "__main__":
    main()
