"""Weft's llamacpp engine compared with a loop by hand over the same C calls, the complete job.

The embedded model as a GGUF file, a 512-token prompt, 128 new tokens a branch (the end token is
banned), temperature 0.8, the same threads and KV type. The loop draws by Gumbel's trick and records
nothing; Weft records the log-probability and entropy of every token. In turn in one run; with one
thread the seconds are CPU time. Share is Weft's tok/s by the loop's, the median of the rounds.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from common import median, reach_recipe, report
from cpu_tree import N_NEW, TEMPERATURE, TINY, prompt_ids
from peers.llamacpp import peer

MUST = 0.95


def ours(path: Path, ids: list[int], n: int, n_threads: int, clock: Any) -> float:
    """Return Weft's tok/s."""
    import weft

    options: dict[str, Any] = {"temperature": TEMPERATURE, "seed": 1}
    with weft.load(path, n_seq_max=n, engine_options={"n_threads": n_threads}) as lm:
        options["logit_bias"] = {lm.eog_token: float("-inf")}

        def job(n_new: int) -> int:
            lm.clear_cache()
            with weft.Loom(lm, ids) as loom:
                return sum(len(e.tokens) for e in loom.grow(n=n, max_tokens=n_new, **options))

        job(4)
        began = clock()
        n_tokens = job(N_NEW)
        return n_tokens / (clock() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--n", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--type", default="f16", help="of the weights: f32, f16, q8_0")
    parser.add_argument("--model", type=Path, help="another GGUF file, for the same prompt's ids")
    given = parser.parse_args()
    reach_recipe()
    from recipe.export_gguf import export_gguf

    clock = time.process_time if given.threads == 1 else time.perf_counter
    ids, rows = prompt_ids(), []
    with tempfile.TemporaryDirectory() as folder:
        path = given.model or Path(folder) / "tiny.gguf"
        if given.model is None:
            export_gguf(TINY, path, given.type)
        for n in given.n:
            pairs = [
                (
                    ours(path, ids, n, given.threads, clock),
                    peer(path, ids, n, N_NEW, n_threads=given.threads, clock=clock),
                )
                for _ in range(given.rounds)
            ]
            row: dict[str, Any] = {"n": n, "weft tok/s": round(median([a for a, _ in pairs]))}
            row["loop tok/s"] = round(median([b for _, b in pairs]))
            row["share"] = round(median([a / b for a, b in pairs]), 3)
            row["must"] = MUST if n > 1 else ""
            rows.append(row)
    report("llamacpp_loop", rows, threads=given.threads, rounds=given.rounds, type=given.type)


if __name__ == "__main__":
    main()
