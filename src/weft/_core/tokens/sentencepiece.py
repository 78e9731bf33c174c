"""SentencePiece BPE by scores, as llama.cpp computes it: the pair with the best score merges."""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache, partial

from ...errors import ConfigError
from .codec import Codec
from .special_tokens import encode_literally, pattern_of

_MARK = "▁"  # stands for a space in pieces
_CACHED_WORDS, _LONGEST_CACHED = 1 << 16, 64
_BLANKS = " \t\n\v\f\r"


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceTable:
    """A SentencePiece vocabulary. `spellings` and `scores` have one entry per token id.

    Attributes:
        spellings: pieces as the file writes them, a space as "▁", a byte as "<0x0A>".
        scores: the higher, the earlier a piece is merged.
        byte_ids: byte → token id, for the 256 bytes.
        control_ids: special tokens; a text that spells one gives it only with `special=True`.
        text_ids: added tokens, at which any text is split before pieces are merged.
        unknown_id: the token for unknown text. Its spelling in a text is plain text.
        stripping_ids: tokens that remove the whitespace after them.
        begin_ids, end_ids: tokens before and after a decorated text.
        puts_space: encoding adds a space before a text, and after special tokens.
    """

    spellings: Sequence[str]
    scores: Sequence[float]
    byte_ids: Sequence[int]
    control_ids: frozenset[int]
    text_ids: frozenset[int]
    unknown_id: int | None = None
    stripping_ids: frozenset[int] = frozenset()
    begin_ids: tuple[int, ...] = ()
    end_ids: tuple[int, ...] = ()
    puts_space: bool = True


class SentencePieceCodec(Codec):
    """A vocabulary of SentencePiece pieces with scores, such as that of a GGUF file.
    Thread-safe.
    """

    def __init__(self, pieces: PieceTable) -> None:
        self._pieces = pieces
        self._ids = {spelling: i for i, spelling in enumerate(pieces.spellings)}
        self.special_ids = pieces.control_ids
        self.first_space_is_dummy = pieces.puts_space
        self._merged = lru_cache(_CACHED_WORDS)(self._merge)

    def __len__(self) -> int:
        return len(self._pieces.spellings)

    @cached_property
    def vocab_bytes(self) -> list[bytes]:  # type: ignore[override]
        kept = self._pieces.control_ids | self._pieces.text_ids
        table = [
            (spelling if i in kept else spelling.replace(_MARK, " ")).encode(
                "utf-8", "surrogateescape"
            )
            for i, spelling in enumerate(self._pieces.spellings)
        ]
        for byte, i in enumerate(self._pieces.byte_ids):
            if self._pieces.spellings[i].startswith("<0x"):
                table[i] = bytes((byte,))
        return table

    @cached_property
    def max_token_bytes(self) -> int | None:
        if self._pieces.stripping_ids:
            return None  # they take any number of blanks
        return max(map(len, self.vocab_bytes), default=1)

    def encode(self, text: str, *, special: bool, decorated: bool) -> list[int]:
        try:
            text.encode()
        except (UnicodeEncodeError, AttributeError) as error:
            raise ConfigError(f"{text!r:.60} is no text that can be tokenised: {error}") from error
        ids = self._tokenized(text, special=special)
        if not special and not self._controls.keys().isdisjoint(ids):  # merges gave one
            names = {name: i for i, name in self._controls.items()}
            ids = encode_literally(text, partial(self._tokenized, special=False), names)
        if decorated:
            return [*self._pieces.begin_ids, *ids, *self._pieces.end_ids]
        return ids

    def spelling(self, token_id: int) -> str:
        is_known = 0 <= token_id < len(self._pieces.spellings)
        return self._pieces.spellings[token_id] if is_known else ""

    def id_of(self, spelling: str) -> int | None:
        return self._ids.get(spelling)

    @cached_property
    def _controls(self) -> dict[int, str]:
        """Control tokens: id → text."""
        controls = self._pieces.control_ids - {self._pieces.unknown_id}
        return {i: self._pieces.spellings[i] for i in controls}

    def _tokenized(self, text: str, *, special: bool) -> list[int]:
        """Return the ids of a text, without tokens before and after it."""
        ids: list[int] = []
        is_after_special = True
        for part, token_id in self._parts(text, special=special):
            if token_id is not None:
                ids.append(token_id)
                is_after_special = True
            elif part:
                space = " " if self._pieces.puts_space and is_after_special else ""
                for word in self._words((space + part).replace(" ", _MARK)):
                    is_long = len(word) > _LONGEST_CACHED
                    ids += self._merge(word) if is_long else self._merged(word)
                is_after_special = False
        return ids

    def _parts(self, text: str, *, special: bool) -> Iterator[tuple[str, int | None]]:
        """Split a text at special and added tokens: yield (text, None) and ("", token id).

        special: also split at control tokens.
        """
        cut = self._spelled_all if special else self._spelled_text
        blanks = ""
        for at, part in enumerate(cut.split(text)):
            if at % 2:
                token_id = self._ids[part]
                yield "", token_id
                blanks = _BLANKS if token_id in self._pieces.stripping_ids else ""
            else:
                yield part.lstrip(blanks) if blanks else part, None

    @cached_property
    def _spelled_text(self) -> re.Pattern[str]:
        """A pattern that finds added tokens in a text."""
        return self._spelled(self._pieces.text_ids)

    @cached_property
    def _spelled_all(self) -> re.Pattern[str]:
        """A pattern that finds added and control tokens in a text."""
        return self._spelled(self._pieces.text_ids | self._pieces.control_ids)

    def _spelled(self, ids: frozenset[int]) -> re.Pattern[str]:
        """Return a pattern that finds these tokens in a text."""
        return pattern_of(frozenset(self._pieces.spellings[i] for i in ids))

    def _words(self, text: str) -> list[str]:
        """Split a text before each space that follows a non-space: no piece crosses that border."""
        return _WORD.findall(text) if self._has_words else [text]

    @cached_property
    def _has_words(self) -> bool:
        """True if no piece has a space after another character, so that words are independent."""
        spelled = self._pieces.control_ids | self._pieces.text_ids
        return not any(
            _MARK in spelling and _MARK in spelling.lstrip(_MARK)
            for i, spelling in enumerate(self._pieces.spellings)
            if i not in spelled
        )

    def _merge(self, text: str) -> tuple[int, ...]:
        """Tokenize one word.

        Starting with single characters, the adjacent pair with the best score is merged, the
        leftmost of equals first, until no pair is a piece.
        """
        parts = list(text)
        n = len(parts)
        before, after = list(range(-1, n - 1)), [*range(1, n), -1]
        queue: list[tuple[float, int, int, int]] = []

        def add(left: int, right: int) -> None:
            """Queue the merge of two adjacent parts, if together they are a piece."""
            if left < 0 or right < 0:
                return
            both = parts[left] + parts[right]
            token_id = self._ids.get(both)
            if token_id is not None:
                heapq.heappush(queue, (-self._pieces.scores[token_id], left, right, len(both)))

        for left in range(n - 1):
            add(left, left + 1)
        while queue:
            _, left, right, length = heapq.heappop(queue)
            if not parts[left] or not parts[right]:
                continue
            if len(parts[left]) + len(parts[right]) != length:
                continue  # one of them has been merged since
            parts[left] += parts[right]
            parts[right] = ""
            after[left] = after[right]
            if after[right] >= 0:
                before[after[right]] = left
            add(before[left], left)
            add(left, after[left])
        return tuple(i for part in parts if part for i in self._ids_of(part))

    def _ids_of(self, part: str) -> list[int]:
        """Return the id of a piece, or the ids of its bytes if it is no piece."""
        token_id = self._ids.get(part)
        if token_id is not None:
            return [token_id]
        return [self._pieces.byte_ids[byte] for byte in part.encode()]


_WORD = re.compile(f"{_MARK}+[^{_MARK}]*|[^{_MARK}]+")
