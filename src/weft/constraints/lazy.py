"""`Lazy`: anything until a trigger comes, then what a constraint allows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, ConstraintError
from .base import Constraint, Matcher

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .compiler import Compiler

_WINDOW = 4096  # bytes of text in which a trigger is looked for


@dataclass(frozen=True, slots=True)
class Lazy(Constraint):
    """Anything until a trigger; from where the trigger begins, the text must fit the constraint.

    triggers: a word (str), a pattern (`re.compile`; it is searched), or a token id (int). The
    trigger's own text is the grammar's beginning, as in tool calls: "<tool_call>" and what follows.
    """

    constraint: Constraint
    triggers: tuple[str | re.Pattern[str] | int, ...]

    def __init__(self, constraint: Any, triggers: Sequence[str | re.Pattern[str] | int]) -> None:
        from .kinds import as_constraint

        inner = as_constraint(constraint)
        given = () if isinstance(triggers, str) else tuple(triggers)
        good = all(
            (isinstance(each, str) and each) or isinstance(each, re.Pattern) or type(each) is int
            for each in given
        )
        if not given or not good:
            raise ConfigError(
                f"triggers are {triggers!r}; allowed are words, re.compile patterns and token ids"
            )
        object.__setattr__(self, "constraint", inner)
        object.__setattr__(self, "triggers", given)

    def compile(self, compiler: Compiler) -> Matcher:
        """See `Constraint.compile`."""
        words = [re.escape(each) for each in self.triggers if isinstance(each, str)]
        patterns = [each.pattern for each in self.triggers if isinstance(each, re.Pattern)]
        either = "|".join(f"(?:{each})" for each in (*words, *patterns))
        search = re.compile(either.encode()) if either else None
        tokens = frozenset(each for each in self.triggers if isinstance(each, int))
        return LazyMatcher(compiler, compiler.matcher(self.constraint), search, tokens)

    def parse(self, text: str) -> Any:
        """See `Constraint.parse`."""
        return text

    def to_dict(self) -> dict[str, Any]:
        """See `Constraint.to_dict`."""
        told = [
            {"pattern": each.pattern} if isinstance(each, re.Pattern) else each
            for each in self.triggers
        ]
        return {"lazy": self.constraint.to_dict(), "triggers": told}


class LazyMatcher(Matcher):
    """Watches the text until a trigger; then `inner` decides."""

    __slots__ = ("_active", "_compiler", "_inner", "_search", "_seen", "_tokens")

    def __init__(
        self,
        compiler: Compiler,
        inner: Matcher,
        search: re.Pattern[bytes] | None,
        tokens: frozenset[int],
    ) -> None:
        self._compiler = compiler
        self._inner = inner
        self._search = search
        self._tokens = tokens
        self._seen = b""
        self._active = False

    def fill(self, bits: NDArray[np.int32]) -> None:
        """See `Matcher.fill`."""
        if self._active:
            self._inner.fill(bits)
        else:
            bits[:] = -1

    def accept(self, token: int) -> None:
        """See `Matcher.accept`."""
        if self._active:
            self._inner.accept(token)
            return
        if token in self._tokens:
            self._inner.accept(token)
            self._active = True
            return
        seen = self._seen + self._compiler.text.token_bytes(token)
        found = self._search.search(seen) if self._search is not None else None
        if found is not None:
            self._begin(seen[found.start() :])
        self._seen = seen[-_WINDOW:]

    def _begin(self, text: bytes) -> None:
        started = self._inner.clone()
        for token in self._compiler.ids_of(text):
            if not started.is_allowed(token):
                raise ConstraintError(
                    f"a trigger came, but the grammar cannot begin with {text!r}: a grammar that is"
                    " switched on by a trigger begins with the trigger's own text"
                )
            started.accept(token)
        self._inner, self._active = started, True

    def is_allowed(self, token: int) -> bool:
        """See `Matcher.is_allowed`."""
        return not self._active or self._inner.is_allowed(token)

    def forced(self) -> list[int]:
        """See `Matcher.forced`."""
        return self._inner.forced() if self._active else []

    @property
    def may_end(self) -> bool:
        """See `Matcher.may_end`."""
        return not self._active or self._inner.may_end

    @property
    def must_end(self) -> bool:
        """See `Matcher.must_end`."""
        return self._active and self._inner.must_end

    def clone(self) -> LazyMatcher:
        """See `Matcher.clone`."""
        twin = LazyMatcher(self._compiler, self._inner.clone(), self._search, self._tokens)
        twin._seen, twin._active = self._seen, self._active
        return twin
