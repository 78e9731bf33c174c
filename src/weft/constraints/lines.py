"""`EachLine`: a constraint that restarts after every line end."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, ConstraintError
from .base import Constraint, Matcher
from .grammar import Grammar, Prefixed
from .kinds import as_constraint

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .base import Compiler

_N_BEGINNINGS = 500  # enough to find one that a space is joined with


@dataclass(frozen=True, slots=True)
class EachLine(Constraint):
    """Lines that each fit a constraint, separated by a line end; the last may lack it.

    After a complete line, the model chooses between a line end and an end token. It may also
    continue the line, if the line's constraint allows it.

    constraint: the constraint of each line, without its line end.

    ends: the texts that may separate lines.

    first: the constraint of the first line; None means the same as for the others.
    """

    constraint: Constraint
    ends: tuple[str, ...]
    first: Constraint | None

    def __init__(
        self, constraint: Any, ends: Sequence[str] = ("\n",), first: Constraint | None = None
    ) -> None:
        given = (ends,) if isinstance(ends, str) else tuple(ends)
        if not given or not all(isinstance(end, str) and end for end in given):
            raise ConfigError(f"ends are {ends!r}; allowed are texts that are not empty")
        object.__setattr__(self, "constraint", as_constraint(constraint))
        object.__setattr__(self, "ends", given)
        object.__setattr__(self, "first", first)

    def compile(self, compiler: Compiler) -> Matcher:
        """Return a matcher that restarts the constraint after each line end.

        Raises: the error of an inner constraint that cannot be compiled.
        """
        fresh = compiler.matcher(self.constraint)
        first = fresh.clone() if self.first is None else compiler.matcher(self.first)
        return EachLineMatcher(compiler, self.ends, fresh, first)

    def to_dict(self) -> dict[str, Any]:
        """Return `{"each_line": data, "ends": [texts]}`, which `from_dict` reads.

        `"first"` is added if the first line has a constraint of its own.
        """
        first = {} if self.first is None else {"first": self.first.to_dict()}
        return {"each_line": self.constraint.to_dict(), "ends": list(self.ends), **first}


def can_begin_after(constraint: Constraint) -> bool:
    """Return True if `after` accepts this constraint: a grammar, or `EachLine` of a grammar."""
    inner = constraint.constraint if isinstance(constraint, EachLine) else constraint
    return isinstance(inner, Grammar)


def warn_of_end_space(ids: Sequence[int], constraint: Constraint, compiler: Compiler) -> None:
    """Log a warning if a prompt's end space belongs to the first token of the constrained text.

    A number's sign gives no warning, because a digit may begin the text as well.

    ids: the tokens before the constrained text.
    """
    text = compiler.text
    if not (ids and text.is_spaces(ids[-1]) and can_begin_after(constraint)):
        return
    is_number = any(each[0].isdigit() for each in compiler.first_texts(constraint))
    signs = "-" if is_number else ""
    beginnings = (each for each in compiler.first_texts(constraint) if each[0] not in signs)
    text.warn_of_end_space(ids, islice(beginnings, _N_BEGINNINGS))


def after(prefix: str, constraint: Constraint) -> Constraint:
    """Return a constraint for the fixed text `prefix` followed by text that `constraint` allows.

    With `EachLine`, only the first line gets the prefix.

    constraint: one that `can_begin_after` accepts.
    """
    if isinstance(constraint, EachLine):
        first = constraint.first or constraint.constraint
        return EachLine(constraint.constraint, constraint.ends, after(prefix, first))
    assert isinstance(constraint, Grammar)
    return Prefixed(prefix, constraint)


class EachLineMatcher(Matcher):
    """Matcher of `EachLine`.

    It has the current line's matcher, and the bytes of a line end that is begun but not complete. A
    line end may span several tokens.
    """

    __slots__ = ("_begun", "_compiler", "_ends", "_fresh", "_has_lines", "_line")

    def __init__(
        self, compiler: Compiler, ends: Sequence[str], fresh: Matcher, line: Matcher
    ) -> None:
        """Start in the first line.

        Args:
            compiler: the tokenizer as constraints need it.
            ends: the texts that may separate lines.
            fresh: a matcher at the start of a line; it is cloned for each further line.
            line: the matcher of the first line; this object changes it.
        """
        self._compiler = compiler
        self._ends = [end.encode() for end in ends]
        self._fresh = fresh
        self._line = line
        self._begun = b""
        self._has_lines = False  # the line is empty, and others are before it

    def fill(
        self,
        bits: NDArray[np.int32],
        banned: Set[int] = frozenset(),
        biased: Set[int] = frozenset(),
    ) -> None:
        if self._begun:
            bits[:] = 0
        else:
            self._line.fill(bits, banned, biased)
        allowed = self._line_end_tokens()
        if self._has_lines:
            allowed |= self._compiler.stop_ids
        words = bits.view("uint32")
        for token in allowed - banned:
            words[token // 32] |= 1 << token % 32

    def accept(self, token: int) -> None:
        if token in self._line_end_tokens():
            begun = self._begun + self._compiler.spellings[token]
            is_complete = begun in self._ends
            self._begun = b"" if is_complete else begun
            if is_complete:
                self._line, self._has_lines = self._fresh.clone(), True
        elif self._begun:
            raise ConstraintError(f"token {token} does not complete the line end")
        elif not (self._has_lines and token in self._compiler.stop_ids):
            self._line.accept(token)
            self._has_lines = False

    def is_allowed(self, token: int) -> bool:
        if token in self._line_end_tokens():
            return True
        if self._begun:
            return False
        is_end = self._has_lines and token in self._compiler.stop_ids
        return is_end or self._line.is_allowed(token)

    def _line_end_tokens(self) -> set[int]:
        """Return the tokens that start a line end here, or continue an incomplete one."""
        if not (self._begun or self._line.may_end):
            return set()
        begun, token_of = self._begun, self._compiler.vocabulary.token
        rest = [end[len(begun) :] for end in self._ends if end.startswith(begun)]
        first_tokens = {token_of(left[:n]) for left in rest for n in range(1, len(left) + 1)}
        return {token for token in first_tokens if token is not None}

    def forced(self, banned: Set[int] = frozenset(), biased: Set[int] = frozenset()) -> list[int]:
        if self._begun or self._has_lines or self._line.may_end:
            return []
        return self._line.forced(banned, biased)

    @property
    def may_end(self) -> bool:
        return not self._begun and (self._has_lines or self._line.may_end)

    @property
    def must_end(self) -> bool:
        return not self._begun and self._line.must_end and not self._line_end_tokens()

    @property
    def failure(self) -> str | None:
        return self._line.failure

    def clone(self) -> EachLineMatcher:
        twin = EachLineMatcher(self._compiler, [], self._fresh, self._line.clone())
        twin._ends, twin._begun = self._ends, self._begun
        twin._has_lines = self._has_lines
        return twin
