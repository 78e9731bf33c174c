"""`Allow`: a set of tokens, any number of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, ConstraintError
from .base import Constraint, Matcher, n_words

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .compiler import Compiler


@dataclass(frozen=True, slots=True)
class Allow(Constraint):
    """Only these token ids, in any order, and the end tokens."""

    ids: frozenset[int]

    def __init__(self, ids: Iterable[int]) -> None:
        given = frozenset(ids)
        if not given or not all(type(each) is int and each >= 0 for each in given):
            raise ConfigError(f"Allow is of {sorted(given, key=str)!r}; allowed are token ids")
        object.__setattr__(self, "ids", given)

    def compile(self, compiler: Compiler) -> Matcher:
        """See `Constraint.compile`."""
        import numpy as np

        outside = [each for each in self.ids if each >= compiler.n_vocab]
        if outside:
            raise ConfigError(
                f"token id {outside[0]} in Allow; allowed are 0 to {compiler.n_vocab - 1}"
            )
        allowed = np.zeros(n_words(compiler.n_vocab) * 32, dtype=np.uint8)
        ids = self.ids | compiler.stop_ids
        allowed[list(ids)] = 1
        bits = np.packbits(allowed, bitorder="little").view(np.int32)
        return AllowMatcher(ids, bits)

    def to_dict(self) -> dict[str, Any]:
        """See `Constraint.to_dict`."""
        return {"allow": sorted(self.ids)}


class AllowMatcher(Matcher):
    """A fixed mask; it has no state, so all share one."""

    __slots__ = ("bits", "ids")

    def __init__(self, ids: frozenset[int], bits: NDArray[np.int32]) -> None:
        self.ids = ids
        self.bits = bits

    def fill(self, bits: NDArray[np.int32]) -> None:
        """See `Matcher.fill`."""
        bits[:] = self.bits

    def accept(self, token: int) -> None:
        """See `Matcher.accept`."""
        if token not in self.ids:
            raise ConstraintError(f"token {token} is not among the {len(self.ids)} allowed ones")

    def is_allowed(self, token: int) -> bool:
        """See `Matcher.is_allowed`."""
        return token in self.ids

    @property
    def may_end(self) -> bool:
        """See `Matcher.may_end`."""
        return True

    @property
    def must_end(self) -> bool:
        """See `Matcher.must_end`."""
        return False

    def clone(self) -> AllowMatcher:
        """See `Matcher.clone`."""
        return self
