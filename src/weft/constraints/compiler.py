"""`Compiler`: constraints made ready for one tokenizer."""

from __future__ import annotations

import threading
from collections import OrderedDict
from functools import cached_property
from typing import TYPE_CHECKING, Any

from .base import Constraint, Matcher

if TYPE_CHECKING:
    from ..tokens.tokenizer import Tokenizer

_KEPT = 64  # compiled constraints, least recently used out first


class Compiler:
    """What constraints need to know of a tokenizer, and those compiled lately.

    text: the tokenizer. n_vocab: tokens that the model has logits for.
    """

    def __init__(self, text: Tokenizer, n_vocab: int) -> None:
        self.text = text
        self.n_vocab = n_vocab
        self._kept: OrderedDict[Constraint, Matcher] = OrderedDict()
        self._lock = threading.Lock()

    def matcher(self, constraint: Constraint) -> Matcher:
        """Return a matcher at the beginning of a constraint. Raises: GrammarError."""
        with self._lock:
            kept = self._kept.get(constraint)
            if kept is not None:
                self._kept.move_to_end(constraint)
                return kept.clone()
        made = constraint.compile(self)
        with self._lock:
            self._kept[constraint] = made
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return made.clone()

    @cached_property
    def guidance(self) -> Any:
        """llguidance's view of the tokenizer. Cost: once, O(vocabulary)."""
        from llguidance import LLTokenizer
        from llguidance._tokenizer import TokenizerWrapper

        ends = sorted(self.text.stop_ids)
        return LLTokenizer(
            TokenizerWrapper(_View(self.text)), n_vocab=self.n_vocab, eos_token=ends or None
        )


class _View:
    """A tokenizer as llguidance asks for it."""

    def __init__(self, text: Tokenizer) -> None:
        self._text = text
        ends = sorted(text.stop_ids)
        self.eos_token_id = text.eos_token_id if text.eos_token_id is not None else ends[0]
        self.bos_token_id = text.bos_token_id
        self.tokens = text.vocab_bytes
        self.special_token_ids = sorted(text.special_ids)

    def __call__(self, text: str | bytes) -> list[int]:
        whole = text.decode("utf-8", "replace") if isinstance(text, bytes) else text
        return self._text.encode(whole, add_bos=False)
