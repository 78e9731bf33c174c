"""The server against the library: many clients that stream from one prompt, and one batched call.

    python -m benchmarks.server [--clients 64] [--tokens 64] [--rounds 5] [--model tiny]

Both sides in turn, in one run; what counts is the median of the rounds' ratios. The clients are
real ones, over HTTP, in a process of their own: they compete with the server for the cores.
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
from typing import Any

PROMPT = "Once upon a time there was a fox who lived at the edge of a wood. " * 4


def main() -> None:
    """Run both sides and print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--surface", choices=("native", "openai"), default="native")
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
        ratios, library, first = [], [], []
        for at in range(args.rounds + 1):
            rate = by_library(lm, ends, args, at)
            told = by_clients(server.url, args, at)
            if at:  # the first round warms both
                library.append(rate)
                ratios.append(told["rate"] / rate)
                first.append(told["first_s"])
            print(f"library {rate:8.0f} tok/s   server {told['rate']:8.0f} tok/s"
                  f"   first token {1000 * told['first_s']:.0f} ms")  # fmt: skip
        ratio = statistics.median(ratios)
        print(f"\n{args.clients} clients x {args.tokens} tokens, {args.surface}: {ratio:.2f} of the"
              f" library's {statistics.median(library):.0f} tok/s; median time to the first token"
              f" {1000 * statistics.median(first):.0f} ms")  # fmt: skip
        four_levels(server.url)


def by_library(lm: Any, ends: dict[int, float], args: argparse.Namespace, at: int) -> float:
    """Grow all branches in one call; tokens a second."""
    import weft

    loom = weft.Loom(lm, f"{at} {PROMPT}", template=False)
    began = time.perf_counter()
    made = loom.grow(n=args.clients, max_tokens=args.tokens, logit_bias=ends, seed=at)
    return sum(len(node.tokens) for node in made) / (time.perf_counter() - began)


def by_clients(url: str, args: argparse.Namespace, at: int) -> dict[str, float]:
    """Let a process of clients stream, each one branch of one loom."""
    command = [sys.executable, "-m", "benchmarks.server", "--as-clients", url]
    command += ["--clients", str(args.clients), "--tokens", str(args.tokens)]
    command += ["--model", args.model, "--surface", args.surface]
    given = json.dumps({"at": at, "bias": args.bias})
    done = subprocess.run(command, input=given, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


async def clients(url: str, args: argparse.Namespace) -> dict[str, float]:
    """Be all clients: one connection each, all at once."""
    import httpx2 as httpx

    given = json.loads(sys.stdin.read())
    limits = httpx.Limits(max_connections=args.clients)
    async with httpx.AsyncClient(base_url=url, timeout=600, limits=limits) as client:
        prompt = f"{given['at']} {PROMPT}"
        loom = {"prompt": prompt, "template": False}
        made = (await client.post("/api/v1/looms", json=loom)).json()["id"]
        if args.surface == "native":
            path = f"/api/v1/looms/{made}/nodes/0/generate"
            body = {"stream": True, "max_tokens": args.tokens, "logit_bias": given["bias"]}
        else:
            path = "/v1/completions"
            body = {
                "model": args.model, "prompt": prompt, "stream": True, "max_tokens": args.tokens,
                "logit_bias": {token: -100 for token in given["bias"]}, "temperature": 1,
                "stream_options": {"include_usage": True},
            }  # fmt: skip
        began = time.perf_counter()
        work = (one(client, path, {**body, "seed": at}, began) for at in range(args.clients))
        told = await asyncio.gather(*work)
        seconds = time.perf_counter() - began
    n_tokens = sum(n for n, _ in told)
    firsts = statistics.median(first for _, first in told)
    return {"rate": n_tokens / seconds, "first_s": firsts}


async def one(client: Any, path: str, body: dict[str, Any], began: float) -> tuple[int, float]:
    """Stream once; return how many tokens came, and when the first did."""
    n, first = 0, 0.0
    is_openai = path.startswith("/v1")
    async with client.stream("POST", path, json=body) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if not line.startswith("data: {"):
                continue
            data = json.loads(line[6:])
            has_text = any(choice.get("text") for choice in data.get("choices") or ())
            if not first and (data.get("t") or has_text):
                first = time.perf_counter() - began
            # A chunk of /v1 has several tokens: they are counted by the usage, which comes last.
            usage = data.get("usage") or {}
            n += len(data.get("t", ())) or (usage.get("completion_tokens", 0) if is_openai else 0)
    return n, first


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
        self.url = self._process.stderr.readline().split()[-1]
        self._wait()
        return self

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
