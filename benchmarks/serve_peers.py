"""Weft's server beside another engine's own, on the same weights: 32 clients that share a prompt.

Every client asks /v1/completions for a streamed text after the same 512 tokens, with a seed of its
own, until it has made its calls; the end token is banned, so all texts are of one length. Both
servers are real processes on this machine and are asked by turns, in one run; the client is one
process of its own. Tokens are those that each server counts in its usage.

  llamacpp   weft serve tiny.gguf        beside   python -m llama_cpp.server --model tiny.gguf
  vllm       weft serve --engine vllm    beside   vllm.entrypoints.openai.api_server

`share` is our aggregate tok/s over theirs, the median of the rounds; at least 1 is wanted. A server
may live in an environment of its own: --python vllm=/path/to/python.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from common import ROOT, median, reach_recipe, report
from cpu_tree import TEMPERATURE, TINY, prompt_ids

N_CLIENTS, N_NEW = 32, 64
READY_S = 300
# Without these a call would end those before it, and write a page to the log.
_WHOLE = ("--interrupt_requests", "false", "--verbose", "false")
_WEFT = "import sys; from weft.cli import main; sys.exit(main())"


def model_of(engine: str, folder: Path) -> Path:
    """Return what both servers load."""
    if engine != "llamacpp":
        return TINY
    file = folder / "tiny.gguf"
    if not file.exists():
        reach_recipe()
        from recipe.export_gguf import export_gguf

        export_gguf(TINY, file)
    return file


def command(engine: str, side: str, python: str, model: Path, port: int) -> list[str]:
    """Return how a server is started."""
    if side == "weft":
        words = ["serve", str(model), "--engine", engine, "--port", str(port)]
        return [python, "-c", _WEFT, *words]
    if engine == "vllm":
        own = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        own += ["--port", str(port), "--gpu-memory-utilization", "0.1"]
        return [python, *own, "--dtype", "float32", "--max-model-len", "2048"]
    own = ["-m", "llama_cpp.server", "--model", str(model), "--port", str(port)]
    # Its cache finds a prompt again; without it each call would begin anew.
    return [python, *own, "--n_ctx", "2048", "--cache", "true", *_WHOLE]


@contextmanager
def serving(engine: str, side: str, python: str, model: Path) -> Iterator[str]:
    """Run a server; give its address once it answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as home, tempfile.TemporaryFile() as log:
        # In a folder of its own: the benchmarks' names are no modules of a server's.
        env = {**os.environ, "WEFT_HOME": home, "PYTHONPATH": str(ROOT / "src")}
        process = subprocess.Popen(
            command(engine, side, python, model, port), env=env, stdout=log, stderr=log, cwd=home
        )
        url = f"http://127.0.0.1:{port}/v1"
        try:
            asyncio.run(_ready(url, process))
            yield url
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


async def _ready(url: str, process: subprocess.Popen[bytes]) -> None:
    import httpx2 as httpx

    until = time.monotonic() + READY_S
    async with httpx.AsyncClient() as client:
        while time.monotonic() < until and process.poll() is None:
            try:
                found = (await client.get(f"{url}/models")).json()["data"]
                if found:
                    return
            except (httpx.HTTPError, KeyError, ValueError):
                pass
            await asyncio.sleep(0.2)
    raise SystemExit(f"the server at {url} did not come up, or ended: {process.poll()}")


async def ask(url: str, prompt: str, n_clients: int, n_calls: int, end: int) -> dict[str, float]:
    """Return tokens made, seconds, and the median seconds to a client's first text."""
    import httpx2 as httpx

    firsts: list[float] = []

    async def one(client: httpx.AsyncClient, name: str, number: int) -> int:
        made = 0
        for call in range(n_calls):
            body: dict[str, Any] = {
                "model": name,
                "prompt": prompt,
                "max_tokens": N_NEW,
                "temperature": TEMPERATURE,
                "seed": 1000 * call + number,
                "stream": True,
                "logit_bias": {str(end): -100},
                "stop": [],
            }
            began = time.perf_counter()
            n_chunks = 0
            async with client.stream("POST", f"{url}/completions", json=body) as answer:
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        raise RuntimeError(chunk["error"])
                    if chunk["choices"] and chunk["choices"][0]["text"]:
                        if not n_chunks:
                            firsts.append(time.perf_counter() - began)
                        n_chunks += 1
            if not n_chunks:
                raise RuntimeError(f"{url}: client {number} heard nothing: {answer.status_code}")
            made += N_NEW
        return made

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(timeout=600, limits=limits) as client:
        name = (await client.get(f"{url}/models")).json()["data"][0]["id"]
        await one(client, name, 9999)  # what comes first compiles and fills caches
        firsts.clear()
        began = time.perf_counter()
        made = await asyncio.gather(*(one(client, name, i) for i in range(n_clients)))
        seconds = time.perf_counter() - began
    return {"tokens": sum(made), "seconds": seconds, "first": median(firsts)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("engines", nargs="*", default=["llamacpp"], help="llamacpp, vllm")
    parser.add_argument("--clients", type=int, default=N_CLIENTS)
    parser.add_argument("--calls", type=int, default=1, help="of each client, one after another")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--python", action="append", default=[], metavar="ENGINE=PYTHON")
    given = parser.parse_args()
    pythons = dict(each.split("=", 1) for each in given.python)
    import weft

    with weft.load(TINY, engine="numpy") as lm:
        end, prompt = lm.eog_token, lm.text.decode(prompt_ids(), first=True)
        n_prompt = len(lm.tokenize(prompt))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for engine in given.engines:
            model = model_of(engine, Path(folder))
            found: dict[str, list[dict[str, float]]] = {"weft": [], "theirs": []}
            for _ in range(given.rounds):
                for side, figures in found.items():
                    python = pythons.get(engine, sys.executable)
                    with serving(engine, side, python, model) as url:
                        made = asyncio.run(ask(url, prompt, given.clients, given.calls, end))
                    figures.append(made)
                    print(engine, side, {k: round(v, 2) for k, v in made.items()}, file=sys.stderr)
            rates = {
                side: [each["tokens"] / each["seconds"] for each in figures]
                for side, figures in found.items()
            }
            pairs = zip(rates["weft"], rates["theirs"], strict=True)
            rows.append(
                {
                    "engine": engine,
                    "clients": given.clients,
                    "weft tok/s": median(rates["weft"]),
                    "theirs tok/s": median(rates["theirs"]),
                    "share": median([a / b for a, b in pairs]),
                    "weft first s": median([each["first"] for each in found["weft"]]),
                    "theirs first s": median([each["first"] for each in found["theirs"]]),
                    "must": 1.0,
                }
            )
    report("serve_peers", rows, calls=given.calls, rounds=given.rounds, n_prompt=n_prompt)


if __name__ == "__main__":
    main()
