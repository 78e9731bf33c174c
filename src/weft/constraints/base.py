"""`Constraint`, what text is allowed, and `Matcher`, where one generation stands in it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from .compiler import Compiler


class Constraint(ABC):
    """What text a generation may produce: a value, hashable, that knows no tokenizer.

    Subclasses are frozen dataclasses, so equal constraints are equal.
    """

    @abstractmethod
    def compile(self, compiler: Compiler) -> Matcher:
        """Return a matcher at the beginning. Raises: GrammarError, with line and reason.

        Cost: may be large; `Compiler.matcher` keeps what was compiled and hands out clones.
        """

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return plain JSON data that `from_dict` of this package reads."""

    def parse(self, text: str) -> Any:
        """Return the object that a finished text stands for; the text itself unless there is one.

        Raises: ValueError if the text is not finished.
        """
        return text


class Matcher(ABC):
    """Where one generation stands in a constraint. Belongs to one sampler; clone it to fork.

    Masks are bits, least significant first: token t is bit t % 32 of word t // 32; 1 is allowed.
    """

    __slots__ = ()

    @abstractmethod
    def fill(self, bits: NDArray[np.int32]) -> None:
        """Write the mask of tokens that may come next; all end tokens where the text may end.

        bits: int32 [n_words(V)], overwritten; what is in it from bit V on says nothing.
        """

    @abstractmethod
    def accept(self, token: int) -> None:
        """Go on by a token. Raises: ConstraintError if it is not allowed; nothing changes then.

        Where it is allowed and raises all the same, there is a `failure`.
        """

    @abstractmethod
    def is_allowed(self, token: int) -> bool:
        """Say whether a token may come next; changes nothing."""

    def takes(self, tokens: Sequence[int]) -> bool:
        """Say whether these tokens may come next, one after the other; changes nothing."""
        twin = self.clone()
        for token in tokens:
            if not twin.is_allowed(token):
                return False
            twin.accept(token)
        return True

    def forced(self) -> list[int]:
        """Return the tokens that must come next, whatever the model says; changes nothing."""
        return []

    @property
    @abstractmethod
    def may_end(self) -> bool:
        """The text may end here."""

    @property
    @abstractmethod
    def must_end(self) -> bool:
        """Nothing but an end token may come next."""

    @property
    def failure(self) -> str | None:
        """Why nothing can come next though the text is no dead end: a limit was reached, say."""
        return None

    @abstractmethod
    def clone(self) -> Matcher:
        """Return a matcher at the same place that goes on independently."""


def n_words(n_vocab: int) -> int:
    """Return how many int32 a mask has. One bit more than tokens: llguidance needs an end token."""
    return n_vocab // 32 + 1
