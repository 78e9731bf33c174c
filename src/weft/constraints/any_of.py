"""`AnyOf`: a text that fits at least one of several constraints."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from os.path import commonprefix
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, ConstraintError
from .base import Constraint, Matcher
from .kinds import as_constraint

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .base import Compiler


@dataclass(frozen=True, slots=True)
class AnyOf(Constraint):
    """Text that fits at least one of several constraints.

    `parse` tries the options in order and returns the first result.
    """

    options: tuple[Constraint, ...]

    def __init__(self, options: Sequence[Any]) -> None:
        given = tuple(options) if isinstance(options, list | tuple) else ()
        if not given:
            raise ConfigError(f"AnyOf is of {options!r:.80}; allowed is a list of constraints")
        object.__setattr__(self, "options", tuple(map(as_constraint, given)))

    def compile(self, compiler: Compiler) -> Matcher:
        """Return a matcher that follows all options at once; see `Constraint.compile`.

        Raises: the error of an option that cannot be compiled.
        """
        return AnyOfMatcher([compiler.matcher(option) for option in self.options])

    def parse(self, text: str) -> Any:
        """Return the result of the first option that can parse the text.

        Raises: the error of the last option if no option can.
        """
        for option in self.options[:-1]:
            try:
                return option.parse(text)
            except ValueError:
                continue
        return self.options[-1].parse(text)

    def to_dict(self) -> dict[str, Any]:
        """Return `{"any_of": [the data of each option]}`, which `from_dict` reads."""
        return {"any_of": [option.to_dict() for option in self.options]}


class AnyOfMatcher(Matcher):
    """Matcher of `AnyOf`: the matchers of the options that still fit; it allows what any allows."""

    __slots__ = ("_options",)

    def __init__(self, options: Sequence[Matcher]) -> None:
        self._options = list(options)

    def fill(
        self,
        bits: NDArray[np.int32],
        banned: Set[int] = frozenset(),
        biased: Set[int] = frozenset(),
    ) -> None:
        first, *others = self._options
        first.fill(bits, banned, biased)
        for option in others:
            mask = bits.copy()
            option.fill(mask, banned, biased)
            bits |= mask

    def accept(self, token: int) -> None:
        fitting = [option for option in self._options if option.is_allowed(token)]
        if not fitting:
            raise ConstraintError(f"no option of AnyOf allows token {token} here")
        for option in fitting:
            option.accept(token)
        self._options = fitting

    def is_allowed(self, token: int) -> bool:
        return any(option.is_allowed(token) for option in self._options)

    def forced(self, banned: Set[int] = frozenset(), biased: Set[int] = frozenset()) -> list[int]:
        return list(commonprefix([option.forced(banned, biased) for option in self._options]))

    @property
    def may_end(self) -> bool:
        return any(option.may_end for option in self._options)

    @property
    def must_end(self) -> bool:
        return all(option.must_end for option in self._options)

    @property
    def failure(self) -> str | None:
        failures = [option.failure for option in self._options]
        return failures[0] if all(failures) else None

    def clone(self) -> AnyOfMatcher:
        return AnyOfMatcher([option.clone() for option in self._options])
