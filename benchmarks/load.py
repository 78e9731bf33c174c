"""Load a real model: CPU seconds and memory of Weft's engines and of the libraries below them.

Each arm is a process of its own: it imports, loads, and generates one token. Columns:

import, load   CPU seconds; Weft imports the library below it while it loads
first          CPU seconds from the start of the process to the first token
RSS            MB that are resident after the first token
peak           MB that were resident at most
share          percent of the load's CPU time that the torch engine's load check takes

Peers: llama.cpp through llama-cpp-python, with the same context, and Transformers.

python benchmarks/load.py --gguf FILE --folder FOLDER [--only NAME …] [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROMPT = "What is the capital of Italy?"
N_CTX = 8192
CACHE = Path.home() / ".cache/weft/models"
# name → what is loaded: "gguf" or "folder"
ARMS = {
    "llama.cpp": "gguf",
    "weft llamacpp": "gguf",
    "weft numpy gguf": "gguf",
    "weft torch gguf": "gguf",
    "Transformers": "folder",
    "weft torch": "folder",
    "Transformers bfloat16": "folder",
    "weft torch bfloat16": "folder",
    "weft numpy": "folder",
    "weft mlx": "folder",
}


def rss_mb() -> float:
    """Return the resident memory of this process in MB."""
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    return pages * resource.getpagesize() / 1e6


def run_llama_cpp(path: str) -> None:
    import llama_cpp

    imported = time.process_time()
    llama = llama_cpp.Llama(path, n_ctx=N_CTX, verbose=False)
    loaded = time.process_time()
    llama(PROMPT, max_tokens=1)
    print_result(imported, loaded)


def run_transformers(path: str, dtype: str) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    imported = time.process_time()
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
    tokenizer = AutoTokenizer.from_pretrained(path)
    loaded = time.process_time()
    with torch.inference_mode():
        model.generate(**tokenizer(PROMPT, return_tensors="pt"), max_new_tokens=1)
    print_result(imported, loaded)


def run_weft(path: str, engine: str, dtype: str) -> None:
    import weft

    imported = time.process_time()
    check_s = time_check(engine)
    options: dict[str, Any] = {"n_ctx": N_CTX} if engine == "llamacpp" else {}
    lm = weft.load(path, engine=engine, dtype=dtype, **options)
    loaded = time.process_time()
    weft.Loom(lm, PROMPT, template=False).grow(n=1, max_tokens=1, show=False)
    print_result(imported, loaded, check_s=sum(check_s))


def time_check(engine: str) -> list[float]:
    """Wrap the torch engine's load check; return a list that its CPU seconds are added to."""
    seconds: list[float] = []
    if engine == "torch":
        from weft.engines.torch.engine import TorchEngine

        start = TorchEngine._start

        def timed(*args: Any) -> None:
            began = time.process_time()
            start(*args)
            seconds.append(time.process_time() - began)

        TorchEngine._start = timed  # type: ignore[method-assign]
    return seconds


def print_result(imported: float, loaded: float, check_s: float = 0.0) -> None:
    first = time.process_time()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6  # from KiB
    row = {"import": imported, "load": loaded - imported, "first": first, "RSS": rss_mb()}
    row |= {"peak": peak, "share": 100 * check_s / (loaded - imported)}
    print(json.dumps(row))


def run_arm(name: str, path: str) -> None:
    if name == "llama.cpp":
        run_llama_cpp(path)
    elif name.startswith("Transformers"):
        run_transformers(path, "bfloat16" if name.endswith("16") else "float32")
    else:
        engine = name.split()[1]
        dtype = "bfloat16" if name.endswith("16") else "float32"
        run_weft(path, engine, "auto" if engine in ("llamacpp", "numpy", "mlx") else dtype)


def measure(name: str, path: str) -> dict[str, float] | None:
    """Run one arm in a process of its own; None if it fails, with its last line printed."""
    environment = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    command = [sys.executable, __file__, "--arm", name, "--path", path]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        print(f"{name}: {done.stderr.strip().splitlines()[-1]}", file=sys.stderr)
        return None
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gguf", default=str(CACHE / "SmolLM2-135M-Instruct.Q4_1.gguf"))
    parser.add_argument("--folder", default=str(CACHE / "SmolLM2-135M-Instruct"))
    parser.add_argument("--only", nargs="*", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    parser.add_argument("--path", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.arm:
        run_arm(given.arm, given.path)
        return
    from common import median, report  # imports Weft, which the peers' processes go without

    results: dict[str, list[dict[str, float]]] = {name: [] for name in given.only}
    for _ in range(given.rounds):
        for name in given.only:  # in turn, so that all run under the same load
            path = given.gguf if ARMS[name] == "gguf" else given.folder
            if (result := measure(name, path)) is not None:
                results[name].append(result)
    rows = [
        {"what": name} | {key: median([run[key] for run in runs]) for key in runs[0]}
        for name, runs in results.items()
        if runs
    ]
    report("load", rows, gguf=given.gguf, folder=given.folder)


if __name__ == "__main__":
    main()
