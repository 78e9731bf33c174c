"""Models of mlx-lm: loading, checks, and access to their parts."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import mlx.core as mx
import numpy as np
from mlx import nn
from mlx.utils import tree_flatten

from ..._core.validation import check_choice, check_int
from ...errors import ConfigError, EngineError, ModelLoadError, Unsupported
from .. import checkpoint
from ..config_check import OTHER_ENGINE, check_config
from .config import mlx_lm_keys, windows_of
from .library import mlx_lm
from .rope import complete_rope

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..hub import Progress

_log = logging.getLogger("weft.engines.mlx")

MakeCache = Callable[[], list[Any]]

DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16, "float16": mx.float16}
_NO_LIMIT = 1 << 20
# Families for which mlx-lm 0.32 computes other logits than Transformers, and on which condition.
_DIFFERENT = {
    "mamba2": ("more than one group of its state", lambda config: config.get("n_groups", 1) > 1),
    "jamba": ("experts", lambda config: config.get("num_experts", 1) > 1),
    "ernie4_5_moe": ("experts", lambda config: True),
}
# Families whose KV, and numbers, are those of Transformers' model with the same weights.
_AS_TRANSFORMERS = ("llama", "mistral", "qwen2", "qwen3")


def resolve_device(device: str) -> mx.Device:
    """Return the device for "auto", "cpu", "gpu" or "metal" (the same as "gpu")."""
    check_choice("device", device, ("auto", "cpu", "gpu", "metal"))
    if device == "auto":
        return mx.default_device()
    place = mx.Device(mx.cpu if device == "cpu" else mx.gpu, 0)
    if not mx.is_available(place):
        raise ConfigError(f"device is {device!r}, and MLX sees no GPU; allowed is 'cpu'")
    return place


class Windows(NamedTuple):
    """Sliding windows of a config.json that mlx-lm's code for the model does not apply.

    Args:
        slots: window of all layers, which Weft applies; None: mlx-lm applies all windows.
        limit: longest context for which mlx-lm's results are right; None: no limit.
    """

    slots: int | None = None
    limit: int | None = None


class LoadedModel(NamedTuple):
    """A model of mlx-lm, the fingerprint of its weights, and the windows that mlx-lm ignores."""

    model: nn.Module
    fingerprint: str
    windows: Windows


def load_model(
    folder: Path,
    dtype: str,
    device: mx.Device,
    *,
    n_ctx: int | None,
    trust_remote_code: bool,
    progress: Progress | None,
) -> LoadedModel:
    """Load a folder's model for a device.

    Raises:
        ModelLoadError: files are missing or broken.
        Unsupported: mlx-lm has no such model, or ignores a number of its config.json.
    """
    check_choice("dtype", dtype, ("auto", *DTYPES))
    stored = checkpoint.open_checkpoint(folder)  # MLX does not detect a truncated file
    check_model_type(stored.config)
    if progress is not None:
        progress("load", 0, 1, str(folder))
    try:
        model, _ = mlx_lm("utils").load_model(
            folder,
            model_config=mlx_lm_keys(stored.config, n_ctx=n_ctx),
            trust_remote_code=trust_remote_code,
        )
    except EngineError:
        raise
    except Exception as error:  # values of a wrong type may cause any error
        raise ModelLoadError(
            f"mlx-lm cannot load the model in {folder}: {type(error).__name__}: {error}"
        ) from error
    windows = check_loaded_config(model, stored.config)
    complete_rope(model, stored.config)
    if dtype != "auto":
        model.set_dtype(DTYPES[dtype])
    if progress is not None:
        progress("load", 1, 1, str(folder))
    fingerprint = None
    if stored.config.get("model_type") in _AS_TRANSFORMERS:
        with suppress(Unsupported):  # tensors in a quantised format
            fingerprint = stored.fingerprint()
    fingerprint = fingerprint or fingerprint_of(model)
    if device.type == mx.cpu:
        store_column_major(model)
    return LoadedModel(model, fingerprint, windows)


def check_loaded_config(model: nn.Module, config: Mapping[str, Any]) -> Windows:
    """Check that a loaded model computes with the numbers of its config.json.

    Logs a warning for differences that matter less.

    Returns:
        The windows that mlx-lm does not apply; empty if it applies all.

    Raises:
        Unsupported: a number or a sliding window differs, and every answer would be wrong.
    """
    epsilons = {each for m in model.modules() if isinstance(each := getattr(m, "eps", None), float)}
    check_config(config, config_of(model), library="mlx-lm", epsilons=epsilons)
    kind = config.get("model_type")
    what, differs = _DIFFERENT.get(str(kind), ("", lambda config: False))
    if differs(config):
        _log.warning("mlx-lm computes other logits than Transformers for %s with %s", kind, what)
    windows = windows_of(config)
    own = [getattr(cache, "max_size", None) for cache in make_cache(model)]
    if not any(windows) or own == windows:
        return Windows()
    if any(own) and len(own) == len(windows):
        raise Unsupported(
            f"mlx-lm gives the layers of this {kind} the sliding windows {own}, but its config.json"
            f" has {windows}{OTHER_ENGINE}",
            hint='try engine="torch"',
        )
    if any(own):  # layers share caches
        return Windows()
    window = min(each for each in windows if each is not None)
    if all(windows):
        return Windows(slots=window)
    _log.warning(
        "mlx-lm applies no sliding window to %s models: the context is limited to the window of %d"
        ' tokens; engine="torch" applies it',
        kind,
        window,
    )
    return Windows(limit=window)


def store_column_major(model: nn.Module) -> None:
    """Store the float32 weights of linear layers column by column, for MLX on a CPU.

    Its matrix products read a weight [out, in] by columns 1.6 times as fast (1 to 512 rows). Other
    dtypes make no difference. Values, shapes and the code that multiplies by `weight.T` stay the
    same. Cost: a copy of one weight at a time.
    """
    is_tied = bool(config_of(model).get("tie_word_embeddings"))
    for module in model.modules():
        if isinstance(module, nn.Linear) or (is_tied and isinstance(module, nn.Embedding)):
            weight = module.weight
            if weight.dtype == mx.float32 and weight.ndim == 2:
                module.weight = mx.contiguous(weight.T).T
                mx.eval(module.weight)


def check_model_type(config: Mapping[str, Any]) -> None:
    """Raise Unsupported if mlx-lm has no code for the model of a config.json."""
    kind = config.get("model_type")
    if config.get("is_encoder_decoder"):
        raise Unsupported(
            f"the mlx engine cannot run {kind}: it is an encoder-decoder model; only decoder-only"
            " models are supported"
        )
    if config.get("model_file"):
        return  # the model has its own code
    utils = mlx_lm("utils")
    name = utils.MODEL_REMAPPING.get(kind, kind)
    spec = None
    if isinstance(name, str) and name.replace("_", "").replace("-", "").isalnum():
        import importlib.util

        spec = importlib.util.find_spec(f"mlx_lm.models.{name}")
    if spec is None:
        raise Unsupported(
            f"the mlx engine cannot run {kind}: this version of mlx-lm has no such model; use"
            ' engine="torch", or update mlx-lm'
        )


def config_of(model: nn.Module) -> dict[str, Any]:
    """Return a model's own configuration; values of the text part take precedence."""
    args = getattr(model, "args", None) or getattr(model, "config", None)
    config = _as_dict(args)
    text = config.get("text_config")
    return {**config, **(text if isinstance(text, dict) else _as_dict(text))}


def _as_dict(args: Any) -> dict[str, Any]:
    """Convert a dataclass or dict to a dict; everything else to an empty one."""
    if dataclasses.is_dataclass(args):
        return {each.name: getattr(args, each.name) for each in dataclasses.fields(args)}
    return dict(args) if isinstance(args, dict) else {}


def context_of(config: Mapping[str, Any], n_ctx: int | None, limit: int | None = None) -> int:
    """Return the context length: `n_ctx`, or the model's own if `n_ctx` is None.

    Args:
        config: content of config.json.
        n_ctx: requested length; at most the model's own.
        limit: lowers the model's own length; None: no limit. See `Windows.limit`.

    Raises:
        ConfigError: `n_ctx` is out of range.
    """
    values = (config.get(name) for name in checkpoint.CONTEXT_NAMES)
    own = next((value for value in values if isinstance(value, int) and value > 0), _NO_LIMIT)
    own = own if limit is None else min(own, limit)
    return own if n_ctx is None else check_int("n_ctx", n_ctx, 1, own)


def arrays_in(model: nn.Module) -> list[mx.array]:
    """Return all arrays of a model, including rotary tables."""
    return [
        array
        for module in model.modules()
        for value in module.values()
        if not isinstance(value, nn.Module)
        for _, array in tree_flatten(value)
        if isinstance(array, mx.array)
    ]


def fingerprint_of(model: nn.Module) -> str:
    """Return the fingerprint of a loaded model's weights.

    In families whose KV is the same in other engines, it equals the fingerprint of the folder.
    """
    config = config_of(model)
    own = checkpoint.fingerprint(config, _samples(model))
    return own if config.get("model_type") in _AS_TRANSFORMERS else f"{own}-mlx"


def _samples(model: nn.Module) -> Iterator[tuple[str, tuple[int, ...], NDArray[np.float32]]]:
    """Yield name, shape and sampled float32 values of every weight, for the fingerprint."""
    for name, array in tree_flatten(model.parameters()):
        at = mx.array(checkpoint.sample_positions(array.size))
        yield name, tuple(array.shape), np.array(array.reshape(-1)[at].astype(mx.float32))


def make_cache(model: nn.Module, window: int | None = None) -> list[Any]:
    """Return new caches of the types that the model creates.

    Args:
        model: the model.
        window: sliding window of all layers if the model's own caches have none; see `Windows`.
    """
    library = mlx_lm("models.cache")
    caches: list[Any] = library.make_prompt_cache(model)
    return caches if window is None else [library.RotatingKVCache(window) for _ in caches]


def caches_without_token_kv(caches: list[Any]) -> list[str]:
    """Return the type names of caches that do not store KV token by token, such as Mamba states.

    If the list is not empty, the engine cannot keep KV of this model and runs full paths.
    """
    library = mlx_lm("models.cache")
    plain = [each for each in caches if type(each) is library.KVCache]
    rotating = [each for each in caches if type(each) is library.RotatingKVCache and not each.keep]
    if len(plain) + len(rotating) == len(caches):
        return []
    return sorted({type(each).__name__ for each in caches if each not in [*plain, *rotating]})


# Paths of the part before the head, by the names that mlx-lm's models use.
_TRUNKS = (
    ("model",),
    ("transformer",),
    ("backbone",),
    ("language_model", "model"),
    ("language_model", "transformer"),
    ("model", "model"),
    ("model", "language_model"),
)


class RecordingTrunk:
    """Wraps a model without its head (the trunk), and records its hidden states.

    Attributes:
        fixed_hidden: if set, a call returns these hidden states and does not run the trunk.
        hidden: hidden states of the last run.
    """

    def __init__(self, inner: nn.Module) -> None:
        self.inner = inner
        self.fixed_hidden: mx.array | None = None
        self.hidden: mx.array | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.fixed_hidden is not None:
            return self.fixed_hidden
        self.hidden = self.inner(*args, **kwargs)
        return self.hidden

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class ModelHead:
    """A model split into trunk and head, so that logits are computed only where requested.

    The original object stays unchanged: the split uses shallow copies of its modules. If the model
    cannot be split, logits of all tokens are computed and used as hidden states (`n_embd` is 0).
    """

    def __init__(self, model: nn.Module, make: MakeCache) -> None:
        self._shell = model
        self._trunk: RecordingTrunk | None = None
        self.n_embd = 0
        ids = mx.array([[1, 2, 3, 1]])
        want = model(ids, cache=make())
        for path in _TRUNKS:
            cut = _with_recording_trunk(model, path)
            if cut is None:
                continue
            self._shell, self._trunk = cut
            logits = self._shell(ids, cache=make())
            hidden = self._trunk.hidden
            if not isinstance(hidden, mx.array) or hidden.shape[:2] != (1, 4) or hidden.ndim != 3:
                continue
            if hidden.shape == logits.shape and mx.array_equal(hidden, logits):
                continue  # the part includes the head
            last = self.logits(hidden[:, -1:])
            if mx.array_equal(logits, want) and mx.allclose(last[0, 0], want[0, -1], atol=1e-3):
                self.n_embd = int(hidden.shape[-1])
                return
        self._shell, self._trunk = model, None

    def hidden(self, ids: mx.array, caches: list[Any]) -> mx.array:
        """Run the model on ids [B, L], extend `caches`, and return the hidden states [B, L, E].

        If the model cannot be split, the result is its logits [B, L, V].
        """
        logits = self._shell(ids, cache=caches)  # lazy: never evaluated
        if self._trunk is None:
            return logits
        hidden, self._trunk.hidden = self._trunk.hidden, None
        assert hidden is not None
        return hidden

    def logits(self, hidden: mx.array) -> mx.array:
        """Return the logits [B, L, V] of hidden states [B, L, E]."""
        if self._trunk is None:
            return hidden
        self._trunk.fixed_hidden = hidden
        try:
            logits: mx.array = self._shell(mx.zeros(hidden.shape[:2], dtype=mx.int32))
            return logits
        finally:
            self._trunk.fixed_hidden = None


def _with_recording_trunk(
    model: nn.Module, path: tuple[str, ...]
) -> tuple[nn.Module, RecordingTrunk] | None:
    """Return a copy of the model with a `RecordingTrunk` at `path`; None if no module is there."""
    modules = [model]
    for name in path:
        inner = getattr(modules[-1], name, None)
        if not isinstance(inner, nn.Module):
            return None
        modules.append(inner)
    trunk = RecordingTrunk(modules.pop())
    part: Any = trunk
    for module, name in zip(reversed(modules), reversed(path), strict=True):
        shell = shallow_copy_of(module)
        setattr(shell, name, part)
        part = shell
    return part, trunk


def shallow_copy_of(module: nn.Module) -> nn.Module:
    """Return a new module object with the same submodules and arrays."""
    kind: Any = type(module)
    shell: nn.Module = kind.__new__(kind)
    dict.update(shell, module)
    shell.__dict__.update(module.__dict__)
    return shell
