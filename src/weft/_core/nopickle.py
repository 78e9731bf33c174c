"""What lives in one process's memory: copying or pickling it says what to do instead."""

from __future__ import annotations

from typing import Any, ClassVar, NoReturn


class NotPicklable:
    """A base of classes whose objects are not copied; `class A(NotPicklable, instead="…")`."""

    __slots__ = ()
    _instead: ClassVar[str]

    def __init_subclass__(cls, *, instead: str = "", **more: Any) -> None:
        """instead: what to do; that of the class above unless it is given."""
        super().__init_subclass__(**more)
        if instead:
            cls._instead = instead

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"this {type(self).__name__} is in the memory of its process, by its model, and cannot"
            f" be pickled or copied; {self._instead}"
        )
