"""The engine over a corpus, for the laws: pytest tests/contract --engine laws:CountedEngine."""

from __future__ import annotations

from pathlib import Path

from weft_ngram import NgramEngine

from weft._core.tokens.tokenizer import Tokenizer


class CountedEngine(NgramEngine):
    """Has counted a few sentences, whatever folder it is loaded from."""

    @classmethod
    def load(cls, folder: Path) -> CountedEngine:  # type: ignore[override]
        """Count with the folder's own tokenizer."""
        text = Tokenizer.from_folder(folder)
        told = text.encode("Once upon a time a fox met an owl. " * 9)
        # Texts must be able to end, and a law asks for paths that differ two tokens back.
        told += [*sorted(text.stop_ids), 30, 40, 5, 31, 40, 6]
        return cls(told, text.n_vocab, context_length=2048)
