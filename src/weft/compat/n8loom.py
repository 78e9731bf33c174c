"""N8Loom's names: `from weft.compat.n8loom import Loom, load_for_loom, …`.

`model` and `tokenizer` are an LM and its tokenizer (from `load_for_loom`), or a loaded model of
Transformers or MLX with its tokenizer.

Fragments and caches are arrays [1, n_kv_heads, T, head_dim] per layer, with the sequence on axis 2.
They are valid at their own positions only, because rotary positions are part of the keys. Arrays
are NumPy's. Over a model of MLX they are MLX's, and a cache's layers are mlx-lm's own `KVCache`,
which the model accepts.

Differences from N8Loom: A node's fragment contains exactly its own tokens, and no cache is one
token behind. Fragments have token ids, so a fused cache is recognized in the token tree.

`Loom` and `Heddle` are those of `weft`, except that special tokens in text are parsed unless a call
has `special=False`. Text in a chat template is always plain.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import ConfigError, EngineUnavailable
from ..lm.lm import LM
from ..loom import Heddle as _Heddle
from ..loom import KVFrag, StreamItem, kv_fragments
from ..loom import Loom as _Loom
from ..loom.grow import Growth, with_seed
from ..loom.heddle import at_end
from ..loom.kv_fragments import ExportedKV
from ..loom.n8loom_names import params as known_params
from ..loom.n8loom_names import stream_items
from ..loom.node import lm_of, set_place

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .._core.kv.place import Place

__all__ = [
    "Heddle",
    "KVCache",
    "KVFrag",
    "Loom",
    "PromptCache",
    "clip_frag",
    "frag_batch_gen",
    "frag_cache",
    "fuse_cache_frags",
    "generate_batched",
    "generate_batched_stream",
    "load_for_loom",
    "prompt_to_cache",
]


class Heddle(_Heddle):
    """A node like `weft.Heddle`, but special tokens in its texts are parsed, as N8Loom does."""

    reads_special = True

    def get_prefix_cache(self) -> PromptCache:
        """Return a copy of the path's KV as a list with one cache object per layer.

        For an MLX model these are mlx-lm's own objects, which the loaded model accepts. On other
        engines call `for_model` of the result to get the cache object of the engine's library.

        Raises: Unsupported on engines that do not export their KV; ConfigError for an empty path.

        Cost: a copy of the path's KV.
        """
        lm, place = lm_of(self), at_end(self)
        exported = kv_fragments.export(lm, place)
        is_mlx = lm.info.name == "mlx"
        layers = lm.kv.engine_cache(place) if is_mlx else _batch_layers(lm, [exported], 0)
        return PromptCache(layers, [place.ids()], 0, exported.marks, is_path=True)


class Loom(_Loom, Heddle):
    """A root like `weft.Loom`, but special tokens in a prompt without a template are parsed."""

    heddle_class = Heddle


class KVCache:
    """Keys and values of one layer: arrays [rows, n_kv_heads, T, head_dim]."""

    def __init__(self, keys: NDArray[Any], values: NDArray[Any]) -> None:
        self.keys = keys
        self.values = values

    @property
    def offset(self) -> int:
        """The number of tokens, T."""
        return int(self.keys.shape[2])

    @property
    def state(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """The arrays (keys, values)."""
        return self.keys, self.values


class CachedRows(NamedTuple):
    """The tokens that a `PromptCache` contains.

    Each layer of the cache has this as its attribute `weft_rows`. So Weft recognizes a plain list
    of layers as such a cache.
    """

    rows: list[list[int]]  # token ids of each row
    start: int  # position of the rows' first token on the path
    marks: Mapping[str, Any]  # what the engine stores in addition to keys and values, by name
    is_path: bool  # the cache belongs to a node; see `PromptCache`


class PromptCache(list[Any]):
    """The KV of one or more token sequences: a list with one `KVCache` per layer.

    For an MLX model the layers are mlx-lm's own cache objects.

    Attributes:
        rows: token ids of each row of the arrays.
        start: position of the rows' first token on the path.
        marks: what the engine stores in addition to keys and values, by name.
        is_path: the cache belongs to a node. A prompt equal to its last tokens is then the node's
            own text, and is not appended.
    """

    def __init__(
        self,
        layers: Sequence[Any],
        rows: Sequence[Sequence[int]],
        start: int = 0,
        marks: Mapping[str, Any] | None = None,
        *,
        is_path: bool = False,
    ) -> None:
        super().__init__(layers)
        self.describe(CachedRows([list(row) for row in rows], start, marks or {}, is_path))

    def describe(self, cached: CachedRows) -> None:
        """Set `rows`, `start`, `marks` and `is_path`, here and as `weft_rows` of each layer.

        A list of these layers is then recognized, too.
        """
        self.rows, self.start, self.marks, self.is_path = cached
        for layer in self:
            layer.weft_rows = cached

    @property
    def token_ids(self) -> list[int]:
        """The token ids of the first row; [] without rows. For caches with one row."""
        return self.rows[0] if self.rows else []

    def place(self, lm: LM) -> Place:
        """Insert the KV into an LM's token tree, and return the place after its tokens.

        Raises: ConfigError for a cache that is not one row from the start of a path.
        """
        _check_full_prefix(self)
        arrays = map(_used_slots, self)
        layers = [(_to_numpy(keys)[0], _to_numpy(values)[0]) for keys, values in arrays]
        if min(keys.shape[1] for keys, _ in layers) < len(self.token_ids):  # sliding windows
            return lm.place(self.token_ids, namespace=self.marks.get(kv_fragments.ADAPTER))
        return kv_fragments.load(lm, self.token_ids, layers, self.marks)

    def for_model(self, model: Any, tokenizer: Any = None) -> Any:
        """Return the KV as the cache object that the engine's library uses.

        Pass it to the loaded model itself. The torch engine returns a `DynamicCache`, for
        `past_key_values=` (`cache=` since Transformers 5.24).

        Args:
            model: an LM, or a loaded model.
            tokenizer: the tokenizer of a loaded model; None for an LM.

        Raises: Unsupported if the library has no such object; ConfigError for a cache that is not
        one row from the start of a path.
        """
        lm = LM.from_model(model, tokenizer)
        return lm.kv.engine_cache(self.place(lm))


def load_for_loom(
    path_or_hf_repo: str,
    tokenizer_config: Mapping[str, Any] | None = None,
    model_config: Mapping[str, Any] | None = None,
    adapter_path: str | None = None,
    lazy: bool = False,
) -> tuple[LM, Any]:
    """Load a model: return the LM and its tokenizer, for `Loom(model, tokenizer, prompt)`.

    Args:
        path_or_hf_repo: a folder or Hub id, as for `weft.load`.
        tokenizer_config: keywords of Transformers' `AutoTokenizer.from_pretrained`, which then
            loads the tokenizer.
        model_config: must be empty.
        adapter_path: must be None; see `LM.add_adapter` and `Loom(…, adapter=)`.
        lazy: has no effect.

    Raises: ConfigError, and as `weft.load`.
    """
    from ..loading import load

    if model_config:
        raise ConfigError(
            f"model_config={dict(model_config)} is not supported: change the model's config.json,"
            " or load it with Transformers and use"
            " Loom(model, tokenizer, prompt)"
        )
    if adapter_path is not None:
        raise ConfigError(
            "adapter_path is not supported; a loom names its adapter: lm.add_adapter(name, folder),"
            " then Loom(lm, prompt, adapter=name)"
        )
    tokenizer = _load_tokenizer(path_or_hf_repo, tokenizer_config) if tokenizer_config else None
    lm = load(path_or_hf_repo, tokenizer)
    return lm, lm.tokenizer


def _load_tokenizer(model: str, config: Mapping[str, Any]) -> Any:
    """Load the tokenizer of a model with Transformers.

    config: keywords of `AutoTokenizer.from_pretrained`.
    """
    from .._core.installation import install_hint
    from ..engines.hub import resolve

    remote_code = bool(config.get("trust_remote_code"))
    folder = resolve(model, remote_code=remote_code)
    try:
        from transformers import AutoTokenizer
    except ImportError as error:
        hint = install_hint("torch")
        raise EngineUnavailable(
            "tokenizer_config needs Transformers, which is not installed; leave it out, or run:"
            f" {hint}",
            hint=hint,
        ) from error
    return AutoTokenizer.from_pretrained(str(folder), **config)


# Caches and fragments


def prompt_to_cache(
    model: Any,
    tokenizer: Any,
    prompt_ids: Sequence[int],
    c: list[Any] | None = None,
    prefill_step_size: int = 512,
    offset: int = 0,
) -> tuple[PromptCache, int]:
    """Compute the KV of a prompt; return (cache, number of token ids added to it).

    Args:
        model: an LM, or a loaded model.
        tokenizer: the tokenizer of a loaded model; None for an LM.
        prompt_ids: token ids of the prompt, or of the text after the tokens of `c`.
        c: a cache that the prompt continues; it is filled in place. None: an empty one.
        prefill_step_size: has no effect.
        offset: number of ids at the prompt's end that are left out.
    """
    if offset < 0 or offset > len(prompt_ids):
        raise ConfigError(f"offset is {offset}; allowed is 0 to {len(prompt_ids)}")
    lm = LM.from_model(model, tokenizer)
    ids = list(prompt_ids)[: len(prompt_ids) - offset]
    cache = _as_prompt_cache([] if c is None else c)
    existing = cache.token_ids
    previous = cache.place(lm) if any(layer.offset for layer in cache) else None
    exported = kv_fragments.export(lm, lm.place(ids, after=previous))
    cache[:] = _updated_layers(cache, _batch_layers(lm, [exported], 0))
    cache.describe(CachedRows([existing + ids], 0, exported.marks, cache.is_path))
    if c is not None and c is not cache:
        c[:] = cache
    return cache, len(ids)


def _updated_layers(old: Sequence[Any], new: list[Any]) -> list[Any]:
    """Return the layers of a cache after a prompt has run.

    Args:
        old: the caller's layers. They get the new KV and are returned, if their types match.
        new: the layers with the new KV, which are returned otherwise.
    """
    if [type(layer) for layer in old] != [type(layer) for layer in new]:
        return new
    for layer, full in zip(old, new, strict=True):
        layer.keys, layer.values = full.keys, full.values
        if not isinstance(layer, KVCache):
            layer.offset = full.offset
    return list(old)


def frag_cache(cache: Sequence[Any], start_idx: int = 0, end_idx: int = -1) -> list[KVFrag]:
    """Cut tokens from a cache: return one KV fragment per layer, from start_idx to before end_idx.

    NOTE: the default end_idx, -1, leaves out the last token, as in N8Loom.
    """
    start, stop, _ = slice(start_idx, end_idx).indices(cache[0].offset if cache else 0)
    return _fragments_of_row(_as_prompt_cache(cache), 0, start, stop)


def clip_frag(frags: Sequence[KVFrag], token_limit: int) -> list[KVFrag]:
    """Return the fragments (one per layer) cut to their first `token_limit` tokens."""
    return [
        KVFrag(
            _copy_array(frag.keys[:, :, :token_limit]),
            _copy_array(frag.values[:, :, :token_limit]),
            frag.token_ids[:token_limit],
            frag.start,
            frag.marks,
        )
        for frag in frags
    ]


def frag_batch_gen(
    cache: Sequence[Any], total_prompt_len: int, generated_lengths: Sequence[int]
) -> list[list[KVFrag]]:
    """Split the cache of a batch into the KV fragments of each branch: `[branch][layer]`.

    Args:
        cache: the cache, with one row per branch.
        total_prompt_len: number of tokens at the start of each row to leave out. Pass 0 for the
            cache of `generate_batched`, which has new tokens only.
        generated_lengths: number of new tokens of each branch.
    """
    return [
        _fragments_of_row(_as_prompt_cache(cache), row, total_prompt_len, total_prompt_len + length)
        for row, length in enumerate(generated_lengths)
    ]


def fuse_cache_frags(frags: Sequence[Sequence[KVFrag]], offset: int = 0) -> PromptCache:
    """Join the KV fragments of one path into a cache that a prompt can continue.

    Args:
        frags: `[layer][fragment]`, in path order.
        offset: has no effect.

    Raises: ConfigError if a fragment does not begin where the previous one ends.
    """
    layers = []
    for layer in frags:
        _check_adjacent(layer)
        keys, values = (_concatenate([frag[kind] for frag in layer]) for kind in (0, 1))
        layers.append(_cache_layer(keys, values))
    first = list(frags[0]) if frags else []
    ids = [token for frag in first for token in frag.token_ids]
    if not first:
        return PromptCache(layers, [ids])
    return PromptCache(layers, [ids], first[0].start, first[0].marks, is_path=True)


# Generation


def generate_batched(
    model: Any,
    tokenizer: Any,
    prompt: Sequence[int],
    batch_size: int,
    *,
    prompt_cache: Sequence[Any] | None = None,
    verbose: bool = False,
    max_tokens: int = 256,
    temp: float = 0.0,
    top_p: float = 0.0,
    min_p: float = 0.0,
    min_tokens_to_keep: int = 1,
    repetition_penalty: float = 1.0,
    repetition_context_size: int = 20,
    prefill_step_size: int = 512,
    stop_strings: Sequence[str] = (),
    **kwargs: Any,
) -> tuple[list[list[int]], PromptCache, int, list[int], list[bool]]:
    """Generate `batch_size` continuations of a prompt in one batch; returns a 5-tuple.

    Args:
        model: an LM, or a loaded model.
        tokenizer: the tokenizer of a loaded model; None for an LM.
        prompt: token ids of the full path, or of the text after the cache's tokens. Tokens in the
            cache are not computed twice, except the last one. With a node's cache, the prompt may
            be the node's own tokens; nothing is appended then.
        batch_size: number of continuations.
        prompt_cache: a cache that the prompt continues; None: the prompt is the full path.
        max_tokens, temp, min_p, repetition_penalty, stop_strings: sampling parameters.
        verbose, min_tokens_to_keep, repetition_context_size, prefill_step_size: have no effect.
        top_p: 0 is off, like 1.
        kwargs: further SamplingParams, such as `seed`.

    Returns: a tuple (B continuations):
        token ids: the new tokens of each continuation, [B] lists.
        cache: a PromptCache of the new tokens only, one row per continuation, padded with zeros.
        prompt length: number of tokens of the full prompt.
        lengths: number of new tokens of each continuation.
        ended: True for each continuation that ended with an end token.
    """
    options = {"top_p": top_p or 1.0, "repetition_penalty": repetition_penalty, **kwargs}
    lm, growth = _create_growth(
        model, tokenizer, prompt, prompt_cache, streamed=False,
        n=batch_size, temp=temp, max_tokens=max_tokens, min_p=min_p, stop_strings=stop_strings,
        **options,
    )  # fmt: skip
    children = growth.run()
    rows = [child.tokens for child in children]
    lengths = [len(row) for row in rows]
    start = growth.branches[0].origin.depth
    cache = _generated_cache(lm, children, start)
    return rows, cache, start, lengths, [child.terminal for child in children]


def generate_batched_stream(
    model: Any,
    tokenizer: Any,
    prompt: Sequence[int],
    batch_size: int,
    *,
    prompt_cache: Sequence[Any] | None = None,
    max_tokens: int = 256,
    temp: float = 0.0,
    top_p: float = 0.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    stop_strings: Sequence[str] = (),
    verbose: bool = False,
    min_tokens_to_keep: int = 1,
    repetition_context_size: int = 20,
    prefill_step_size: int = 512,
    **kwargs: Any,
) -> Generator[StreamItem, None, None]:
    """Like `generate_batched`, but yield N8Loom's stream items while tokens are generated.

    Items of type "update" have the tokens so far. The last item, "final", also has the KV of the
    new tokens in "prompt_cache". The arguments are those of `generate_batched`.
    """
    options = {"top_p": top_p or 1.0, "repetition_penalty": repetition_penalty, **kwargs}
    lm, growth = _create_growth(
        model, tokenizer, prompt, prompt_cache, streamed=True,
        n=batch_size, temp=temp, max_tokens=max_tokens, min_p=min_p, stop_strings=stop_strings,
        **options,
    )  # fmt: skip
    start = growth.branches[0].origin.depth
    for item in stream_items(growth):
        if item["type"] == "final":
            item["prompt_cache"] = _generated_cache(lm, growth.children, start)
        yield item


def _create_growth(
    model: Any,
    tokenizer: Any,
    prompt: Sequence[int],
    layers: Sequence[Any] | None,
    *,
    streamed: bool,
    **sampling: Any,
) -> tuple[LM, Growth]:
    """Create the generation of `generate_batched`: return the LM and a `Growth` to run.

    layers: the caller's cache. sampling: SamplingParams by name.
    """
    lm = LM.from_model(model, tokenizer)
    params = known_params(**sampling)
    cache = _as_prompt_cache(layers or [])
    if cache.token_ids or any(layer.offset for layer in cache):
        root = Heddle(lm, None, _full_path(cache, list(prompt)))
        place = cache.place(lm)
        tokens = root.tokens
        if tokens[: place.depth] == cache.token_ids:
            set_place(root, lm.place(tokens[place.depth :], after=place))
    else:
        root = Heddle(lm, None, list(prompt))
    growth = Growth(lm, streamed=streamed)
    growth.add(root, with_seed(params))
    return lm, growth


def _full_path(cache: PromptCache, prompt: list[int]) -> list[int]:
    """Return the token ids of a cache followed by a prompt; see `generate_batched`."""
    cached = cache.token_ids
    if prompt[: len(cached)] == cached:
        return prompt
    if not prompt or (cache.is_path and cached[-len(prompt) :] == prompt):
        return cached
    if cached[len(cached) - len(prompt) + 1 :] == prompt[:-1]:
        return [*cached, prompt[-1]]
    return [*cached, *prompt]


def _generated_cache(lm: LM, children: Sequence[_Heddle], start: int) -> PromptCache:
    """Return the cache of the children's new tokens, one row per child.

    start: position of the first new token.
    """
    exported = [kv_fragments.export(lm, child.place) for child in children]
    rows = [child.tokens for child in children]
    return PromptCache(_batch_layers(lm, exported, start), rows, start, exported[0].marks)


def _batch_layers(lm: LM, exported: Sequence[ExportedKV], start: int) -> list[Any]:
    """Return one cache object per layer that contains several paths as rows.

    Args:
        lm: the model of the paths.
        exported: the KV of each path.
        start: leave out the tokens before this position. Shorter rows are padded with zeros.
    """
    to_array = lm.engine.library_array
    return [
        _cache_layer(
            to_array(_stack_padded([keys[:, start:] for keys, _ in layer])),
            to_array(_stack_padded([values[:, start:] for _, values in layer])),
        )
        for layer in zip(*(each.layers for each in exported), strict=True)
    ]


def _stack_padded(rows: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """Stack arrays [heads, T, size] into one [rows, heads, max T, size], padded with zeros."""
    heads, _, size = rows[0].shape
    out = np.zeros((len(rows), heads, max(row.shape[1] for row in rows), size), rows[0].dtype)
    for index, row in enumerate(rows):
        out[index, :, : row.shape[1]] = row
    return out


def _fragments_of_row(cache: PromptCache, row: int, start: int, stop: int) -> list[KVFrag]:
    """Return one KV fragment per layer: the tokens from `start` to before `stop` of one row."""
    ids = cache.rows[row][start:stop] if cache.rows else ()
    pick = (slice(row, row + 1), slice(None), slice(start, stop))
    begin = cache.start + start
    return [
        KVFrag(_copy_array(keys[pick]), _copy_array(values[pick]), ids, begin, cache.marks)
        for keys, values in map(_used_slots, cache)
    ]


# Arrays and layers, NumPy's or MLX's


def _is_mlx(array: Any) -> bool:
    return type(array).__module__.partition(".")[0] == "mlx"


def _copy_array(array: Any) -> Any:
    """Return a copy of an array; an MLX array itself, because it never changes."""
    return array if _is_mlx(array) else array.copy()  # arrays of MLX are values


def _concatenate(arrays: Sequence[Any]) -> Any:
    """Join arrays of keys or values along the sequence axis, 2."""
    if not _is_mlx(arrays[0]):
        return np.concatenate(arrays, axis=2)
    import mlx.core as mx

    return mx.concatenate(list(arrays), axis=2)


def _to_numpy(array: Any) -> NDArray[Any]:
    """Return an array as a NumPy array; bfloat16 of MLX becomes float32."""
    if _is_mlx(array) and str(array.dtype).endswith("bfloat16"):
        import mlx.core as mx

        array = array.astype(mx.float32)  # NumPy has no bfloat16
    return np.asarray(array)


def _cache_layer(keys: Any, values: Any) -> Any:
    """Return the cache object of one layer: mlx-lm's own for MLX arrays, else a `KVCache`."""
    if not _is_mlx(keys):
        return KVCache(keys, values)
    from mlx_lm.models.cache import KVCache as MlxCache

    cache = MlxCache()
    cache.keys, cache.values, cache.offset = keys, values, int(keys.shape[2])
    return cache


def _used_slots(layer: Any) -> tuple[Any, Any]:
    """Return a layer's keys and values without the unused slots that mlx-lm's caches allocate."""
    return layer.keys[:, :, : layer.offset], layer.values[:, :, : layer.offset]


def _as_prompt_cache(cache: Sequence[Any]) -> PromptCache:
    """Return a list of layers as a `PromptCache`; their `weft_rows` give the token ids."""
    if isinstance(cache, PromptCache):
        return cache
    cached = getattr(cache[0], "weft_rows", None) if cache else None
    if cached is None:
        return PromptCache(cache, [])
    return PromptCache(cache, cached.rows, cached.start, cached.marks, is_path=cached.is_path)


def _check_adjacent(frags: Sequence[KVFrag]) -> None:
    """Raise ConfigError if a fragment does not begin where the previous one ends."""
    for previous, following in zip(frags, frags[1:], strict=False):
        end = previous.start + previous.keys.shape[2]
        if end != following.start:
            raise ConfigError(
                f"a fragment that begins at token {following.start} cannot follow one that ends at "
                f"{end}: keys depend on their position. Fuse fragments of one path, in order"
            )


def _check_full_prefix(cache: PromptCache) -> None:
    """Raise ConfigError unless the cache is one row from the start of a path, with token ids."""
    n_slots = cache[0].offset if cache else 0
    if cache.start or len(cache.rows) != 1 or len(cache.token_ids) != n_slots:
        raise ConfigError(
            "only a cache of one full prefix from token 0 with token ids can be continued; this "
            "one is a part of a path, a batch, or has arrays without token ids"
        )
