"""Every installed engine, compared with the best loop of its own library.

The embedded model, a 512-token prompt, n branches of 128 new tokens (the end token banned), sampled
at temperature 0.8: the job with its prefill, through `Loom.grow` and through the library's
own loop, in turn in one run, each in a process of its own:

  torch      Transformers' batched generate with num_return_sequences
  mlx        the better of mlx-lm's batch_generate and "prefill once, repeat the KV, decode a batch"
  llamacpp   a hand-written loop over llama.cpp's C functions: seq_cp, one batch a step
  vllm       vLLM's own generate with n
  numpy      has no library: Transformers' generate

`share` is our tok/s over theirs; at least 0.95 is wanted (0.9 for vllm). Seconds are CPU time with
one thread where all work is in the process, and by the clock for vllm. An engine may live in an
environment of its own: --python vllm=/path/to/python. Servers have remote_overhead.py.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import ROOT, median, reach_recipe, report
from cpu_tree import N_NEW, N_PROMPT, TEMPERATURE, TINY, peak_mb, prompt_ids

WANTED = {"vllm": 0.9}
SHARE = 0.95
BY_THE_CLOCK = ("vllm",)
NEEDS = {
    "numpy": ("torch", "transformers"),
    "torch": ("torch", "transformers"),
    "mlx": ("mlx_lm",),
    "llamacpp": ("llama_cpp", "gguf"),
    "vllm": ("vllm",),
}
Job = Callable[[int], int]  # new tokens a branch → generated tokens


def source(engine: str, folder: Path) -> str:
    """Return what our engine and its peer load; files are written to `folder`."""
    if engine != "llamacpp":
        return str(TINY)
    file = folder / "tiny.gguf"
    if not file.exists():
        reach_recipe()
        from recipe.export_gguf import export_gguf

        export_gguf(TINY, file)
    return str(file)


def our_job(engine: str, model: str, n: int) -> Job:
    """Return the job through Weft."""
    import weft

    if engine == "llamacpp":  # it reads no variable for its threads; the peer's loop has one
        lm = weft.load(model, engine=engine, engine_options={"n_threads": 1})
    else:
        lm = weft.load(model, engine=engine, dtype="float32")
    ids = prompt_ids()
    banned = {lm.eog_token: float("-inf")}

    def job(n_new: int) -> int:
        lm.clear_cache()
        with weft.Loom(lm, ids) as loom:
            grown = loom.grow(
                n=n, max_tokens=n_new, temperature=TEMPERATURE, seed=1, logit_bias=banned
            )
            return sum(len(node.tokens) for node in grown)

    return job


def their_jobs(engine: str, model: str, n: int) -> list[Job]:
    """Return the library's own loops; the best one counts."""
    if engine in ("numpy", "torch"):
        from cpu_tree import generate_job

        job = generate_job(n, n)
        return [lambda n_new: job(n_new)[0]]
    from importlib import import_module

    loops = import_module(f"peers.{engine}").loops(model)
    ids = prompt_ids()

    def job_of(loop: Callable[[list[int], int, int], int]) -> Job:
        return lambda n_new: loop(ids, n, n_new)

    return [job_of(loop) for loop in loops]


def child(engine: str, side: str, n: int, folder: Path) -> None:
    """Run one side once, after a warm-up of a few tokens, and print its results."""
    model = source(engine, folder)
    jobs = [our_job(engine, model, n)] if side == "weft" else their_jobs(engine, model, n)
    clock = time.perf_counter if engine in BY_THE_CLOCK else time.process_time
    rates = []
    for job in jobs:
        job(4)
        began = clock()
        n_generated = job(N_NEW)
        rates.append(n_generated / (clock() - began))
        if n_generated != n * N_NEW:
            raise SystemExit(f"{engine} {side}: {n_generated} tokens instead of {n * N_NEW}")
    print(json.dumps({"rate": max(rates), "peak_mb": peak_mb()}), flush=True)
    for process in multiprocessing.active_children():  # vLLM's outlive what ends like this
        process.kill()
    os._exit(0)  # engines with processes of their own take their time to end


def is_there(python: str, engine: str) -> bool:
    """Return True if an engine and its peer can be imported by a Python."""
    names = ", ".join(map(repr, NEEDS[engine]))
    program = f"import importlib.util as u, sys; sys.exit(not all(map(u.find_spec, [{names}])))"
    return subprocess.run([python, "-c", program], check=False).returncode == 0


def measure(python: str, engine: str, side: str, n: int, folder: Path) -> dict[str, float]:
    """Run one side in a process of its own."""
    env = dict(os.environ, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT / "src"), str(ROOT / "benchmarks"), str(ROOT)])
    words = [python, __file__, "--child", engine, side, str(n), str(folder)]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{engine} {side} n={n}: {done.stderr[-2000:]}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--engines", nargs="+", default=list(NEEDS))
    parser.add_argument("-n", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--python", nargs="+", default=[], help="engine=/path/to/python")
    parser.add_argument("--child", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        engine, side, n, folder = args.child
        child(engine, side, int(n), Path(folder))
    pythons = dict(entry.split("=", 1) for entry in args.python)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        for engine in args.engines:
            python = pythons.get(engine, sys.executable)
            if not is_there(python, engine):
                print(f"{engine}: not installed here", file=sys.stderr)
                continue
            for n in args.n:
                runs_of: dict[str, list[dict[str, float]]] = {"weft": [], "own": []}
                for _ in range(args.rounds):
                    for side, runs in runs_of.items():
                        runs.append(measure(python, engine, side, n, Path(name)))
                ours, own = (median([f["rate"] for f in runs_of[s]]) for s in ("weft", "own"))
                peaks = [median([f["peak_mb"] for f in runs_of[s]]) for s in ("weft", "own")]
                rows.append(
                    {
                        "engine": engine,
                        "n": n,
                        "weft tok/s": round(ours),
                        "own tok/s": round(own),
                        "share": ours / own,
                        "wanted": WANTED.get(engine, SHARE),
                        "weft MB": round(peaks[0]),
                        "own MB": round(peaks[1]),
                    }
                )
    report("engines", rows, n_prompt=N_PROMPT, n_new=N_NEW)


if __name__ == "__main__":
    main()
