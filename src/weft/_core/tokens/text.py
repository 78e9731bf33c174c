"""Incremental detokenization: exact text without partial characters."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence


def token_texts(vocab_bytes: Sequence[bytes], spelling: Callable[[int], str]) -> list[str]:
    """Return a distinct, readable text for every token, by id.

    If a token's bytes are not UTF-8, that is the tokenizer's spelling. If the spelling is the text
    of another token, it is "<0xHH>" for each byte.

    spelling: returns the tokenizer's spelling of an id.
    """
    texts = [each.decode("utf-8", "replace") for each in vocab_bytes]
    broken = [at for at, each in enumerate(vocab_bytes) if not is_utf8(each)]
    taken = set(texts)
    for at in broken:
        own = spelling(at)
        texts[at] = "".join(f"<0x{b:02X}>" for b in vocab_bytes[at]) if own in taken else own
    return texts


def is_utf8(data: bytes) -> bool:
    """Return True if the bytes are complete UTF-8 characters."""
    try:
        data.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


class TextStream:
    """Converts tokens to text one by one; the joined results equal one decode of all bytes.

    Invalid UTF-8 becomes U+FFFD, as with `bytes.decode(errors="replace")`.

    strip_first_space: drop one space before the first text (see `codec.first_space_is_dummy`).
    """

    __slots__ = ("_decoder", "_is_between", "_strip", "_vocab")

    def __init__(self, vocab_bytes: Sequence[bytes], *, strip_first_space: bool = False) -> None:
        self._vocab = vocab_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip = strip_first_space
        self._is_between = True  # two characters: nothing waits in the decoder

    def push(self, token_id: int) -> str:
        """Return the text that is complete with this token; a partial character is buffered."""
        # Models may have more logits than the tokenizer has tokens; those ids are without text.
        piece = self._vocab[token_id] if token_id < len(self._vocab) else b""
        if self._strip and piece:
            self._strip = False
            piece = piece.removeprefix(b" ")
        if self._is_between:
            try:
                return piece.decode()  # usually a token is complete characters
            except UnicodeDecodeError:
                pass
        text = self._decoder.decode(piece)
        self._is_between = not self._decoder.getstate()[0]
        return text

    def peek(self, token_id: int) -> str:
        """Return the text that `push` would return for a token; changes nothing."""
        if self._is_between and not self._strip and token_id < len(self._vocab):
            try:
                return self._vocab[token_id].decode()
            except UnicodeDecodeError:
                pass
        state = self._decoder.getstate(), self._strip, self._is_between
        text = self.push(token_id)
        self._decoder.setstate(state[0])
        _, self._strip, self._is_between = state
        return text

    def clone(self) -> TextStream:
        """Return an independent copy."""
        twin = TextStream(self._vocab, strip_first_space=self._strip)
        twin._decoder.setstate(self._decoder.getstate())
        twin._is_between = self._is_between
        return twin

    @property
    def has_partial_char(self) -> bool:
        """True if a partial character is buffered."""
        return not self._is_between

    def flush(self) -> str:
        """Return the buffered text (U+FFFD for a partial character) and reset the stream."""
        self._is_between = True
        return self._decoder.decode(b"", final=True)
