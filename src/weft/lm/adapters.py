"""LoRA adapters of one LM."""

from __future__ import annotations

from collections.abc import Iterator
from os import PathLike
from typing import TYPE_CHECKING, NamedTuple

from ..engines.hub import resolve_adapter
from ..errors import ConfigError, StaleHandle

if TYPE_CHECKING:
    from .lm import LM


class LoadedAdapter(NamedTuple):
    """One loaded LoRA adapter.

    namespace: its name and load count, which select its root in the token tree.
    fingerprint: identifies its weights.
    """

    namespace: str  # its namespace, which selects its root in the token tree
    fingerprint: str  # of its weights


class Adapters:
    """The loaded LoRA adapters of one LM, by name. Iteration yields their names.

    Each adapter has its own root in the token tree. A namespace consists of a name and a load
    count, so KV of an earlier adapter with the same name is never reused.
    """

    def __init__(self) -> None:
        self._loaded: dict[str, LoadedAdapter] = {}
        self._n_loaded = 0

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._loaded))

    def __contains__(self, name: object) -> bool:
        return name in self._loaded

    def namespace(self, name: str | None) -> str | None:
        """Return the namespace in the token tree of the adapter with this name.

        name: the adapter; None: the base model, whose namespace is None.

        Raises: ConfigError for an unknown name.
        """
        return None if name is None else self._get(name).namespace

    def fingerprint(self, name: str | None) -> str:
        """Return a fingerprint of an adapter's weights; "" for the base model, whose name is None.

        Raises: ConfigError for an unknown name.
        """
        return "" if name is None else self._get(name).fingerprint

    def add(self, lm: LM, name: str, folder: str | PathLike[str]) -> None:
        """Load an adapter; an adapter of the same name is removed first.

        Args:
            lm: the LM of these adapters.
            name: the name by which looms and calls select the adapter.
            folder: a path, or an id on the Hub: `org/name` or `org/name@revision`.

        Raises:
            Unsupported: the engine has no adapters, or none of this kind.
            ConfigError: the adapter belongs to another model.
            ModelLoadError: files are missing or broken.

        On an error the loaded adapters are unchanged.
        """
        if not isinstance(name, str) or not name:
            raise ConfigError(f"an adapter's name is {name!r}; allowed is a text, not empty")
        if not isinstance(folder, str | PathLike):
            raise ConfigError(f"an adapter's folder is {folder!r}; allowed is a path or a Hub id")

        def load() -> None:
            """Load the adapter's weights, between two steps, and replace an earlier one."""
            namespace = f"{name}#{self._n_loaded + 1}"
            fingerprint = lm.engine.add_adapter(namespace, path)
            self._n_loaded += 1
            previous = self._loaded.get(name)
            self._loaded[name] = LoadedAdapter(namespace, fingerprint)
            if previous is not None:
                _drop_namespace(lm, name, previous.namespace, "replaced; repeat the call")

        _check_open(lm)
        path = resolve_adapter(folder)
        lm.driver.exclusive(load)

    def remove(self, lm: LM, name: str) -> None:
        """Unload an adapter and free its KV. Work without the adapter continues.

        Queued work and branches of the adapter raise StaleHandle.

        Raises: ConfigError for an unknown name.
        """

        def unload() -> None:
            """Remove the adapter between two steps."""
            loaded = self._get(name)
            del self._loaded[name]
            _drop_namespace(lm, name, loaded.namespace, "removed; add it again")

        _check_open(lm)
        lm.driver.exclusive(unload)

    @staticmethod
    def name_of(namespace: str | None) -> str | None:
        """Return the adapter's name of a namespace; None for the base model."""
        return None if namespace is None else namespace.rpartition("#")[0]

    def _get(self, name: str) -> LoadedAdapter:
        loaded = self._loaded.get(name)
        if loaded is None:
            known = ", ".join(sorted(self._loaded)) or "none"
            raise ConfigError(f"unknown LoRA adapter: {name!r}; known are {known}")
        return loaded


def _drop_namespace(lm: LM, name: str, namespace: str, why: str) -> None:
    """Cancel the work of an adapter and free its KV and weights.

    why: the end of the error message of this work.
    """
    lm.scheduler.drop_namespace(namespace, f"the LoRA adapter {name!r} was {why}")
    lm.engine.remove_adapter(namespace)


def _check_open(lm: LM) -> None:
    if lm.closed:
        raise StaleHandle("this LM is closed; load it again")
