"""An engine in a package of its own: a model that counts n-grams.

It stores no KV, so each row has its full path (`kv="hidden"`). Trees, batching, samplers,
constraints and files come from Weft.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from weft._core.sampling.metrics import score_span
from weft._core.tokens.tokenizer import Tokenizer
from weft.engines.base import Capabilities, Engine, EngineInfo, HostOutput, Row, ScoreSpan
from weft.errors import ConfigError, ForwardError, ModelLoadError, Unsupported


class NgramEngine(Engine):
    """An n-gram model that interpolates all orders up to n."""

    fragments = None

    def __init__(
        self, tokens: Sequence[int], n_vocab: int, *, n: int = 3, context_length: int = 1 << 20
    ) -> None:
        self.n = n
        self.follows: defaultdict[tuple[int, ...], Counter[int]] = defaultdict(Counter)
        for at, token in enumerate(tokens):
            for size in range(n):
                if size <= at:
                    self.follows[tuple(tokens[at - size : at])][token] += 1
        self.closed = False
        self.info = EngineInfo(
            name="ngram",
            model="ngram",
            n_layers=1,
            n_vocab=n_vocab,
            context_length=context_length,
            kv_bytes_per_token=0,
            dtype="float32",
            fingerprint=hashlib.sha256(json.dumps([n, n_vocab, list(tokens)]).encode()).hexdigest(),
            kv="hidden",
            capabilities=Capabilities(families="n-grams", takes="a folder with corpus.txt"),
        )

    @classmethod
    def load(cls, folder: Path, *, corpus: str | None = None, n: int = 3) -> NgramEngine:
        """Count the tokens of the file `corpus`; by default corpus.txt of the folder.

        Weft rejects options that this signature does not name, and loads the folder's tokenizer.
        """
        if n < 1:
            raise ConfigError(f"n is {n}; allowed is 1 or more")
        file = Path(corpus or folder / "corpus.txt")
        if not file.is_file():
            raise ModelLoadError(f"{file} does not exist; the ngram engine counts its tokens")
        config = json.loads((folder / "config.json").read_text("utf-8"))
        tokens = Tokenizer.from_folder(folder).encode(file.read_text("utf-8"))
        return cls(tokens, config["vocab_size"], n=n)

    def after(self, ids: Sequence[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return the logits after a path: float32 [V]. Each longer context has weight 0.75."""
        p = np.full(self.info.n_vocab, 1 / self.info.n_vocab)
        for size in range(min(self.n, len(ids) + 1)):
            counts = self.follows.get(tuple(ids[len(ids) - size :]))
            if counts:
                p *= 0.25
                p[list(counts)] += 0.75 * np.array(list(counts.values())) / counts.total()
        return np.log(p).astype(np.float32)

    def forward(self, rows: Sequence[Row]) -> HostOutput:
        """Run all rows; see `Engine.forward`."""
        if self.closed:
            raise ForwardError("this engine is closed")
        for row in rows:
            if row.adapter is not None:
                raise Unsupported("the ngram engine runs no LoRA adapters")
            if not all(0 <= token < self.info.n_vocab for token in row.tokens):
                raise ForwardError("a token is outside the vocabulary")
        logits = [self.after(row.tokens[: at + 1]) for row in rows for at in row.logits_at]
        scores = [[self.score(row, span) for span in row.scores] for row in rows]
        shape = (len(logits), self.info.n_vocab)
        return HostOutput(np.array(logits, np.float32).reshape(shape), scores)

    def score(self, row: Row, span: ScoreSpan) -> Any:
        """Return the scores of given tokens of a row."""

        def logits(first: int, last: int) -> Any:
            return np.stack([self.after(row.tokens[: at + 1]) for at in range(first, last)])

        return score_span(span, self.info.n_vocab, logits)

    def close(self) -> None:
        """Release the counts."""
        self.closed = True
        self.follows.clear()
