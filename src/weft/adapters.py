"""LoRA adapters of one LM."""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike
from typing import TYPE_CHECKING, NamedTuple

from .engines.source import resolve_adapter
from .errors import ConfigError, StaleHandle

if TYPE_CHECKING:
    from .lm import LM


class Loaded(NamedTuple):
    """One loaded adapter: its namespace in the tree, and a fingerprint of its weights."""

    space: str
    fingerprint: str


class Adapters:
    """The LoRA adapters of one LM, by name; iterating gives their names.

    Each has a tree root of its own, so none is ever mixed. A namespace of the tree is a name and
    how often one was loaded: what an earlier adapter of that name computed is never met again.
    """

    def __init__(self) -> None:
        self._loaded: dict[str, Loaded] = {}
        self._n_loaded = 0

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._loaded))

    def __contains__(self, name: object) -> bool:
        return name in self._loaded

    def space(self, name: str | None) -> str | None:
        """Return an adapter's namespace; None is the model alone. Raises: ConfigError."""
        return None if name is None else self._get(name).space

    def fingerprint(self, name: str | None) -> str:
        """Return a fingerprint of an adapter's weights; empty for the model alone."""
        return "" if name is None else self._get(name).fingerprint

    def add(self, lm: LM, name: str, folder: str | PathLike[str]) -> None:
        """Load an adapter; one of the same name is replaced as if removed before.

        folder: or an adapter's id on the Hub, `org/name` or `org/name@revision`.
        Raises: Unsupported where the engine takes none, or not this kind; ConfigError for one of
        another model, ModelLoadError for files that are missing or broken. Nothing changes then.
        """
        if not isinstance(name, str) or not name:
            raise ConfigError(f"an adapter's name is {name!r}; allowed is a text, not empty")
        if not isinstance(folder, str | PathLike):
            raise ConfigError(f"an adapter's folder is {folder!r}; allowed is a path or a Hub id")

        def load() -> None:
            space = f"{name}#{self._n_loaded + 1}"
            fingerprint = lm.engine.add_adapter(space, path)
            self._n_loaded += 1
            before = self._loaded.get(name)
            self._loaded[name] = Loaded(space, fingerprint)
            if before is not None:
                _retire(lm, name, before.space, "replaced by another of that name; ask again")

        _refuse_closed(lm)
        path = resolve_adapter(folder)
        lm.driver.exclusive(load)

    def remove(self, lm: LM, name: str) -> None:
        """Forget an adapter and its KV. Other work goes on.

        Work that waits for it, and places of it, raise StaleHandle. Raises: ConfigError for an
        unknown name.
        """

        def unload() -> None:
            loaded = self._get(name)
            del self._loaded[name]
            _retire(lm, name, loaded.space, "removed; add it again")

        _refuse_closed(lm)
        lm.driver.exclusive(unload)

    @staticmethod
    def name_of(space: str | None) -> str | None:
        """Return the name of the adapter whose namespace this is."""
        return None if space is None else space.rpartition("#")[0]

    def _get(self, name: str) -> Loaded:
        loaded = self._loaded.get(name)
        if loaded is None:
            known = ", ".join(sorted(self._loaded)) or "none"
            raise ConfigError(f"unknown LoRA adapter: {name!r}; known are {known}")
        return loaded


def _retire(lm: LM, name: str, space: str, why: str) -> None:
    lm.scheduler.retire(space, f"the LoRA adapter {name!r} was {why}")
    lm.engine.remove_adapter(space)


def _refuse_closed(lm: LM) -> None:
    if lm.closed:
        raise StaleHandle("this LM is closed; load it again")
