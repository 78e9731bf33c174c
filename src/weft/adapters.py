"""LoRA adapters of an LM, by name: each has a tree root of its own, so none is ever mixed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from .errors import ConfigError, Unsupported

if TYPE_CHECKING:
    from .lm import LM


@runtime_checkable
class TakesAdapters(Protocol):
    """An engine that runs rows with an adapter (`Row.adapter`)."""

    def add_adapter(self, name: str, folder: Any) -> None:
        """Load an adapter. Raises: ConfigError for one that does not fit, changing nothing."""

    def remove_adapter(self, name: str) -> None:
        """Give an adapter's memory back."""


class Adapters:
    """The adapters of one LM.

    A namespace of the tree is a name and how often it was loaded: what an earlier adapter of that
    name computed is never met again.
    """

    def __init__(self) -> None:
        self._spaces: dict[str, str] = {}
        self._n_loaded = 0

    def __iter__(self) -> Iterator[str]:
        return iter(self._spaces)

    def __contains__(self, name: object) -> bool:
        return name in self._spaces

    def space(self, name: str | None) -> str | None:
        """Return an adapter's namespace; None is the model alone. Raises: ConfigError."""
        if name is None:
            return None
        if name not in self._spaces:
            known = ", ".join(sorted(self._spaces)) or "none"
            raise ConfigError(f"unknown LoRA adapter: {name!r}; known are {known}")
        return self._spaces[name]

    def add(self, lm: LM, name: str, folder: Any) -> None:
        """Load an adapter; one of the same name is replaced, and what it computed forgotten.

        Raises: Unsupported where the engine takes none; ConfigError, ModelLoadError.
        """
        engine = _engine(lm)
        if not isinstance(name, str) or not name:
            raise ConfigError(f"an adapter's name is {name!r}; allowed is a text, not empty")
        self._n_loaded += 1
        space = f"{name}#{self._n_loaded}"
        lm.driver.exclusive(lambda: engine.add_adapter(space, folder))
        if name in self._spaces:
            self.remove(lm, name)
        self._spaces[name] = space

    def remove(self, lm: LM, name: str) -> None:
        """Forget an adapter and its KV. Work that still wants it fails. Raises: ConfigError."""
        space = self.space(name)
        assert space is not None
        del self._spaces[name]
        engine = _engine(lm)

        def unload() -> None:
            lm.scheduler.take_in()
            lm.tree.clear(namespace=space)
            engine.remove_adapter(space)

        lm.driver.exclusive(unload)


def _engine(lm: LM) -> TakesAdapters:
    engine = lm.engine
    if not isinstance(engine, TakesAdapters):
        raise Unsupported(
            f"the {lm.info.name} engine runs no LoRA adapters",
            hint='weft.load(…, engine="torch") does',
        )
    return engine
