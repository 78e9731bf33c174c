"""`TokenMatcher`: which tokens of ours a server's words are."""

from __future__ import annotations

from functools import cached_property

from ..._core.tokens.tokenizer import Tokenizer
from ...errors import ForwardError
from .responses import ChoiceDelta
from .text_pieces import MOST_BYTES, PieceTokenizer, piece_id

Figures = list[float] | None


class TokenMatcher:
    """Turns what is told of new text into tokens, with a logprob each where that is known.

    Ids are taken as they are; names of tokens are looked up by their bytes; text alone is
    tokenised as what goes on after other text, and has no logprobs.
    """

    def __init__(self, text: Tokenizer, n_vocab: int) -> None:
        self.text = text
        self.n_vocab = n_vocab
        self.is_pieces = isinstance(text, PieceTokenizer)

    def tokens(self, told: ChoiceDelta) -> tuple[list[int], Figures]:
        """Return the new tokens, the end token among them where it was told as one."""
        if told.ids is not None and not self.is_pieces:
            wrong = [each for each in told.ids if not 0 <= each < self.n_vocab]
            if wrong:
                raise ForwardError(
                    f"the server generated token {wrong[0]}, and the tokenizer has {self.n_vocab};"
                    " give the tokenizer made for this model"
                )
            return told.ids, _figures(told, len(told.ids))
        named = self._named(told)
        if named is not None:
            return named
        return (self.text.continuation(told.text) if told.text else []), None

    def _named(self, told: ChoiceDelta) -> tuple[list[int], Figures] | None:
        """Return the tokens by their names, where these are the text."""
        names = told.names
        if names is None:
            return None
        is_end = told.finish is not None and bool(names)
        if is_end and (not names[-1] or not self._fits(names, told)):
            names = names[:-1]  # the end token, which may have a name and has no text
        if not self._fits(names, told):
            return None
        if self.is_pieces:
            if any(len(name) > MOST_BYTES for name in names):
                return None
            return [piece_id(name) for name in names], _figures(told, len(names))
        ids = [self._by_bytes.get(name) for name in names]
        known = [each for each in ids if each is not None]
        return (known, _figures(told, len(known))) if len(known) == len(ids) else None

    @staticmethod
    def _fits(names: list[bytes], told: ChoiceDelta) -> bool:
        return b"".join(names) == told.text.encode()

    @cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        found: dict[bytes, int] = {}
        for token, name in enumerate(self.text.vocab_bytes):
            if name and token not in self.text.special_ids:
                found.setdefault(name, token)
        return found


def _figures(told: ChoiceDelta, n: int) -> Figures:
    """Return the logprobs of the first n tokens; None unless all of them are told."""
    found = (told.logprobs or [])[:n]
    known = [each for each in found if each is not None]
    return known if len(known) == n else None
