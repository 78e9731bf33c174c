"""`TokenMatcher`: matches a server's text, token names and ids with the tokenizer's ids."""

from __future__ import annotations

from functools import cached_property

from ..._core.tokens.tokenizer import Tokenizer
from ...errors import ForwardError
from .responses import ChoiceDelta
from .text_pieces import MAX_BYTES, PieceTokenizer, piece_id

Logprobs = list[float] | None


class TokenMatcher:
    """Converts new text to tokens, with a logprob each if known.

    Ids are used unchanged. Names of tokens are looked up by their bytes. Text alone is tokenized as
    a continuation, without logprobs.
    """

    def __init__(self, text: Tokenizer, n_vocab: int) -> None:
        self.text = text
        self.n_vocab = n_vocab
        self.is_pieces = isinstance(text, PieceTokenizer)

    def tokens(self, delta: ChoiceDelta) -> tuple[list[int], Logprobs]:
        """Return the new tokens, including the end token if the server returned it as one."""
        if delta.ids is not None and not self.is_pieces:
            wrong = [each for each in delta.ids if not 0 <= each < self.n_vocab]
            if wrong:
                raise ForwardError(
                    f"the server generated token {wrong[0]}, but the tokenizer has {self.n_vocab};"
                    " pass the tokenizer of this model"
                )
            return delta.ids, _complete_logprobs(delta, len(delta.ids))
        named = self._named(delta)
        if named is not None:
            return named
        return (self.text.continuation(delta.text) if delta.text else []), None

    def _named(self, delta: ChoiceDelta) -> tuple[list[int], Logprobs] | None:
        """Return the tokens by their names, if the names form the text."""
        names = delta.names
        if names is None:
            return None
        is_end = delta.finish is not None and bool(names)
        if is_end and (not names[-1] or not self._fits(names, delta)):
            names = names[:-1]  # the end token, which may have a name and has no text
        if not self._fits(names, delta):
            return None
        if self.is_pieces:
            if any(len(name) > MAX_BYTES for name in names):
                return None
            return [piece_id(name) for name in names], _complete_logprobs(delta, len(names))
        matches = [self._by_bytes.get(name) for name in names]
        ids = [each for each in matches if each is not None]
        return (ids, _complete_logprobs(delta, len(ids))) if len(ids) == len(matches) else None

    @staticmethod
    def _fits(names: list[bytes], delta: ChoiceDelta) -> bool:
        """Return True if the names of the tokens form the text of the response."""
        return b"".join(names) == delta.text.encode()

    @cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        """Token id by the token's bytes."""
        ids: dict[bytes, int] = {}
        for token, name in enumerate(self.text.vocab_bytes):
            if name and token not in self.text.special_ids:
                ids.setdefault(name, token)
        return ids


def _complete_logprobs(delta: ChoiceDelta, n: int) -> Logprobs:
    """Return the logprobs of the first n tokens; None unless all of them are known."""
    logprobs = [each for each in (delta.logprobs or [])[:n] if each is not None]
    return logprobs if len(logprobs) == n else None
