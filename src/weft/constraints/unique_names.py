"""JSON objects whose property names are all different, which no grammar can express."""

from __future__ import annotations

import json
from collections.abc import Sequence, Set
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import ConstraintError
from .grammar import GrammarMatcher

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .base import Compiler

_QUOTE, _BACKSLASH, _COMMA, _COLON = b'"\\,:'
_BEGIN_OBJECT, _BEGIN_ARRAY = b"{["
_ENDS = b"}]"


class OpenNames:
    """State of a JSON text: its open objects and their property names. Immutable.

    stack: the names of each open object so far, outermost first; None for an open array.
    is_name: the open string, or the next one, is a property name.
    string: the bytes of the open string; None outside strings.
    is_escaped: the open string ends with a backslash that begins an escape.
    """

    __slots__ = ("is_escaped", "is_name", "stack", "string")

    def __init__(
        self,
        stack: tuple[frozenset[str] | None, ...] = (),
        string: bytes | None = None,
        *,
        is_name: bool = False,
        is_escaped: bool = False,
    ) -> None:
        self.stack = stack
        self.string = string
        self.is_name = is_name
        self.is_escaped = is_escaped

    def after(self, text: bytes) -> OpenNames | None:
        """Return the state after more text; None if an object would have a name twice."""
        stack, string = list(self.stack), self.string
        is_name, is_escaped = self.is_name, self.is_escaped
        start = 0  # of the part of an open string that is in `text`
        for position, byte in enumerate(text):
            if string is not None:
                if is_escaped:
                    is_escaped = False
                elif byte == _BACKSLASH:
                    is_escaped = True
                elif byte == _QUOTE:
                    if is_name:
                        name = json.loads(b'"' + string + text[start:position] + b'"')
                        names = stack[-1]
                        assert names is not None
                        if name in names:
                            return None
                        stack[-1] = names | {name}
                        is_name = False
                    string = None
            elif byte == _QUOTE:
                string, start = b"", position + 1
            elif byte == _BEGIN_OBJECT:
                stack.append(frozenset())
                is_name = True
            elif byte == _BEGIN_ARRAY:
                stack.append(None)
            elif byte in _ENDS:
                del stack[-1:]
                is_name = False
            elif byte == _COMMA:
                is_name = bool(stack) and stack[-1] is not None
        if string is not None:
            string = string + text[start:] if is_name else b""
        return OpenNames(tuple(stack), string, is_name=is_name, is_escaped=is_escaped)

    @property
    def has_escapes(self) -> bool:
        """True if a name of the innermost object has characters that JSON can or must escape."""
        names = (self.stack[-1] if self.stack else None) or ()
        return any(
            character in '"\\\x7f' or character < " " for name in names for character in name
        )

    @property
    def may_repeat(self) -> bool:
        """True if some open object has a name already, which could occur again."""
        return any(self.stack)


class UniqueNamesMatcher(GrammarMatcher):
    """An llguidance matcher of JSON in which no object has a name twice.

    begin: the text before the JSON; names are compared after it. "" if the text begins with JSON.
    """

    __slots__ = ("_begin", "_names", "_waiting")

    def __init__(self, inner: Any, compiler: Compiler, begin: str = "") -> None:
        super().__init__(inner, compiler)
        self._begin = begin.encode()
        self._waiting: bytes | None = b"" if begin else None  # the text so far, without `begin`
        self._names = OpenNames()

    def correct(self, bits: NDArray[np.int32], banned: Set[int], biased: Set[int]) -> None:
        super().correct(bits, banned, biased)
        if not self._names.may_repeat:
            return
        words = bits.view(np.uint32)
        for token in self._candidates():
            word, bit = token // 32, np.uint32(1 << token % 32)
            if words[word] & bit and self._after([token]) is None:
                words[word] &= ~bit

    def _candidates(self) -> list[int]:
        """Return tokens that may complete a repeated name; tokens not in the list cannot."""
        compiler, names = self._compiler, self._names
        candidates = compiler.two_quote_tokens
        if not names.is_name or names.string is None:
            return candidates
        if names.is_escaped or b"\\" in names.string or names.has_escapes:
            return [token for group in compiler.quote_tokens.values() for token in group]
        for name in names.stack[-1] or ():
            begin, rest = name.encode()[: len(names.string)], name.encode()[len(names.string) :]
            if begin == names.string:
                candidates = candidates + compiler.quote_tokens.get(rest, [])
        return candidates

    def _after(self, tokens: Sequence[int]) -> OpenNames | None:
        """Return the state after tokens that the grammar allows; None if a name comes twice."""
        if self._waiting is None:
            spellings = self._compiler.spellings
            ids = (token for token in tokens if token < len(spellings))
            return self._names.after(b"".join(spellings[token] for token in ids))
        text = self._waiting + b"".join(map(self._compiler.text.token_bytes, tokens))
        _, begin, json_text = text.partition(self._begin)
        return self._names.after(json_text) if begin else self._names

    def accept(self, token: int) -> None:
        names = self._after([token]) if super().is_allowed(token) else self._names
        if names is None:
            raise ConstraintError(f"token {token} gives an object a name that it has already")
        super().accept(token)
        self._names = names
        if self._waiting is not None:
            text = self._waiting + self._compiler.text.token_bytes(token)
            self._waiting = None if self._begin in text else text[-len(self._begin) :]

    def is_allowed(self, token: int) -> bool:
        return super().is_allowed(token) and self._after([token]) is not None

    def takes(self, tokens: Sequence[int]) -> bool:
        return super().takes(tokens) and self._after(tokens) is not None

    def forced(self, banned: Set[int] = frozenset(), biased: Set[int] = frozenset()) -> list[int]:
        tokens = super().forced(banned, biased)
        while self._after(tokens) is None:
            tokens.pop()
        return tokens

    def clone(self) -> UniqueNamesMatcher:
        twin = UniqueNamesMatcher(self.inner.deep_copy(), self._compiler)
        twin._begin, twin._waiting, twin._names = self._begin, self._waiting, self._names
        return twin
