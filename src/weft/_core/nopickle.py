"""Base class of objects that cannot be pickled or copied, as they belong to one process."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn


class NotPicklable:
    """Base class that rejects pickling and copying: `class A(NotPicklable, instead="…")`."""

    __slots__ = ()
    _instead: ClassVar[str]

    def __init_subclass__(cls, *, instead: str = "", **more: Any) -> None:
        """instead: what users should do, for the error message; inherited unless it is given."""
        super().__init_subclass__(**more)
        if instead:
            cls._instead = instead

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"this {type(self).__name__} is in the memory of its process, by its model, and cannot"
            f" be pickled or copied; {self._instead}"
        )
