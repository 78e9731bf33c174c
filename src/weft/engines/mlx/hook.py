"""The interface between mlx-lm's models and Weft: KV caches and the attention function.

mlx-lm has no attention interface. Every family's module imports one function by name and calls it
with the layer's cache. `patch_attention` replaces this function. Calls with a `TreeCache` go to
Weft; calls with any other cache go to mlx-lm's own function unchanged.
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
    """Takes the place of an attention mask, and contains only the sliding window's `size` in
    tokens.

    Models pass it unchanged to the attention function, which reads the size.
    """

    __slots__ = ("size",)

    def __init__(self, size: int) -> None:
        self.size = size


class ForwardContext:
    """The `TreeCache`s that an engine passes to its model, one per layer, and the running step."""

    def __init__(self, own_caches: list[Any]) -> None:
        """Create the caches.

        Args:
            own_caches: caches that the model creates for itself; a rotating one has a window.
        """
        self.step: TreeStep | None = None
        self.caches = [
            TreeCache(self, layer, getattr(own, "max_size", None))
            for layer, own in enumerate(own_caches)
        ]

    @property
    def current_step(self) -> TreeStep:
        """The running step.

        Raises:
            RuntimeError: the cache is used after its forward.
        """
        if self.step is None:
            raise RuntimeError("this cache belongs to a forward of Weft that is over")
        return self.step


class TreeCache:
    """KV cache of one layer for a batch [T, 1] of tokens.

    Attributes:
        is_latent: the layer passes latent keys and values; see `attention`. It computes the scores
            of the rotary part itself and passes them as a mask.
        n_calls: number of attention calls of the layer.
    """

    def __init__(self, context: ForwardContext, layer: int, window: int | None) -> None:
        self.context = context
        self.layer = layer
        self.window = window
        self.is_latent = False
        self.shapes: tuple[KVShape, KVShape] | None = None
        self.n_calls = 0

    @property
    def offset(self) -> mx.array:
        """Positions of the tokens: [T]."""
        return self.context.current_step.offsets

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Store new slots [T, K, 1, D]; return the arguments for the attention function."""
        k, v = (KVShape(each.shape[1], each.shape[3], each.dtype) for each in (keys, values))
        self.shapes = k, v
        self.context.current_step.store_kv(self.layer, keys, values)
        if self.is_latent:  # the product with the identity keeps the queries' rotary part
            return keys, mx.eye(values.shape[-1], dtype=values.dtype)[None, None]
        return keys, values

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        """Return the new slots again, for a layer that shares this one's."""
        k, v = self.context.current_step.new_kv[self.layer]
        return k[:, :, None], v[:, :, None]

    def make_mask(
        self, N: int, window_size: int | None = None, return_array: bool = False
    ) -> WindowMask | None:
        """Return a WindowMask, or None: visible tokens follow from the path and the window."""
        return None if window_size is None else WindowMask(window_size)

    def attend(
        self, queries: mx.array, scale: float, mask: Any = None, sinks: mx.array | None = None
    ) -> mx.array:
        """Compute the attention of this layer in the running step; replaces mlx-lm's function.

        Args:
            queries: [T, H, 1, D].
            scale: factor of the scores.
            mask: a WindowMask, None, or an array of scores to add from a layer with latent keys.
            sinks: attention sinks [H]; None if the layer has none.

        Raises:
            LatentKeys: the layer turned out to have latent keys; repeat the forward.
        """
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
            raise TypeError(f"the model passes a {type(mask).__name__} as mask")
        spec = AttentionSpec(window, sinks, self.is_latent)
        return self.context.current_step.attend(self.layer, queries, spec)


class LatentKeys(Exception):
    """Raised when a layer turns out to have latent keys. The caller repeats the forward."""


class RecordingCache:
    """Wraps a KV cache of the model's own type and keeps the keys and values of its last call."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache
        self._new_slots: tuple[mx.array, mx.array] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> Any:
        """Record the new slots and call the cache."""
        self._new_slots = keys, values
        return self._cache.update_and_fetch(keys, values)

    def new_slots(self) -> tuple[mx.array, mx.array]:
        """Return the last new slots, keys and values [n, K, D]."""
        if self._new_slots is None:
            raise TypeError("a layer of the model does not use its cache")
        keys, values = self._new_slots
        return keys[0].swapaxes(0, 1), values[0].swapaxes(0, 1)

    def shapes(self) -> tuple[KVShape, KVShape]:
        """Return the shapes of the keys and values of one slot."""
        k, v = (KVShape(each.shape[1], each.shape[2], each.dtype) for each in self.new_slots())
        return k, v


def patch_attention(model: nn.Module) -> None:
    """Make a model's attention use Weft's KV if its cache is a `TreeCache`.

    Replaces mlx-lm's attention function in the Python modules that define the model's classes. The
    change is permanent, but calls with other caches still run mlx-lm's function.
    """
    names = {base.__module__ for each in model.modules() for base in type(each).__mro__}
    for name in names:
        module = sys.modules.get(name)
        original = getattr(module, ATTENTION, None)
        if module is not None and callable(original) and not hasattr(original, "weft_original"):
            setattr(module, ATTENTION, _dispatch_on_cache(original))


def _dispatch_on_cache(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    """Return a function that calls `TreeCache.attend` for tree caches, else `original`."""

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
    """Read the arguments as mlx-lm's models pass them, and call `cache.attend`."""
    return cache.attend(queries, scale, mask, sinks)


def slot_shape_of(shapes: list[tuple[KVShape, KVShape]]) -> SlotShape:
    """Flatten the (keys, values) shapes of all layers into one `SlotShape`."""
    return SlotShape(each for pair in shapes for each in pair)
