"""The laws on a card, with paged KV: seven families in float32, float16 and bfloat16.

truth     a random model, and a tree that `Loom.grow` makes: the row after every leaf is as near
          to the model in float64 as Transformers' own forward in that dtype is; how many texts
          are the same a second time is recorded, and which memory a load selects by default.
          Captured steps come and go, and memory that goes with them is another's then: what that
          writes stays, and rows are as near as before
contract  tests/contract over four of the models in processes of their own, where pytest is
          installed: in float32 all of it, in half precision what needs no equal last bits
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from common import ROOT
from gpu_check import goes_on, n_of_begun
from gpu_model import Record, device, prompt, words

import weft

sys.path.insert(0, str(ROOT / "tests"))
from families import OF_LAWS, build_for_laws
from weft.engines.torch import TorchEngine
from weft.engines.torch.paged import cuda_graph
from weft.engines.torch.weight_layout import merge_sibling_weights

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
# Ours may be so much farther from the truth than Transformers' own forward in the same dtype.
_SLACK = 2.0
_FLOOR = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 3e-2}
# Those that compare full texts, or logits of forwards in other company, to the last bits.
_OF_FLOAT32 = ("asynclm", "branch", "constrained", "runs", "three_faces")
# The repository's own settings ask for plugins, and make errors of warnings where one is missing.
_WITH_PYTEST_ALONE = ["-o", "addopts=--import-mode=importlib", "-o", "filterwarnings=default"]
_REPORT_S = 3.0  # how long pytest may take to say what it has run
# Laws of constraints also need llguidance; without it they are left out, which is recorded.
_OF_CONSTRAINTS = ("constrained", "three_faces")
_N_VOCAB, _N_CTX = 512, 512
_COMPANIES = (1, 2, 4, 8)  # leaves that grow together: a captured step for each
_BLOCK, _BLOCKS = 1 << 22, 16  # 32 MiB, as much as cuBLAS works in, so many times
_OF_CONTRACT = ("llama", "qwen3", "gemma3", "gpt2")
PARTS = ["truth", "contract"]


def truth(family: str, dtype: str, given: dict[str, Any], scale: int) -> dict[str, Any]:
    """Grow a tree and hold its leaves' rows against the model in float64; scale: how long it is."""
    model = build_for_laws(family, DTYPES[dtype], _N_VOCAB, _N_CTX).to(device())
    exact = build_for_laws(family, DTYPES[dtype], _N_VOCAB, _N_CTX).double()
    exact.set_experts_implementation("eager")  # products over groups of rows are not in float64
    merge_sibling_weights(model)  # as one that is loaded there is
    engine = TorchEngine.adopt(model, **{"kv": "paged", **given})
    with weft.LM(engine, words(_N_VOCAB)) as lm:
        loom = weft.Loom(lm, prompt(7 * scale, _N_VOCAB))
        first = loom.grow(n=5, max_tokens=4 * scale, seed=3)
        repeated = [node.tokens for node in loom.grow(n=5, max_tokens=4 * scale, seed=3)]
        same = sum(tokens == node.tokens for tokens, node in zip(repeated, first, strict=True))
        for node in first[:3]:
            node.clip(2 * scale - 1)
            node.grow(n=3, max_tokens=scale, seed=5)
        leaves = loom.leaves
        leaves += grow_with_others(loom, model.device)
        rows = weft.AsyncLM(lm, as_torch=False)
        ours, theirs = [], []
        for node in leaves:
            ids = node.get_prefix_tokens()
            want = _logprobs(exact, ids)
            ours.append(_error(np.asarray(rows.next_token_logprobs_sync(ids)), want))
            theirs.append(_error(_logprobs(model, ids), want))
        stats = engine.stats()
    off = float(np.max(ours))  # Python's own passes over what is no number
    allowed = _SLACK * max(*theirs, _FLOOR[dtype])
    is_near = off <= allowed
    if not is_near:
        raise AssertionError(f"a row is {off:.3g} off; Transformers' is {max(theirs):.3g} off")
    return {
        "off": off,
        "transformers_off": max(theirs),
        "texts_again": same,
        "engine": stats,
        "auto": _chosen(family, dtype),
    }


def grow_with_others(loom: weft.Loom, place: torch.device) -> list[weft.Heddle]:
    """Have captured steps go, another take what memory PyTorch then gives back, and grow again: a
    few new leaves.
    """
    with mock.patch.object(cuda_graph, "_MAX_GRAPHS", 2):
        for n in _COMPANIES:
            loom.grow(n=n, max_tokens=5, seed=n)
        others = []
        if place.type == "cuda":
            torch.cuda.empty_cache()
            others = [torch.zeros(_BLOCK, dtype=torch.int64, device=place) for _ in range(_BLOCKS)]
        for n in _COMPANIES[-2:]:
            grown = loom.grow(n=n, max_tokens=5, seed=n)
    if any(bool(block.any()) for block in others):
        raise AssertionError("a captured step has written where others' memory is")
    return grown[:3]


def _chosen(family: str, dtype: str) -> str:
    """Return the KV memory that an engine selects by default; on a card its kernels must pass."""
    model = build_for_laws(family, DTYPES[dtype], _N_VOCAB, _N_CTX).to(device())
    engine = TorchEngine.adopt(model)
    chosen = type(engine.fragments).__name__
    engine.close()
    if model.device.type == "cuda" and chosen != "PagedBackend":
        raise AssertionError(f"kv='auto' gave {chosen}; the log says why")
    return chosen


def run_concurrently(families: list[str], notes: str) -> None:
    """Run this program for each family at once: a card's kernels are compiled by its host."""
    running = {family: _started(family) for family in families}
    begun = dict.fromkeys(families, 0)
    failed = []
    while running:
        for family, process in list(running.items()):
            code = process.poll()
            before = begun[family]
            if code is not None and goes_on(code):
                begun[family] = n_of_begun(notes, family=family)
            if begun[family] > before:
                running[family] = _started(family)
            elif code is not None:
                failed += [family] if code else []
                del running[family]
        time.sleep(0.2)
    if failed:
        raise SystemExit(f"ended with an error: {', '.join(failed)}")


def _started(family: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, *sys.argv, "--family", family])


def _logprobs(model: Any, ids: list[int]) -> np.ndarray:
    with torch.inference_mode():
        rows = model(torch.tensor([ids], device=model.device), use_cache=False).logits[0, -1]
        logprobs: np.ndarray = rows.double().log_softmax(-1).cpu().numpy()
    return logprobs


def _error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(got - want)) / np.var(want)))


def contract(names: list[str], record: Record, *, until: float, dry: bool) -> None:
    """Run the contract on each engine, some at once; what has not ended by then is ended."""
    if importlib.util.find_spec("pytest") is None:
        record.add("contract", error="not run: pytest is not installed")
        return
    waiting, running = list(names), list[Suite]()
    n_at_once = min(8, max(1, (os.cpu_count() or 1) // 2))
    while waiting or running:
        is_late = time.monotonic() > until
        for suite in running if is_late else ():
            suite.process.send_signal(signal.SIGINT)  # pytest counts what it has run, then
        last = time.monotonic() + _REPORT_S  # for all of them
        while waiting and is_late:
            record.add("contract", engine=waiting.pop(0), error="not run: no time was left")
        while waiting and len(running) < n_at_once:
            running.append(Suite(waiting.pop(0), dry=dry))
        for suite in list(running):
            if suite.process.poll() is not None or is_late:
                running.remove(suite)
                record.add("contract", **suite.outcome(last))
        time.sleep(0.2)


class Suite:
    """One run of the contract, in a process of its own."""

    def __init__(self, name: str, *, dry: bool) -> None:
        self.name, self.began = name, time.monotonic()
        self._out = tempfile.TemporaryFile()
        command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--tb=line"]
        command += ["-p", "no:cacheprovider", "tests/contract", "--engine", f"on_card:{name}"]
        command += ["-m", "not programs and not slow", *_WITH_PYTEST_ALONE]
        if dry:
            command += ["-k", "test_laws and test_2"]
        left_out = () if dry or name.endswith("Float32") else _OF_FLOAT32
        if importlib.util.find_spec("llguidance") is None:
            left_out += _OF_CONSTRAINTS
        self._left_out = sorted(set(left_out))
        command += [f"--ignore=tests/contract/test_{each}.py" for each in self._left_out]
        given = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=given, stdout=self._out, stderr=subprocess.STDOUT
        )

    def result(self, last: float) -> dict[str, Any]:
        """End it, if it has not ended by then, and return what pytest's last lines say."""
        is_late = self.process.poll() is None
        if is_late:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(max(last - time.monotonic(), 0))
            self.process.kill()
        code = self.process.wait()
        self._out.seek(0)
        text = self._out.read().decode(errors="replace")
        self._out.close()
        counted = re.findall(r"(\d+) (passed|failed|errors?|skipped)", text)
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
        result: dict[str, Any] = {"engine": self.name, **{kind: int(n) for n, kind in counted}}
        if self._left_out:
            result["left_out"] = self._left_out
        result["took_s"] = round(time.monotonic() - self.began, 1)
        if failed:
            result["which"] = failed
        if is_late:
            result |= {"error": "ended: no time was left", "tail": text[-1500:]}
        elif code:
            result |= {"error": f"pytest ended with {code}", "tail": text[-1500:]}
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", required=True, help="the file that gets a JSON line a figure")
    parser.add_argument("--dry", action="store_true", help="toy sizes, on any machine")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--family", choices=list(OF_LAWS), help="of the truth; all otherwise")
    parser.add_argument(
        "--until",
        type=float,
        help="when the contract is to end, by time.monotonic() of this machine",
    )
    parser.add_argument("--option", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"))
    options = parser.parse_args()
    until = options.until or time.monotonic() + 150
    record = Record(options.json)
    families = list(OF_LAWS)[: 1 if options.dry else None]
    dtypes = [each for each in DTYPES if not (options.dry and each != "float32")]
    if options.family:
        families, record = [options.family], Record(options.json, family=options.family)
    if "truth" in options.parts and len(families) > 1:
        run_concurrently(families, options.json)
    elif "truth" in options.parts:
        for dtype in reversed(dtypes):  # what models are mostly run in first
            job = partial(truth, families[0], dtype, dict(options.option), 3 if options.dry else 10)
            record.attempt("truth", job, family=families[0], dtype=dtype)
    if "contract" in options.parts:
        names = [
            f"{family.capitalize()}{dtype.capitalize()}"
            for dtype in dtypes
            for family in families
            if family in _OF_CONTRACT
        ]
        contract(names, record, until=until, dry=options.dry)


if __name__ == "__main__":
    main()
