"""Engines by name. An engine's module is imported only when the engine is used.

Other packages register engines with an entry point of the group "weft.engines":
name = "module:Class".
"""

from __future__ import annotations

from importlib import import_module

from .._core.installation import entry_points, install_hint
from .._core.system_resources import passive_waiting
from ..errors import ConfigError, EngineUnavailable
from .base import Engine

ENTRY_POINT_GROUP = "weft.engines"

_BUILT_IN = {
    "numpy": "weft.engines.numpy:NumpyEngine",
    "torch": "weft.engines.torch:TorchEngine",
    "mlx": "weft.engines.mlx:MlxEngine",
    "llamacpp": "weft.engines.llamacpp:LlamaCppEngine",
    "vllm": "weft.engines.vllm:VllmEngine",
    "remote": "weft.engines.remote:RemoteEngine",
}


def engine_names() -> tuple[str, ...]:
    """Return all names that `engine_class` accepts, Weft's own first."""
    return tuple(_BUILT_IN | _third_party())


def engine_class(name: str) -> type[Engine]:
    """Import and return the engine class `name`.

    Raises:
        ConfigError: no engine has this name.
        EngineUnavailable: the engine's own package is not installed, or broken.
    """
    target = _BUILT_IN.get(name) or _third_party().get(name)
    if target is None:
        names = ", ".join(engine_names())
        raise ConfigError(f"no engine is called {name!r}; the engines here are: {names}")
    module, _, attribute = target.partition(":")
    try:
        with passive_waiting():
            engine = getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        missing = error.name or "a package"
        if missing.partition(".")[0] == "weft":
            raise
        hint = install_hint(name) if name in _BUILT_IN else f"pip install {missing}"
        raise EngineUnavailable(
            f"engine {name!r} needs the package {missing!r}, which is not installed; run: {hint}",
            hint=hint,
        ) from error
    except Exception as error:  # another package's module may raise anything
        if name in _BUILT_IN:
            raise
        raise _not_loadable(name, target, f"{type(error).__name__}: {error}") from error
    if not (isinstance(engine, type) and issubclass(engine, Engine)):
        raise _not_loadable(name, target, "it is no class derived from weft.engines.base.Engine")
    return engine


def _not_loadable(name: str, target: str, why: str) -> EngineUnavailable:
    """Return the error for an engine whose entry point cannot be loaded. why: the reason."""
    hint = "update or remove the package that provides it"
    return EngineUnavailable(
        f"engine {name!r} is broken, by its entry point {target!r}: {why}; {hint}", hint=hint
    )


def plugins() -> dict[str, str]:
    """Return the names of engines from other packages, each with its entry point."""
    return {name: point for name, point in _third_party().items() if name not in _BUILT_IN}


def _third_party() -> dict[str, str]:
    """Return the entry point ("module:Class") of each engine registered by an installed package."""
    return {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)}
