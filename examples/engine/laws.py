"""The n-gram engine with a fixed corpus: pytest tests/contract --engine laws:CountedEngine."""

from __future__ import annotations

from pathlib import Path

from weft_ngram import NgramEngine

from weft._core.tokens.tokenizer import Tokenizer


class CountedEngine(NgramEngine):
    """Has counted a few sentences, independent of the folder."""

    @classmethod
    def load(cls, folder: Path) -> CountedEngine:  # type: ignore[override]
        """Count with the folder's tokenizer."""
        text = Tokenizer.from_folder(folder)
        corpus = text.encode("Once upon a time a fox saw an owl. " * 9)
        # Texts must be able to end, and a test needs paths that differ two tokens back.
        corpus += [*sorted(text.stop_ids), 30, 40, 5, 31, 40, 6]
        return cls(corpus, text.n_vocab, context_length=2048)
