"""Eight answers and two revisions of each, on a model that mlx-lm loaded."""

from __future__ import annotations

import sys
from contextlib import redirect_stdout
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory

from mlx_lm import convert, load

from weft.compat.n8loom import Loom  # in place of: from n8loom import Loom
from weft.samples import word_problem


def answers(folder: str, max_tokens: int = 128) -> list[str]:
    model, tokenizer = load(folder)[:2]
    root = Loom(model, tokenizer, word_problem)
    start = root.add_text_child("I will solve this problem step by step.\n")
    start.ramify(n=8, temp=0.6, max_tokens=max_tokens, min_p=0.05, seed=1)
    doubt = "\n...Wait. I need to look at the problem again."
    return start.apply_at_leaves(
        lambda leaf: leaf.ramify(doubt) if leaf.terminal else leaf,
        lambda leaf: leaf.ramify(n=2, temp=0.6, max_tokens=max_tokens, min_p=0.05, seed=2),
        lambda leaf: leaf.crown(),
    )


def converted(home: Path, *, four_bit: bool) -> str:
    folder = str(home / "model")
    tiny = str(files("weft") / "data" / "tiny")
    with redirect_stdout(sys.stderr):
        convert(tiny, folder, dtype="float32", quantize=four_bit, q_bits=4, q_group_size=64)
    return folder


def main(*, four_bit: bool = False, max_tokens: int = 128) -> None:
    with TemporaryDirectory() as home:
        texts = answers(converted(Path(home), four_bit=four_bit), max_tokens)
    for answer in texts:
        print("---", answer.splitlines()[-1])
    print(f"{len(texts)} answers")


if __name__ == "__main__":
    main(four_bit="--4bit" in sys.argv)
