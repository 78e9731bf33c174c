"""Many continuations of one prompt by a real model on one CPU thread: CPU ms per new token.

SmolLM2 135M, a 512-token prompt, 64 new tokens a branch (end tokens are banned), temperature 0.8.
The arms run in turn in each round, each in a process of its own:

- weft torch float32, weft torch bfloat16, weft numpy: the folder of float32 weights.
- weft llamacpp: the Q4_1 GGUF file with equal weights.
- generate: Transformers in float32, from the folder.

The columns:

- ms: CPU milliseconds per new token of the complete job, prefill included.
- step: the same without the prefill. The time of a job of one token per branch is subtracted.
- x generate: ms of generate over ms of the arm.

All columns are medians over the rounds. Weft records the log-probability and entropy of every
token; generate records nothing.

python benchmarks/real_tree.py [--gguf FILE] [--folder FOLDER] [--only ARM …] [--n N …] [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

from load import CACHE

N_PROMPT, N_NEW, TEMPERATURE = 512, 64, 0.8
TEXT = "Once upon a time a brave fox named Anna lived near the river. " * 60
# name → what is loaded ("gguf" or "folder"), engine, dtype
ARMS = {
    "weft torch float32": ("folder", "torch", "float32"),
    "weft torch bfloat16": ("folder", "torch", "bfloat16"),
    "weft numpy": ("folder", "numpy", "auto"),
    "weft llamacpp": ("gguf", "llamacpp", "auto"),
    "generate": ("folder", "", "float32"),
}
MUST = {("weft torch float32", 1): 1.0}  # x generate
ONE_THREAD = {"numpy": {"threads": 1}, "llamacpp": {"n_threads": 1}}
Job = Callable[[list[int], int], None]  # prompt, new tokens a branch


def weft_job(path: str, engine: str, dtype: str, n: int) -> tuple[list[int], Job]:
    """Return the prompt's ids and the job of an engine of Weft."""
    import weft

    lm = weft.load(path, engine=engine, dtype=dtype, engine_options=ONE_THREAD.get(engine))
    options: dict[str, Any] = {"temperature": TEMPERATURE, "seed": 1, "show": False}
    options["logit_bias"] = dict.fromkeys(lm.text.stop_ids, float("-inf"))

    def job(ids: list[int], n_new: int) -> None:
        lm.clear_cache()
        with weft.Loom(lm, ids) as loom:
            nodes = loom.grow(n=n, max_tokens=n_new, **options)
            assert all(len(node.tokens) == n_new for node in nodes)

    return lm.text.encode(TEXT)[:N_PROMPT], job


def generate_job(path: str, dtype: str, n: int) -> tuple[list[int], Job]:
    """Return the prompt's ids and the job of Transformers' `generate`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()

    def job(ids: list[int], n_new: int) -> None:
        prompt = torch.tensor([ids])
        output = model.generate(
            input_ids=prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=True,
            temperature=TEMPERATURE,
            top_k=0,
            num_return_sequences=n,
            max_new_tokens=n_new,
            min_new_tokens=n_new,
        )
        assert output.shape == (n, len(ids) + n_new)

    return AutoTokenizer.from_pretrained(path)(TEXT)["input_ids"][:N_PROMPT], job


def run_arm(name: str, path: str, n: int) -> None:
    """Run one arm and print its results as JSON."""
    _, engine, dtype = ARMS[name]
    ids, job = weft_job(path, engine, dtype, n) if engine else generate_job(path, dtype, n)
    job(ids[:8], 2)  # warm-up
    times = [time.process_time()]
    for n_new in (1, N_NEW):
        job(ids, n_new)
        times.append(time.process_time())
    first, full = times[1] - times[0], times[2] - times[1]
    step = (full - first) / (n * (N_NEW - 1))
    print(json.dumps({"ms": 1e3 * full / (n * N_NEW), "step": 1e3 * step}))


def measure(name: str, path: str, n: int) -> dict[str, float]:
    """Run one arm in a process of its own."""
    environment = dict(os.environ, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1")
    command = [sys.executable, __file__, "--arm", name, "--path", path, "--n", str(n)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"{name} failed: {done.stderr.strip()}")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def compare(given: argparse.Namespace) -> list[dict[str, object]]:
    """Run all arms in turn; return a row an arm and count."""
    from common import median  # imports Weft, which the peer's process goes without

    rows: list[dict[str, object]] = []
    for n in given.n:
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in given.only}
        for _ in range(given.rounds):
            for name in given.only:
                path = given.gguf if ARMS[name][0] == "gguf" else given.folder
                runs[name].append(measure(name, path, n))
        for name in given.only:
            row: dict[str, object] = {"what": name, "n": n}
            row |= {key: median([run[key] for run in runs[name]]) for key in ("ms", "step")}
            if peers := runs.get("generate"):
                pairs = zip(peers, runs[name], strict=True)
                row["x generate"] = median([peer["ms"] / run["ms"] for peer, run in pairs])
            row["must"] = MUST.get((name, n), "")
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gguf", default=str(CACHE / "SmolLM2-135M-Instruct.Q4_1.gguf"))
    parser.add_argument("--folder", default=str(CACHE / "SmolLM2-135M-Instruct"))
    parser.add_argument("--only", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument("--n", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    parser.add_argument("--path", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.arm:
        run_arm(given.arm, given.path, given.n[0])
        return
    from common import report

    report("real_tree", compare(given), gguf=given.gguf, folder=given.folder, rounds=given.rounds)


if __name__ == "__main__":
    main()
