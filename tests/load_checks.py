"""Load checks of the torch engine over Triton's interpreter, which need more time than most tests.

A check runs 640 tokens through all kernels. Tests of the kernels load equal models dozens of times.
A check of full length runs in `test_torch_select_backend.py`, as a slow test, and on GPUs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    import torch

    from weft.engines.torch import TorchEngine
    from weft.engines.torch.check import PlainOutputs

# Numbers of tokens and rows of a check: enough for two tiles of each kernel.
SHORT = {"_FAR": 96, "_LONELY": 2, "_CROWDED": 1, "_MANY": 12, "_PROGRAMS": 0, "_COMPARED": 5}

_passed: set[Hashable] = set()


@contextmanager
def shortened() -> Iterator[None]:
    """Check with fewer tokens and rows in Triton's interpreter; as always on a GPU."""
    from weft.engines.torch import check
    from weft.engines.torch.paged import kernel

    with pytest.MonkeyPatch.context() as patch:
        for name, n in SHORT.items() if kernel.is_interpreted() else ():
            patch.setattr(check, name, n)
        yield


@contextmanager
def once_for_equal_models() -> Iterator[None]:
    """Skip the check of a model if an equal one passed it in the same run; not on a GPU."""
    from weft.engines.torch import engine
    from weft.engines.torch.paged import kernel

    if not kernel.is_interpreted():
        yield
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "check_tree", _check_once(engine.check_tree))
        yield


def _check_once(
    check_tree: Callable[[TorchEngine, PlainOutputs], None],
) -> Callable[[TorchEngine, PlainOutputs], None]:
    def check(loaded: TorchEngine, own: PlainOutputs) -> None:
        if (key := _key(loaded)) not in _passed:
            check_tree(loaded, own)
            _passed.add(key)

    return check


def _key(loaded: TorchEngine) -> Hashable:
    """Return a key that differs if code, weights, KV memory or graphs of two engines differ."""
    modules = [
        (name, type(module).__qualname__, _code_of(module), len(module._forward_hooks))
        for name, module in loaded.model.named_modules()
    ]
    weights = [
        (name, weight.dtype, tuple(weight.shape), weight.double().sum().item())
        for name, weight in loaded.model.state_dict().items()
    ]
    parts = (type(loaded.fragments), type(loaded._fused), type(loaded._graphs))
    return (*modules, *weights, *parts, str(loaded.model.config.to_dict()))


def _code_of(module: torch.nn.Module) -> Hashable:
    """Return the code of a module's forward; code objects of equal functions are equal."""
    forward = inspect.unwrap(module.forward)
    return getattr(getattr(forward, "__func__", forward), "__code__", None)
