"""The place where a model of mlx-lm calls Weft: what it takes for its KV caches, and one function.

mlx-lm has no attention interface. Every family's module imports one function by name, and hands it
the layer's cache; `carry_tree_caches` puts another in its place, which looks at the cache: calls
with any other cache than ours go to mlx-lm's own function as they came.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import mlx.core as mx
from mlx import nn

from .attention import AttentionSpec
from .kv import KVShape, SlotShape

if TYPE_CHECKING:
    from .step import TreeStep

ATTENTION = "scaled_dot_product_attention"


class WindowMask:
    """What a model gets for a mask where it asks for a window; it hands it on to the function."""

    __slots__ = ("size",)

    def __init__(self, size: int) -> None:
        self.size = size


class RunningCall:
    """The caches that an engine gives its model, and the step that is running."""

    def __init__(self, own_caches: list[Any]) -> None:
        """own_caches: those the model makes for itself; one that rotates has a window."""
        self.step: TreeStep | None = None
        self.caches = [
            TreeCache(self, layer, getattr(own, "max_size", None))
            for layer, own in enumerate(own_caches)
        ]

    @property
    def running(self) -> TreeStep:
        """The step. Raises: RuntimeError when somebody kept a cache of ours for later."""
        if self.step is None:
            raise RuntimeError("this cache belongs to a forward of Weft that is over")
        return self.step


class TreeCache:
    """Stands where a model expects the KV cache of one layer, for a batch [T, 1] of tokens.

    is_latent: the layer hands on what is not yet keys and values; see `products`. The scores of the
    rotary part it makes itself, and calls them a mask. n_calls: how often the layer has attended.
    """

    def __init__(self, call: RunningCall, layer: int, window: int | None) -> None:
        self.call = call
        self.layer = layer
        self.window = window
        self.is_latent = False
        self.shapes: tuple[KVShape, KVShape] | None = None
        self.n_calls = 0

    @property
    def offset(self) -> mx.array:
        """The position of each token: [T]."""
        return self.call.running.offsets

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Take new slots [T, K, 1, D]; return what the model hands on to the function."""
        k, v = (KVShape(each.shape[1], each.shape[3], each.dtype) for each in (keys, values))
        self.shapes = k, v
        self.call.running.take(self.layer, keys, values)
        if self.is_latent:  # the product with it leaves the queries' rotary part as it is
            return keys, mx.eye(values.shape[-1], dtype=values.dtype)[None, None]
        return keys, values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return the new slots again, for a layer that shares this one's."""
        k, v = self.call.running.fresh[self.layer]
        return k[:, :, None], v[:, :, None]

    def make_mask(
        self, N: int, window_size: int | None = None, return_array: bool = False
    ) -> WindowMask | None:
        """Return no mask: what a token sees follows from its path, and from a window."""
        return None if window_size is None else WindowMask(window_size)

    def attend(
        self, queries: mx.array, scale: float, mask: Any = None, sinks: mx.array | None = None
    ) -> mx.array:
        """Attend for the function that stands in its family's module."""
        self.n_calls += 1
        windows = [self.window, mask.size if isinstance(mask, WindowMask) else None]
        window = min((each for each in windows if each is not None), default=None)
        queries = queries * scale
        if isinstance(mask, mx.array):
            if not self.is_latent:
                self.is_latent = True
                raise LatentKeys
            queries = mx.concatenate([queries, mask], axis=-1)
        elif mask is not None and not isinstance(mask, WindowMask):
            raise TypeError(f"the model masks keys by a {type(mask).__name__}")
        how = AttentionSpec(window, sinks, self.is_latent)
        return self.call.running.attend(self.layer, queries, how)


class LatentKeys(Exception):
    """A layer brought scores of its own with it: the forward has to be made again, knowing that."""


class Recorder:
    """A cache of the model's own kind that also keeps what is put into it."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._taken: tuple[mx.array, mx.array] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """Do as the cache does."""
        self._taken = keys, values
        return self._cache.update_and_fetch(keys, values)

    def taken(self) -> tuple[mx.array, mx.array]:
        """Return the last new slots, keys and values [n, K, D]."""
        if self._taken is None:
            raise TypeError("a layer of the model does not use its cache")
        keys, values = self._taken
        return keys[0].swapaxes(0, 1), values[0].swapaxes(0, 1)

    def shapes(self) -> tuple[KVShape, KVShape]:
        """Return what one slot is."""
        k, v = (KVShape(each.shape[1], each.shape[2], each.dtype) for each in self.taken())
        return k, v


def carry_tree_caches(model: nn.Module) -> None:
    """Let the modules that a model is made of hand attention over our caches to Weft.

    The one place that changes mlx-lm. It stays: other models of the family, and this one with other
    caches, go on as before.
    """
    names = {base.__module__ for each in model.modules() for base in type(each).__mro__}
    for name in names:
        module = sys.modules.get(name)
        original = getattr(module, ATTENTION, None)
        if module is not None and callable(original) and not hasattr(original, "weft_original"):
            setattr(module, ATTENTION, _handing_over(original))


def _handing_over(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    @functools.wraps(original)
    def scaled_dot_product_attention(
        queries: mx.array, keys: mx.array, values: mx.array, *args: Any, **kwargs: Any
    ) -> mx.array:
        cache = kwargs["cache"] if "cache" in kwargs else next(iter(args), None)
        if isinstance(cache, TreeCache):
            return _attend(queries, *args, **kwargs)
        return original(queries, keys, values, *args, **kwargs)

    scaled_dot_product_attention.weft_original = original  # type: ignore[attr-defined]
    return scaled_dot_product_attention


def _attend(
    queries: mx.array,
    cache: TreeCache,
    scale: float,
    mask: Any = None,
    sinks: mx.array | None = None,
) -> mx.array:
    return cache.attend(queries, scale, mask, sinks)


def slot_of(shapes: list[tuple[KVShape, KVShape]]) -> SlotShape:
    """Return what a slot is, of the shapes of the layers."""
    return SlotShape(each for pair in shapes for each in pair)
