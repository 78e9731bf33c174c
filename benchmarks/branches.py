"""Very many live branches: CPU time of forks and commits, and memory each, against their KV.

All are forked from one prompt and committed together, token by token. Memory is what the process
grew by, the engine's own figure, and what Python allocated; logits rows are kept under one budget
for all, which is taken off. Ends all but one at last.
"""

from __future__ import annotations

import argparse
import json
import time
import tracemalloc
from pathlib import Path

import weft
from weft import Branch, BranchStore
from weft.lm.lm import ROW_CACHE_BYTES


def resident_bytes() -> int:
    """Bytes of this process that are in memory (Linux)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def measure(engine: str, n: int, n_tokens: int, *, trace: bool) -> list[dict[str, float]]:
    """Measure the forks and each commit, a row each; `trace`: also Python's own bytes."""
    lm = weft.load("tiny", engine=engine, kv_budget="16GiB")
    root, store = Branch.create(lm, seed=1, temperature=1.5), BranchStore(lm)
    root.prefill(lm.tokenize("Use 4 9 10 13 to make 24."))
    warm = [root.fork() for _ in range(8)]
    store.commit([(branch, branch.produce().token) for branch in warm])
    for branch in warm:
        branch.prune()
    if trace:
        tracemalloc.start()
    before, kv_before = resident_bytes(), lm.stats().kv_bytes
    rows = []

    def note(what: str, began: float) -> None:
        usage = lm.engine.fragments.usage()
        kept = min(ROW_CACHE_BYTES, n * 4 * lm.info.n_vocab) if what != "fork" else 0
        rows.append(
            {
                "what": what,
                "cpu_ms": (time.process_time() - began) * 1e3 / n,
                "kv_bytes": (lm.stats().kv_bytes - kv_before) / n,
                "engine_bytes": usage.bytes / n,
                "process_bytes": (resident_bytes() - before - kept) / n,
                "python_bytes": tracemalloc.get_traced_memory()[0] / n if trace else 0,
            }
        )

    began = time.process_time()
    branches = [root.fork() for _ in range(n)]
    note("fork", began)
    for number in range(n_tokens):
        pieces = store.produce(branches)
        began = time.process_time()
        store.commit([(b, p.token) for b, p in zip(branches, pieces, strict=True)])
        note(f"commit {number + 1}", began)
    began = time.process_time()
    store.retain_only(branches[0])
    note("retain_only", began)
    lm.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--branches", type=int, nargs="+", default=[2_000, 10_000, 20_000])
    parser.add_argument("--tokens", type=int, default=2)
    parser.add_argument("--engine", default="numpy")
    parser.add_argument("--trace", action="store_true", help="Python's own bytes too; slower")
    options = parser.parse_args()
    record = []
    columns = ("cpu_ms", "kv_bytes", "engine_bytes", "process_bytes", "python_bytes")
    print(f"{'branches':>8} {'':12}", *(f"{name:>13}" for name in columns), " each")
    for n in options.branches:
        for row in measure(options.engine, n, options.tokens, trace=options.trace):
            print(f"{n:8} {row['what']:12}", *(f"{row[name]:13,.3f}" for name in columns))
            record.append({"n": n, **row})
    print(json.dumps({"benchmark": "branches", "engine": options.engine, "rows": record}))


if __name__ == "__main__":
    main()
