"""How long a user waits: for the first screen, the first token, the demo, a large vocabulary.

  first screen    `weft`, the complete process
  first token     `weft run PROMPT -n 4`, until the first line begins
  demo            `weft demo`, the complete process
  vocabulary      the bytes of 128,000 tokens, once for each tokenizer
  many places     one greedy token at each of 1,500 nodes, on an engine that computes nothing

The command is a process of its own, timed by the clock; the others are CPU time. Medians.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from common import median, report
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from weft import LM, Loom, samples
from weft._core.tokens.codec import byte_vocab
from weft._core.tokens.tokenizer import Tokenizer
from weft.engines.stub import StubEngine


def command_s(*arguments: str, first: int | None = None) -> float:
    """Seconds of a `weft` command, or until its first bytes are there."""
    with tempfile.TemporaryDirectory() as home:
        began = time.perf_counter()
        with subprocess.Popen(
            [sys.executable, "-m", "weft", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "WEFT_HOME": home, "HF_HUB_OFFLINE": "1"},
        ) as process:
            assert process.stdout is not None
            process.stdout.read(first)
            took = time.perf_counter() - began
            process.communicate()
        assert process.returncode == 0
    return took


def vocabulary_s() -> float:
    """CPU seconds to spell a large byte-level vocabulary."""
    backend = Backend(models.BPE(vocab={f"Ġtoken{i:06d}é": i for i in range(128_000)}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    began = time.process_time()
    byte_vocab(backend)
    return time.process_time() - began


def many_places_s() -> float:
    """CPU seconds of many greedy branches, none of which begins where another does."""
    text = Tokenizer.from_folder(Path(str(files("weft") / "data" / "tiny")))
    with LM(StubEngine(n_vocab=text.n_vocab), text, n_batch=4096) as lm:
        loom = Loom(lm, samples.story)
        nodes = [loom.add([i]) for i in range(1500)]
        began = time.process_time()
        loom.grow(at=nodes, n=1, max_tokens=1, temperature=0)
        return time.process_time() - began


WAITS: dict[str, tuple[Callable[[], float], float | None]] = {
    "first screen": (command_s, 0.5),
    "first token": (lambda: command_s("run", samples.story, "-n", "4", first=4), 1.5),
    "demo": (lambda: command_s("demo"), 60.0),
    "vocabulary": (vocabulary_s, 0.3),
    "many places": (many_places_s, None),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repeat", type=int, default=5)
    repeat = parser.parse_args().repeat
    rows = []
    for name, (wait, must) in WAITS.items():
        took = [wait() for _ in range(repeat)]
        limit = "" if must is None else f"≤ {must:g}"
        rows.append({"wait": name, "s": median(took), "least": min(took), "must": limit})
    report("waits", rows, repeat=repeat)


if __name__ == "__main__":
    main()
