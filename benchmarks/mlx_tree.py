"""Many continuations of one prompt with MLX, the complete job: prefill, decode, records.

The embedded model in float32 (or 4-bit, or bfloat16), a 512-token prompt, 128 new tokens a branch
(the end token is banned), temperature 0.6, min_p 0.05. Sides, in turn in one run, each in its own
process:

  mlx              Loom.grow on the mlx engine, over the folder
  mlx_handed_over  the same over a model as mlx-lm loads it, which stays as it is
  replicate_once   the prompt prefilled once, its KV repeated for every branch, one batch decoded
  batch_generate   mlx-lm's batch_generate, which prefills the prompt for every branch

tok/s counts new tokens over the complete job, prefill included; medians over the rounds. With
OMP_NUM_THREADS=1 seconds are CPU time, which other work on the machine moves less. Weft's side
records the log-probability and entropy of every token, the others record nothing. Peak memory is
MLX's own figure, weights included.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from cpu_tree import N_NEW, TINY, prompt_ids

SIDES = ("mlx", "mlx_handed_over", "replicate_once", "batch_generate")
FORMS = ("float32", "bfloat16", "4bit")
MUST_RATE, MUST_MEMORY = 1.0, 0.6  # of replicate_once; memory at the most branches

Job = Callable[[int], float]  # new tokens a branch → seconds


def converted(form: str, folder: Path) -> Path:
    """Write the embedded model as mlx-lm's converter does; return the folder."""
    from mlx_lm import convert

    options: dict[str, Any] = {"quantize": True, "q_bits": 4} if form == "4bit" else {"dtype": form}
    convert(str(TINY), str(folder / form), **options)
    return folder / form


def weft_job(side: str, n: int, folder: str) -> Job:
    """Return our job, over a folder or over a model as mlx-lm loads it."""
    import weft

    if side == "mlx":
        lm = weft.load(folder, engine="mlx")
    else:
        from mlx_lm import load

        lm = weft.load(*load(folder)[:2])
    ids = prompt_ids()
    options: dict[str, Any] = {"temperature": 0.6, "min_p": 0.05, "temperature_first": True}
    options["logit_bias"] = {end: float("-inf") for end in lm.text.stop_ids}

    def job(n_new: int) -> float:
        lm.clear_cache()
        began = time.perf_counter()
        with weft.Loom(lm, ids) as loom:
            nodes = loom.grow(n=n, max_tokens=n_new, seed=1, **options)
            assert all(len(node.tokens) == n_new for node in nodes)
        return time.perf_counter() - began

    return job


def child(side: str, n: int, folder: str) -> None:
    """Run one side once, after a warm-up of a few tokens, and print its results."""
    import mlx.core as mx
    from mlx_lm import load
    from peers import mlx as peers

    job: Job
    if side.startswith("mlx"):
        job = weft_job(side, n, folder)
    else:
        model, tokenizer = load(folder)[:2]
        peer, ids = getattr(peers, side), prompt_ids()

        def job(n_new: int) -> float:
            return float(peer(model, tokenizer, ids, n, n_new))

    job(4)
    mx.clear_cache()
    mx.reset_peak_memory()
    began = time.process_time()
    seconds = job(N_NEW)
    cpu = time.process_time() - began
    peak = mx.get_peak_memory() / (1 << 20)
    if os.environ.get("OMP_NUM_THREADS") == "1":
        seconds = cpu
    print(json.dumps({"seconds": seconds, "cpu": cpu, "peak_mb": peak}))


def measure(side: str, n: int, folder: Path) -> dict[str, float]:
    """Run one side in a process of its own."""
    command = [sys.executable, __file__, "--side", side, "--n", str(n), "--folder", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def compare(counts: list[int], rounds: int, sides: list[str], folder: Path) -> list[dict[str, Any]]:
    """Run all sides in turn, `rounds` times; return a row a side and count."""
    from common import median

    rows = []
    for n in counts:
        runs_of: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
        for _ in range(rounds):
            for side in sides:
                runs_of[side].append(measure(side, n, folder))
        for side, runs in runs_of.items():
            row: dict[str, Any] = {"n": n, "side": side}
            row["tok/s"] = round(median([n * N_NEW / run["seconds"] for run in runs]))
            row["CPU s"] = round(median([run["cpu"] for run in runs]), 1)
            row["peak MB"] = round(median([run["peak_mb"] for run in runs]))
            if "replicate_once" in runs_of:
                pairs = list(zip(runs, runs_of["replicate_once"], strict=True))
                rates = [b["seconds"] / a["seconds"] for a, b in pairs]
                peaks = [a["peak_mb"] / b["peak_mb"] for a, b in pairs]
                row["x replicate_once"] = round(median(rates), 2)
                row["x its peak"] = round(median(peaks), 2)
            must = f">= {MUST_RATE}" + (f", <= {MUST_MEMORY}" if n == max(counts) else "")
            row["must"] = must if side.startswith("mlx") else ""
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--n", type=int, nargs="+", default=[8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--form", choices=FORMS, default="float32")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        child(options.side, options.n[0], options.folder)
        return
    from common import report

    with TemporaryDirectory() as home:
        folder = converted(options.form, Path(home))
        rows = compare(options.n, options.rounds, options.sides, folder)
    report("mlx_tree", rows, form=options.form, rounds=options.rounds)


if __name__ == "__main__":
    main()
