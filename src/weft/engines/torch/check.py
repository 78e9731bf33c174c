"""The load check: a small tree, held against the model's own plain forward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...errors import ForwardError, ModelLoadError
from ..base import Row, Span
from .refusals import NoTree

if TYPE_CHECKING:
    from .engine import TorchEngine

# Root-mean-square error of a position, relative to the spread of the logits.
# Where activations are quantised, a last bit of one may become a whole step of its grid.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.08, torch.bfloat16: 0.15}
_QUANTISED_TOLERANCE = 0.15

_TRUNK, _CHUNKS, _PATHS = 8, (7, 6), 3  # 8 + 7 + 6 + 3 single tokens = 24


def quantised(model: PreTrainedModel) -> str:
    """Return what stands for the numbers of a model's weights; "" where they are numbers."""
    for parameter in model.parameters():
        kind = type(parameter)
        is_number = parameter.is_floating_point() and parameter.dtype.itemsize > 1
        if hasattr(kind, "__tensor_flatten__") or not is_number:
            return kind.__name__ if kind is not nn.Parameter else str(parameter.dtype)
    return type(model.hf_quantizer).__name__ if getattr(model, "hf_quantizer", None) else ""


def check_paths(n_vocab: int) -> Tensor:
    """Token ids of the three paths of the check tree, [3, 16]; the shorter ones are filled up."""
    ids = torch.tensor([(i * i * 7 + 13 * i + 5) % n_vocab for i in range(_PATHS * 16)])
    paths = ids.reshape(_PATHS, 16)
    paths[:, :_TRUNK] = paths[0, :_TRUNK]
    return paths


def plain_logits(model: PreTrainedModel, paths: Tensor) -> Tensor:
    """Return the model's own logits of the check paths, float32 [3, 16, V] on the host.

    Raises: ModelLoadError where it fails, or they are not finite.
    """
    try:
        own = model(input_ids=paths.to(model.device), use_cache=False).logits.float().cpu()
    except Exception as error:
        raise ModelLoadError(
            f"{type(model).__name__} failed on a first forward: {type(error).__name__}: {error}"
        ) from error
    if not bool(torch.isfinite(own).all()):
        dtype = str(model.dtype).removeprefix("torch.")
        is_widest = model.dtype in (torch.float32, torch.float64)
        todo = "check its files" if is_widest else "load it with another dtype (bfloat16, float32)"
        raise ModelLoadError(
            f"{type(model).__name__} gives logits that are not finite in {dtype}; {todo}"
        )
    return own


def check_tree(engine: TorchEngine, own: Tensor) -> None:
    """Run the check tree and compare with `own`, the model's plain logits: float32 [3, 16, V].

    Raises: NoTree where they differ, so the model does something the hook does not know.
    """
    try:
        got, want = _run_tree(engine, check_paths(engine.info.n_vocab).tolist(), own)
    except ForwardError as error:
        raise NoTree(f"it fails in a tree: {error}") from error
    off, tolerance = difference(got, want, engine.model)
    if not off <= tolerance:
        raise NoTree(
            f"its logits in a tree differ from its own plain forward by {off:.2g} of their spread"
            f" (allowed: {tolerance}): its attention does something that Transformers' attention"
            " interface does not carry"
        )


def difference(got: Tensor, want: Tensor, model: PreTrainedModel) -> tuple[float, float]:
    """Return how far logits [n, V] are from those wanted, relative to their spread, and how far
    they may be.
    """
    spread = (want - want.mean(-1, keepdim=True)).square().mean().sqrt()
    errors = (got - want).square().mean(-1).sqrt() / spread.clamp_min(1e-6)
    # In half precision a router may send a token to another expert for a last bit: a lone position
    # may then differ. What the engine does not know of a model is wrong at most positions.
    if quantised(model):
        return float(errors.median()), _QUANTISED_TOLERANCE
    error = errors.max() if model.dtype == torch.float32 else errors.median()
    return float(error), _TOLERANCE.get(model.dtype, 0.15)


def _run_tree(engine: TorchEngine, paths: list[list[int]], own: Tensor) -> tuple[Tensor, Tensor]:
    """Trunk, two chunks below it, then one token after each of the three tips."""
    store = engine.fragments
    trunk, *chunks = (store.new(None) for _ in range(1 + len(_CHUNKS)))
    tips = [store.new(None) for _ in range(_PATHS)]
    try:
        engine.forward([Row((), paths[0][:_TRUNK], 0, trunk)])
        above = (Span(trunk, _TRUNK),)
        ends = [_TRUNK + n for n in _CHUNKS] + [_TRUNK]
        first = engine.forward(
            [
                Row(above, paths[i][_TRUNK : ends[i]], _TRUNK, chunks[i], (n - 1,))
                for i, n in enumerate(_CHUNKS)
            ]
        )
        routes = [(*above, Span(chunk, chunk.length)) for chunk in chunks] + [above]
        second = engine.forward(
            [
                Row(routes[i], paths[i][end : end + 1], end, tips[i], (0,))
                for i, end in enumerate(ends)
            ]
        )
        got = [first.logits(i) for i in range(len(_CHUNKS))] + [
            second.logits(i) for i in range(_PATHS)
        ]
        where = [(i, ends[i] - 1) for i in range(len(_CHUNKS))] + list(enumerate(ends))
        return torch.stack([torch.from_numpy(g) for g in got]), torch.stack(
            [own[i, at] for i, at in where]
        )
    finally:
        for fragment in (trunk, *chunks, *tips):
            store.free(fragment)
