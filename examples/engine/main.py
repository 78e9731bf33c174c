"""A third-party engine, loaded by its name where its package is installed."""

from __future__ import annotations

import argparse
import shutil
import tempfile
from importlib.resources import files
from pathlib import Path

from weft_ngram import NgramEngine

import weft
from weft._core.tokens.tokenizer import Tokenizer
from weft.engines import plugins

CORPUS = "The fox saw the owl. The owl saw the moon. The moon saw the fox and the owl.\n" * 20


def folder_with_corpus(folder: Path) -> Path:
    """Put a tokenizer, a config.json and something to count into a folder."""
    tiny = Path(str(files("weft") / "data" / "tiny"))
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / name, folder)
    (folder / "corpus.txt").write_text(CORPUS, encoding="utf-8")
    return folder


def load(folder: Path) -> weft.LM:
    """Load by name, as users do; without the entry point an engine object does, too."""
    if "ngram" in plugins():
        return weft.load(folder, engine="ngram", engine_options={"n": 4})
    return weft.LM(NgramEngine.load(folder, n=4), Tokenizer.from_folder(folder))


def main(model: str | None = None) -> None:
    """Grow three branches and look at what may come next.

    model: a folder with corpus.txt, a tokenizer and config.json; None makes one.
    """
    with tempfile.TemporaryDirectory() as name:
        lm = load(Path(model) if model else folder_with_corpus(Path(name)))
        loom = weft.Loom(lm, "The fox", template=False)
        for child in loom.grow(n=3, max_tokens=12, stop=".", seed=1, temperature=1.5):
            print(f"{child.mean_p:.2f} {child.text!r}")
        best = weft.Loom(lm, "The owl saw the", template=False).next(top=1)[0]
        print(f"after 'The owl saw the': {best.text!r}, p {best.p:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a folder with config.json, a tokenizer and corpus.txt")
    main(parser.parse_args().model)
