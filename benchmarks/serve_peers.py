"""Weft's server and other servers of the same weights, under the same HTTP clients.

Each client sends one streamed request to /v1/completions; all clients start at once. Shapes:

  independent  a 128-token prompt per client
  shared       one 1,000-token prompt for all clients, then 16 tokens of each client's own
  n8           a 128-token prompt per client, n = 8

Every choice has 32 new tokens: temperature 0.8, no filters, a seed, ignore_eos. No prompt was sent
before, except by the other server. Both servers of a pair run at the same time and are measured in
turn. Their clients are this process.

  engine                     peer
  llamacpp                   llama-server with a slot per sequence, 248 at most, on the GGUF file
  torch, numpy, vllm         vLLM's server on the folder of safetensors, float32

Columns: requests and new tokens per second, seconds to the first text (median and 95th percentile
of clients), CPU seconds of the server with its child processes. `share` is Weft's tokens per second
over the peer's in the same round (median), `CPU share` the peer's CPU seconds over Weft's.

python benchmarks/serve_peers.py --llama-server PATH --vllm-python PATH
python benchmarks/serve_peers.py --engine llamacpp --clients 8,64 --shape shared --llama-server PATH
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from common import ROOT, median, report

CACHE = Path.home() / ".cache/weft/models"
ENGINES = ("llamacpp", "torch", "numpy", "vllm")
CLIENTS = (1, 8, 64)
N_NEW, N_CTX = 32, 2048
ROUNDS = {1: 3, 8: 2}  # by clients; others have one
MAX_SLOTS = 248  # sequences that Weft's llamacpp engine has
READY_S = 600
# One token each in SmolLM2's vocabulary, after a space.
WORDS = (
    "river stone market garden winter planet engine bridge window forest summer paper captain"
    " silver village music doctor island morning shadow ocean teacher kitchen mountain station"
    " valley machine horse candle story answer animal color number metal flower street house"
).split()
_ENVIRONMENT = {  # of all servers, unless it is set
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "4",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
_WEFT = "import sys; from weft.cli import main; sys.exit(main())"


class Shape(NamedTuple):
    """Tokens of a prompt that all clients share, tokens of a client's own, and choices."""

    n_shared: int
    n_own: int
    n: int
    must: float


SHAPES = {
    "independent": Shape(0, 128, 1, 0.95),
    "shared": Shape(1000, 16, 1, 1.0),
    "n8": Shape(0, 128, 8, 1.0),
}


class Part(NamedTuple):
    """One measurement: so many clients of a shape."""

    shape: str
    n_clients: int

    @property
    def n_sequences(self) -> int:
        return self.n_clients * SHAPES[self.shape].n

    def prompts(self, round_number: int) -> list[str]:
        """Return a prompt per client; other rounds have other prompts."""
        shape = SHAPES[self.shape]
        numbers = random.Random(f"{self} {round_number}")
        shared = numbers.choices(WORDS, k=shape.n_shared)
        own = [numbers.choices(WORDS, k=shape.n_own) for _ in range(self.n_clients)]
        return [" ".join(["", *shared, *words]) for words in own]


# Clients


class Result(NamedTuple):
    first_s: float
    n_prompt: int
    n_new: int


async def request(port: int, model: str, prompt: str, n: int, seed: int) -> Result:
    """Send one streamed request and read it to its end. Raises: RuntimeError."""
    body = {
        "model": model,
        "prompt": prompt,
        "n": n,
        "max_tokens": N_NEW,
        "temperature": 0.8,
        "top_k": 0,
        "top_p": 1.0,
        "min_p": 0.0,
        "seed": seed,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    start = time.perf_counter()
    first_s, usages = 0.0, list[dict[str, Any]]()
    async for event in events(port, "/v1/completions", json.dumps(body).encode()):
        if "error" in event:
            raise RuntimeError(event["error"])
        if not first_s and any(choice["text"] for choice in event["choices"]):
            first_s = time.perf_counter() - start
        if event.get("usage"):
            usages.append(event["usage"])
    n_new = sum(usage["completion_tokens"] for usage in usages)
    if n_new != n * N_NEW:
        raise RuntimeError(f"port {port}: {n_new} new tokens instead of {n * N_NEW}")
    return Result(first_s, usages[0]["prompt_tokens"], n_new)


async def events(port: int, path: str, body: bytes) -> AsyncIterator[Any]:
    """POST a body; yield the JSON of each server-sent event."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body)
    headers = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    if not headers.startswith("http/1.1 200") or "chunked" not in headers:
        raise RuntimeError(headers + (await reader.read()).decode())
    rest = b""
    while size := int(await reader.readline(), 16):
        rest += (await reader.readexactly(size + 2))[:-2]
        *lines, rest = rest.split(b"\n")
        for line in lines:
            if line.startswith(b"data: {"):
                yield json.loads(line[6:])
    writer.close()


# Servers


@dataclass
class Server:
    """A server process. `command`: its arguments, without the port."""

    command: list[str]
    port: int = 0
    model: str = ""
    process: psutil.Popen = field(init=False)

    @contextmanager
    def running(self) -> Iterator[None]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        with tempfile.TemporaryDirectory() as home, tempfile.TemporaryFile() as log:
            # In a folder of its own: names of benchmarks must not shadow a server's modules.
            own = {"WEFT_HOME": home, "PYTHONPATH": str(ROOT / "src")}
            env = {**_ENVIRONMENT, **os.environ, **own}
            command = [*self.command, "--port", str(self.port)]
            self.process = psutil.Popen(command, env=env, stdout=log, stderr=log, cwd=home)
            try:
                try:
                    self.model = asyncio.run(self._ready())
                    asyncio.run(measure(self, Part("independent", 1), -1))  # compiles, fills caches
                except BaseException:
                    log.seek(0)
                    print(log.read().decode(errors="replace")[-4000:], file=sys.stderr)
                    raise
                yield
            finally:
                self._stop()

    def _stop(self) -> None:
        """Stop the process; kill it and its children if they run 20 s later."""
        with suppress(psutil.NoSuchProcess):
            processes = [self.process, *self.process.children(recursive=True)]
            self.process.send_signal(signal.SIGINT)
            for process in psutil.wait_procs(processes, timeout=20)[1]:
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            self.process.wait()

    async def _ready(self) -> str:
        """Wait until the server is ready; return the model's name."""
        import httpx2 as httpx

        deadline = time.monotonic() + READY_S
        async with httpx.AsyncClient() as client:
            while time.monotonic() < deadline and self.process.poll() is None:
                with suppress(httpx.HTTPError, KeyError, ValueError, IndexError, TypeError):
                    models = await client.get(f"http://127.0.0.1:{self.port}/v1/models")
                    return str(models.json()["data"][0]["id"])
                await asyncio.sleep(0.2)
        raise SystemExit(f"{self.command} is not ready; its exit status is {self.process.poll()}")

    def cpu_s(self) -> float:
        """Return the CPU seconds of the process and its children so far."""
        seconds = 0.0
        for process in [self.process, *self.process.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                seconds += times.user + times.system
        return seconds


def weft_command(engine: str, options: argparse.Namespace) -> list[str]:
    model = options.gguf if engine == "llamacpp" else options.folder
    python = options.vllm_python if engine == "vllm" else sys.executable
    command = [python, "-c", _WEFT, "serve", str(model), "--engine", engine, "--no-browser"]
    if engine == "vllm":
        command += ["--dtype", "float32", "--max-model-len", str(N_CTX)]
    return command


def peer_command(engine: str, part: Part, options: argparse.Namespace) -> list[str]:
    if engine != "llamacpp":
        module = [options.vllm_python, "-m", "vllm.entrypoints.openai.api_server"]
        return [
            *(*module, "--model", str(options.folder), "--dtype", "float32"),
            *("--max-model-len", str(N_CTX)),
        ]
    n_slots = min(part.n_sequences, MAX_SLOTS)
    n_ctx = n_slots * (N_CTX if SHAPES[part.shape].n_shared else 256)
    return [
        *(str(options.llama_server), "--model", str(options.gguf)),
        *("--parallel", str(n_slots), "--ctx-size", str(n_ctx)),
        *("--threads", str(os.environ.get("OMP_NUM_THREADS") or os.cpu_count())),
    ]


# Measurements


async def measure(server: Server, part: Part, round_number: int) -> dict[str, float]:
    """Run all clients of a part against a server."""
    n = SHAPES[part.shape].n
    calls = [
        request(server.port, server.model, prompt, n, seed=1000 * round_number + 8 * i + 10_000)
        for i, prompt in enumerate(part.prompts(round_number))
    ]
    cpu_start, start = server.cpu_s(), time.perf_counter()
    results = await asyncio.gather(*calls)
    wall_s, cpu_s = time.perf_counter() - start, server.cpu_s() - cpu_start
    firsts = sorted(result.first_s for result in results)
    n_new = sum(result.n_new for result in results)
    return {
        "n_prompt": results[0].n_prompt,
        "req/s": part.n_clients / wall_s,
        "tok/s": n_new / wall_s,
        "first p50": median(firsts),
        "first p95": firsts[min(len(firsts) - 1, int(0.95 * len(firsts)))],
        "CPU s": cpu_s,
    }


def measure_part(
    engine: str, part: Part, servers: dict[str, Server], rounds: int | None
) -> list[dict[str, object]]:
    """Return a row per server, of medians over the rounds."""
    runs_of: dict[str, list[dict[str, float]]] = {side: [] for side in servers}
    for number in range(rounds or ROUNDS.get(part.n_clients, 1)):
        for side, server in servers.items():
            runs_of[side].append(asyncio.run(measure(server, part, number)))
            shown = {key: round(value, 2) for key, value in runs_of[side][-1].items()}
            print(engine, *part, side, shown, file=sys.stderr)
    rows: list[dict[str, object]] = []
    for side, results in runs_of.items():
        row: dict[str, object] = {"engine": engine, "shape": part.shape, "clients": part.n_clients}
        row |= {"server": side} | {key: median([r[key] for r in results]) for key in results[0]}
        row |= {"share": "", "CPU share": "", "must": ""}
        rows.append(row)
    pairs = list(zip(*runs_of.values(), strict=True))
    rows[0] = {
        **rows[0],
        "share": median([weft["tok/s"] / peer["tok/s"] for weft, peer in pairs]),
        "CPU share": median([peer["CPU s"] / weft["CPU s"] for weft, peer in pairs]),
        "must": SHAPES[part.shape].must,
    }
    return rows


def measure_engine(
    engine: str, parts: Sequence[Part], options: argparse.Namespace
) -> list[dict[str, object]]:
    """Measure Weft and the peer; llama-server is restarted when the number of slots changes."""
    rows: list[dict[str, object]] = []
    with ExitStack() as of_engine, ExitStack() as of_part:
        weft, peer = Server(weft_command(engine, options)), Server([])
        of_engine.enter_context(weft.running())
        for part in parts:
            command = peer_command(engine, part, options)
            if command != peer.command:
                of_part.close()
                peer = Server(command)
                of_part.enter_context(peer.running())
            rows += measure_part(engine, part, {"weft": weft, "peer": peer}, options.rounds)
    return rows


def missing(engine: str, options: argparse.Namespace) -> str:
    """Return why an engine cannot be measured; "" if it can be."""
    program = "llama-server" if engine == "llamacpp" else "vllm-python"
    model = options.gguf if engine == "llamacpp" else options.folder
    path = getattr(options, program.replace("-", "_"))
    if path is None or not path.exists():
        return f"--{program} is {path}; give the path of an existing program"
    return "" if model.exists() else f"there is no {model}; `make models` downloads it"


def names(allowed: Iterable[str]) -> Callable[[str], list[str]]:
    """Return a parser of names that are separated by commas."""

    def parse(text: str) -> list[str]:
        if wrong := sorted(set(text.split(",")) - set(allowed)):
            raise argparse.ArgumentTypeError(f"{wrong[0]!r}: allowed are {', '.join(allowed)}")
        return text.split(",")

    return parse


def numbers(text: str) -> list[int]:
    return list(map(int, text.split(",")))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", type=names(ENGINES), default=ENGINES[:3], metavar="A,B")
    parser.add_argument("--clients", type=numbers, default=CLIENTS, metavar="1,8,64")
    parser.add_argument("--shape", type=names(SHAPES), default=tuple(SHAPES), metavar="A,B")
    parser.add_argument("--rounds", type=int, help="default: 3 for 1 client, 2 for 8, else 1")
    parser.add_argument("--llama-server", type=Path, help="the program, of the same llama.cpp")
    parser.add_argument("--vllm-python", type=Path, help="Python of an environment with vLLM")
    parser.add_argument("--gguf", type=Path, default=CACHE / "SmolLM2-135M-Instruct.Q4_1.gguf")
    parser.add_argument("--folder", type=Path, default=CACHE / "SmolLM2-135M-Instruct")
    options = parser.parse_args()
    parts = [Part(shape, n_clients) for shape in options.shape for n_clients in options.clients]
    rows: list[dict[str, object]] = []
    for engine in options.engine:
        if why := missing(engine, options):
            print(f"{engine} is skipped: {why}", file=sys.stderr)
        else:
            rows += measure_engine(engine, parts, options)
    if rows:
        report("serve_peers", rows, n_new=N_NEW, gguf=options.gguf, folder=options.folder)


if __name__ == "__main__":
    main()
