"""Many continuations of one prompt on a CPU, the complete job: prefill, decode, records.

The embedded model in float32, a 512-token prompt, 128 new tokens a branch (the end token is banned,
so every branch has them all), temperature 0.8. Sides, in turn in one run, each in its own process:

  numpy         Loom.grow on the NumPy engine
  torch         Loom.grow on the torch engine
  generate      Transformers' batched generate with num_return_sequences
  sequential    Transformers' generate, one sequence after another, the prompt prefilled every time

tok/s counts new tokens over the job with its prefill; medians over the rounds. Weft's sides
record the log-probability and entropy of every token, generate records nothing. With one thread
the seconds are CPU time, which other work on the machine moves less. Peak memory is that of the
process.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

SIDES = ("numpy", "torch", "generate", "sequential")
N_PROMPT, N_NEW, TEMPERATURE = 512, 128, 0.8
MUST = {
    ("numpy", 8): 2.5,
    ("numpy", 32): 3.5,
    ("torch", 1): 1.15,
    ("torch", 8): 1.5,
    ("torch", 32): 1.6,
}
MAX_SEQUENTIAL = 8  # more would only repeat the figure
TINY = Path(str(files("weft") / "data" / "tiny"))


def prompt_ids() -> list[int]:
    """A story prompt of N_PROMPT tokens."""
    from weft._core.tokens.tokenizer import Tokenizer

    text = Tokenizer.from_folder(TINY)
    story = "Once upon a time a brave fox named Anna lived near the river. " * 60
    return text.encode(story)[:N_PROMPT]


Job = Callable[
    [int], tuple[int, dict[str, Any]]
]  # new tokens a branch → generated tokens, and more


def weft_job(engine: str, n: int) -> Job:
    """Return the job of one of our sides; it returns the generated tokens and its memory."""
    import weft

    lm = weft.load("tiny", engine=engine, dtype="float32")
    ids = prompt_ids()
    options: dict[str, Any] = {"temperature": TEMPERATURE, "seed": 1}
    options["logit_bias"] = {lm.eog_token: float("-inf")}

    def job(n_new: int) -> tuple[int, dict[str, Any]]:
        lm.clear_cache()
        with weft.Loom(lm, ids) as loom:
            n_generated = sum(
                len(node.tokens) for node in loom.grow(n=n, max_tokens=n_new, **options)
            )
            stats = lm.stats()
            ratio = stats.kv_bytes_allocated / max(stats.kv_bytes, 1)
            return n_generated, {"kv_allocated_per_unique": round(ratio, 3)}

    return job


def generate_job(n: int, batch: int) -> Job:
    """Return the peer's job: n sequences, `batch` at a time."""
    import torch
    from transformers import AutoModelForCausalLM

    threads = os.environ.get("OMP_NUM_THREADS")
    if threads:
        torch.set_num_threads(int(threads))
    model = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32).eval()
    ids = torch.tensor([prompt_ids()])
    mask = torch.ones_like(ids)

    def job(n_new: int) -> tuple[int, dict[str, Any]]:
        n_generated = 0
        for _ in range(n // batch):
            out = model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=True,
                temperature=TEMPERATURE,
                top_k=0,
                num_return_sequences=batch,
                max_new_tokens=n_new,
                min_new_tokens=n_new,
            )
            n_generated += out[:, N_PROMPT:].numel()
        return n_generated, {}

    return job


def child(side: str, n: int) -> None:
    """Run one side once, after a warm-up of a few tokens, and print its results."""
    if side in ("numpy", "torch"):
        job = weft_job(side, n)
    else:
        job = generate_job(n, n if side == "generate" else 1)
    clock = time.process_time if os.environ.get("OMP_NUM_THREADS") == "1" else time.perf_counter
    job(4)
    began = clock()
    n_generated, more = job(N_NEW)
    seconds = clock() - began
    print(json.dumps({"seconds": seconds, "tokens": n_generated, "peak_mb": peak_mb(), **more}))


def peak_mb() -> float:
    """Peak resident memory of this process."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1 << 20 if sys.platform == "darwin" else 1 << 10)


def measure(side: str, n: int, threads: int) -> dict[str, Any]:
    """Run one side in a process of its own."""
    env = dict(os.environ, OMP_NUM_THREADS=str(threads), OPENBLAS_NUM_THREADS=str(threads))
    command = [sys.executable, __file__, "--side", side, "--n", str(n)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def compare(counts: list[int], rounds: int, threads: int, sides: list[str]) -> list[dict[str, Any]]:
    """Run all sides in turn, `rounds` times; return a row a side and count."""
    from common import median

    rows = []
    for n in counts:
        runs_of: dict[str, list[dict[str, Any]]] = {side: [] for side in sides}
        for _ in range(rounds):
            for side in sides:
                count = min(n, MAX_SEQUENTIAL) if side == "sequential" else n
                runs_of[side].append(measure(side, count, threads))
        rates = {
            s: median([f["tokens"] / f["seconds"] for f in runs]) for s, runs in runs_of.items()
        }
        for side, runs in runs_of.items():
            row: dict[str, Any] = {"n": n, "side": side, "tok/s": round(rates[side])}
            if "generate" in rates:
                ratios = [
                    (a["tokens"] / a["seconds"]) / (b["tokens"] / b["seconds"])
                    for a, b in zip(runs, runs_of["generate"], strict=True)
                ]
                row["x generate"] = round(median(ratios), 2)
            row["must"] = MUST.get((side, n), "")
            row["peak MB"] = round(median([f["peak_mb"] for f in runs]))
            row["KV allocated / unique"] = runs[0].get("kv_allocated_per_unique", "")
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--n", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        child(options.side, options.n[0])
        return
    from common import report

    rows = compare(options.n, options.rounds, options.threads, options.sides)
    report("cpu_tree", rows, threads=options.threads, rounds=options.rounds)


if __name__ == "__main__":
    main()
