"""The cost of the remote engine compared with a bare HTTP client with the same requests.

n branches of one prompt, `--tokens` tokens each, streamed with ids and logprobs: by `Loom.grow`,
scheduler and tree included, and by a loop of httpx2 that reads the messages and keeps the ids. Both
sides in turn, `--repeat` times, against a server that answers at once (`canned`, a process of its
own: what is left is the clients' work) or the one that is named. CPU time of this process and wall
clock, medians.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx2
from common import median, report

import weft
from weft import Loom

TINY = str(files("weft") / "data" / "tiny")
PROMPT = "Tell me a story about a fox."
BRANCHES = (1, 8, 32)
Measured = tuple[float, float]


class Canned(BaseHTTPRequestHandler):
    """Answers each request with the same tokens, in the form of vLLM's server, one message each."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, format: str, *args: Any) -> None:
        """Be quiet."""

    def do_GET(self) -> None:
        self._send({"data": [{"id": "tiny", "owned_by": "vllm", "max_model_len": 2048}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if not body.get("stream"):
            probed = {"tokens": ["x"], "token_logprobs": [-1.0], "top_logprobs": [{"x": -1.0}]}
            choice = {"text": "x", "token_ids": [93], "logprobs": probed, "finish_reason": "stop"}
            self._send({"choices": [{"index": at, **choice} for at in range(body.get("n", 1))]})
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        n, n_tokens = body.get("n", 1), body["max_tokens"]
        for at in range(n_tokens):
            for index in range(n):
                logprobs = {
                    "text_offset": [at],
                    "token_logprobs": [-0.125],
                    "tokens": ["x"],
                    "top_logprobs": [{"x": -0.125}],
                }
                choice = {
                    "index": index,
                    "text": "x",
                    "logprobs": logprobs,
                    "finish_reason": "length" if at == n_tokens - 1 else None,
                    "stop_reason": None,
                    "prompt_token_ids": None,
                    "token_ids": [100 + (at * 7 + index) % 500],
                }
                message = {"id": "cmpl-0", "object": "text_completion", "model": "tiny"}
                line = f"data: {json.dumps({**message, 'choices': [choice]})}\n\n".encode()
                self.wfile.write(b"%x\r\n%b\r\n" % (len(line), line))
        self.wfile.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    def _send(self, data: Any) -> None:
        payload = json.dumps(data).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)


def serve_canned() -> None:
    """Be the canned server."""
    ThreadingHTTPServer.request_queue_size = 512
    server = ThreadingHTTPServer(("127.0.0.1", 0), Canned)
    server.daemon_threads = True
    print(server.server_address[1], flush=True)
    threading.Thread(target=lambda: (sys.stdin.read(), server.shutdown()), daemon=True).start()
    server.serve_forever()


def bodies_of(lm: weft.LM, n: int, tokens: int, *, together: bool) -> list[dict[str, Any]]:
    """Return the requests that the engine sends for n branches."""
    prompt = Loom(lm, PROMPT).tokens
    body = {
        "model": "tiny", "prompt": prompt, "max_tokens": tokens, "stream": True, "temperature": 1.0,
        "logprobs": 0, "return_token_ids": True, "seed": 1,
    }  # fmt: skip
    return [{**body, "n": n}] if together else [{**body, "seed": at} for at in range(n)]


class Bare:
    """Asks as a plain program would, over connections that stay open."""

    def __init__(self, base: str) -> None:
        self._base = base
        self._runner = asyncio.Runner()
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        self._client = httpx2.AsyncClient(timeout=None, limits=limits, trust_env=False)

    def ask(self, bodies: list[dict[str, Any]]) -> list[int]:
        """Return every id that came."""
        return self._runner.run(self._all(bodies))

    async def _all(self, bodies: list[dict[str, Any]]) -> list[int]:
        id_lists = await asyncio.gather(*map(self._one, bodies))
        return [token for ids in id_lists for token in ids]

    async def _one(self, body: dict[str, Any]) -> list[int]:
        ids: list[int] = []
        logprobs: list[float] = []
        url = f"{self._base}/completions"
        async with self._client.stream("POST", url, json=body) as response:
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    for choice in json.loads(line[6:])["choices"]:
                        ids += choice["token_ids"]
                        logprobs += choice["logprobs"]["token_logprobs"]
        return ids

    def close(self) -> None:
        """Close the connections."""
        self._runner.run(self._client.aclose())
        self._runner.close()


def measured(work: Callable[[], object]) -> Measured:
    """Return CPU and wall seconds of a call."""
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - cpu, time.perf_counter() - wall


def compare(base: str, n: int, tokens: int, repeat: int, *, together: bool) -> dict[str, object]:
    """Return one row of the table."""
    options = {"together": together, "most": max(BRANCHES)}
    with weft.load(base, TINY, engine_options=options) as lm:
        bodies = bodies_of(lm, n, tokens, together=together)

        def ours() -> int:
            loom = Loom(lm, PROMPT)
            nodes = loom.grow(n=n, max_tokens=tokens, seed=1, stop="no such text", temperature=1.0)
            return sum(len(node.tokens) for node in nodes)

        bare = Bare(base)
        ours(), bare.ask(bodies)
        here: list[Measured] = []
        there: list[Measured] = []
        for _ in range(repeat):
            there.append(measured(lambda: bare.ask(bodies)))
            here.append(measured(ours))
        bare.close()
    cpu, wall = (median([each[at] for each in here]) for at in (0, 1))
    bare_cpu, bare_wall = (median([each[at] for each in there]) for at in (0, 1))
    return {
        "requests": "one, n choices" if together and n > 1 else f"{n} of one choice",
        "n": n,
        "weft CPU ms": 1000 * cpu,
        "bare CPU ms": 1000 * bare_cpu,
        "CPU ratio": cpu / bare_cpu,
        "weft wall ms": 1000 * wall,
        "bare wall ms": 1000 * bare_wall,
        "wall ratio": wall / bare_wall,
        "µs a token": 1e6 * cpu / (n * tokens),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--url", help="a server to ask instead of the canned one")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve_canned()
        return
    process = None
    base = given.url
    if base is None:
        command = [sys.executable, str(Path(__file__).resolve()), "--serve"]
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True
        )
        assert process.stdout is not None
        base = f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
    try:
        shapes = [(n, together) for together in (False, True) for n in BRANCHES if n > together]
        rows = [
            compare(base, n, given.tokens, given.repeat, together=together)
            for n, together in shapes
        ]
        report("remote_overhead", rows, tokens=given.tokens, server=given.url or "canned")
    finally:
        if process is not None:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
