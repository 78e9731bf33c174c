"""CPU time on a machine that other processes use: an engine's own thread count, and fixed ones.

For each number in `--beside`, that many processes count in a loop. Next to them, in turn within one
run, each job loads the model and calls `grow(n=8, max_tokens=30)`: with the engine's own thread
count ("auto") and with those of `--fixed`. Every job is a process of its own. Results are CPU
seconds of the process, medians over `--repeat`. `x` is "auto" over the best fixed count; at
most 1.3 is wanted. `pinned` is the same job on one CPU.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common import median, reach_recipe, report

import weft

WANTED = 1.3
TINY = Path(weft.__file__).parent / "data" / "tiny"
OPTIONS = {"numpy": "threads", "llamacpp": "n_threads"}  # engine options that fix the count
JOB = """
import json, os, sys, time
engine, model, options, pinned, n, tokens = json.loads(sys.argv[1])
if pinned:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
import weft
lm = weft.load(model, engine=engine, engine_options=options)
loaded_s = time.process_time()
loom = weft.Loom(lm, "Once upon a time there was a", template=False)
bans = {token: -1e9 for token in lm.text.stop_ids}
loom.grow(n=n, max_tokens=tokens, seed=1, temperature=1.0, min_p=0.02, logit_bias=bans)
print(json.dumps([loaded_s, time.process_time()]))
"""


def job_s(
    engine: str, model: str, threads: int | str, *, pinned: bool, n: int, tokens: int
) -> tuple[float, float]:
    """Return CPU seconds of a process: up to the loaded model, and in all."""
    environment = {k: v for k, v in os.environ.items() if "_NUM_THREADS" not in k}
    options = {}
    if threads != "auto":
        if engine in OPTIONS:
            options = {OPTIONS[engine]: threads}
        else:
            environment["OMP_NUM_THREADS"] = str(threads)
    arguments = json.dumps([engine, model, options, pinned, n, tokens])
    command = [sys.executable, "-c", JOB, arguments]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    loaded_s, total_s = json.loads(done.stdout)
    return loaded_s, total_s


def count() -> None:
    """Keep a core busy."""
    n = 0
    while True:
        n += 1


@contextmanager
def busy(n: int) -> Iterator[None]:
    """Run `n` busy processes inside the block."""
    processes = [multiprocessing.Process(target=count, daemon=True) for _ in range(n)]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        for process in processes:
            process.terminate()
            process.join()


def tiny_for(engine: str, folder: Path) -> str:
    """Return the embedded model in the format of an engine."""
    if engine != "llamacpp":
        return str(TINY)
    reach_recipe()
    from recipe.export_gguf import export_gguf

    file = folder / "tiny.gguf"
    export_gguf(TINY, file)
    return str(file)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=["numpy", "torch", "mlx", "llamacpp"], default="numpy")
    parser.add_argument("--model", help="a folder or GGUF file; by default the embedded model")
    parser.add_argument("--beside", type=int, nargs="+", default=[0, 2, 4, 8])
    parser.add_argument("--fixed", type=int, nargs="+", default=[1, 2], help="thread counts")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--pinned", action="store_true", help="also on one CPU")
    parser.add_argument("-n", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=30)
    args = parser.parse_args()
    sides: tuple[int | str, ...] = ("auto", *args.fixed)
    places = [(f"{n} busy", n, False) for n in args.beside]
    if args.pinned:
        places.append(("pinned, 0 busy", 0, True))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        model = args.model or tiny_for(args.engine, Path(folder))
        for name, n, pinned in places:
            jobs: dict[int | str, list[tuple[float, float]]] = {side: [] for side in sides}
            with busy(n):
                for _ in range(args.repeat):
                    for side in sides:
                        job = job_s(
                            args.engine, model, side, pinned=pinned, n=args.n, tokens=args.tokens
                        )
                        jobs[side].append(job)
            totals = {side: median([total for _, total in jobs[side]]) for side in sides}
            row: dict[str, object] = {"machine": name}
            row["load auto s"] = median([loaded for loaded, _ in jobs["auto"]])
            row |= {f"{side} s": total for side, total in totals.items()}
            row["x"] = totals["auto"] / min(totals[side] for side in args.fixed)
            rows.append(row)
    regime = {"engine": args.engine, "model": Path(model).name, "n": args.n, "tokens": args.tokens}
    report("busy", rows, budget={"x": WANTED}, **regime)


if __name__ == "__main__":
    main()
