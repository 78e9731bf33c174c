"""The load check: results of the engine for a small tree, compared with the model's plain forward.

For kernels that only a GPU runs, it also runs a long path: the prompt in one step, then single
tokens and many rows again. So tiles of every size attend to full blocks of keys, alone and merged.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...errors import ForwardError, ModelLoadError, is_out_of_memory
from ..base import Row, Span
from .compatibility import PrefixCachingUnsupported

if TYPE_CHECKING:
    from .engine import TorchEngine
    from .output import TorchOutput

# Root-mean-square error of a position, relative to the spread of the logits.
# With quantised activations, the last bit of one may become a full quantisation step.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.08, torch.bfloat16: 0.15}
_QUANTISED_TOLERANCE = 0.15

LONGEST = 20  # path of the check tree
_TRUNK, _CHUNKS, _PATHS = 8, (7, 6), 3  # 8 + 7 + 6, and single tokens at three tips
_FILLER_AT = 3  # position in the trunk of a padding token
_STEPS = 4  # of the tips: two run eagerly, one is captured, one is replayed
_FAR, _EVERY = 640, 16  # tokens of the long path; every 16th one's logits are compared
# For a mixture of experts: long enough that each expert has rows for its large tiles.
_ROWS_AN_EXPERT, _FARTHEST = 32, 2048
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_OF_A_TOKEN = ("num_experts_per_tok", "moe_topk", "moe_top_k", "top_k_experts", "moe_k")
# Positions of the long path that run again: the last ones as single rows; those before them with
# so many rows that they fill more than the smallest tile.
_LONELY, _CROWDED, _CROWD = 8, 3, 24
# Row counts with shared keys or without: few enough for unmerged parts; and enough to fill the
# largest tiles, with more programs (a row and a KV head each) than a GPU runs at once. The logits
# of some rows are compared.
_FEW, _MANY, _PROGRAMS, _COMPARED = 8, 132, 1024, 33


def quantised(model: PreTrainedModel) -> str:
    """Return the class or dtype of quantised weights; "" if they are plain numbers."""
    for parameter in model.parameters():
        kind = type(parameter)
        is_number = parameter.is_floating_point() and parameter.dtype.itemsize > 1
        if hasattr(kind, "__tensor_flatten__") or not is_number:
            return kind.__name__ if kind is not nn.Parameter else str(parameter.dtype)
    quantizer = getattr(model, "hf_quantizer", None)
    # NOTE: Transformers leaves the quantizer of a GGUF file on the model after dequantising.
    # Packed weights are bytes, and returned above.
    is_left_over = type(quantizer).__name__ == "GgufHfQuantizer"
    return "" if quantizer is None or is_left_over else type(quantizer).__name__


class PlainOutputs(NamedTuple):
    """Logits of the unchanged model: float32, on the host.

    Attributes:
        paths: token ids of the check tree, [3, 20].
        tree: its logits, [3, 20, V].
        far: token ids of a long path, [n]; None if no kernels are checked.
        far_logits: logits of every 16th token of it.
    """

    paths: Tensor
    tree: Tensor
    far: Tensor | None = None
    far_logits: Tensor | None = None

    @classmethod
    def from_model(
        cls, model: PreTrainedModel, context_length: int, *, has_kernels: bool = False
    ) -> PlainOutputs:
        """Run the model. Raises: ModelLoadError if it fails, or its logits are not finite."""
        paths = check_paths(model)
        tree = _plain_logits(model, paths)
        if not has_kernels:
            return cls(paths, tree)
        far = _random_ids(
            min(long_path_length(model.config.get_text_config()), context_length), model
        )
        return cls(paths, tree, far, _plain_logits(model, far[None], every=_EVERY)[0])


def long_path_length(config: Any) -> int:
    """Return the number of tokens of the long path. config: of the model's text part."""
    n_experts, n_chosen = (
        next((n for n in (getattr(config, name, None) for name in names) if type(n) is int), 0)
        for names in (_EXPERTS, _OF_A_TOKEN)
    )
    n = -(-_ROWS_AN_EXPERT * n_experts // n_chosen) if n_chosen > 0 else 0
    return min(max(_FAR, n), _FARTHEST)


def check_paths(model: PreTrainedModel) -> Tensor:
    """Return token ids of the three paths of the check tree, [3, 20]; shorter ones are padded.

    A padding token is among them, because some models shift the positions after one.
    """
    paths = _random_ids(_PATHS * LONGEST, model).reshape(_PATHS, LONGEST)
    filler = getattr(model.config.get_text_config(), "pad_token_id", None)
    if isinstance(filler, int) and 0 <= filler < _n_ids(model):
        paths[:, _FILLER_AT] = filler
    paths[:, :_TRUNK] = paths[0, :_TRUNK]
    return paths


def _random_ids(n: int, model: PreTrainedModel) -> Tensor:
    """Return n fixed, varied token ids in the model's vocabulary."""
    n_vocab = _n_ids(model)
    return torch.tensor([(i * i * 7 + 13 * i + 5) % n_vocab for i in range(n)])


def _n_ids(model: PreTrainedModel) -> int:
    """Return the number of token ids that the embedding and the config both allow."""
    n_known: int = model.get_input_embeddings().num_embeddings
    return min(n_known, getattr(model.config.get_text_config(), "vocab_size", n_known))


def _plain_logits(model: PreTrainedModel, paths: Tensor, every: int = 1) -> Tensor:
    """Run paths [B, T]; return the logits of some tokens: float32 [B, n, V] on the host.

    every: 1 for all tokens; n for the tokens 0, n, 2n, … of each path.
    Raises: ModelLoadError if the model fails or its logits are not finite.
    """
    try:
        logits = model(input_ids=paths.to(model.device), use_cache=False).logits
        own = logits[:, ::every].float().cpu()
    except Exception as error:
        raise ModelLoadError(
            f"{type(model).__name__} failed on a first forward: {type(error).__name__}: {error}"
        ) from error
    if not bool(torch.isfinite(own).all()):
        dtype = str(model.dtype).removeprefix("torch.")
        is_widest = model.dtype in (torch.float32, torch.float64)
        todo = "check its files" if is_widest else "load it with another dtype (bfloat16, float32)"
        raise ModelLoadError(
            f"{type(model).__name__} gives logits that are not finite in {dtype}; {todo}",
            hint="docs/troubleshooting.md#nonsense-output lists other causes",
        )
    return own


def check_tree(engine: TorchEngine, own: PlainOutputs) -> None:
    """Run the check tree, and the long path if there is one; compare with the model's own forward.

    own: outputs of that forward.

    Raises: PrefixCachingUnsupported if they differ: the model does something that the attention
    hook does not support, or a kernel is wrong on this device.
    """
    n_steps = 1 if own.far is None else _STEPS
    try:
        _raise_if_different(*_run_tree(engine, own, n_steps), engine.model)
        if own.far is not None and own.far_logits is not None:
            for got, want in _run_far(engine, own.far.tolist(), own.far_logits):
                _raise_if_different(got, want, engine.model)
    except PrefixCachingUnsupported:
        raise
    except (ForwardError, RuntimeError) as error:  # a GPU reports some errors later
        if is_out_of_memory(error):
            raise ModelLoadError(
                f"there is no memory left to run {type(engine.model).__name__} with: {error}"
            ) from error
        raise PrefixCachingUnsupported(f"it fails in a tree: {error}") from error


def _raise_if_different(got: Tensor, want: Tensor, model: PreTrainedModel) -> None:
    """Raise PrefixCachingUnsupported if logits differ by more than rounding; see `difference`."""
    off, tolerance = difference(got, want, model)
    if not off <= tolerance:
        raise PrefixCachingUnsupported(
            f"its logits in a tree differ from its own plain forward by {off:.2g} of their spread"
            f" (allowed: {tolerance}): its attention or its positions do something that"
            " Transformers' attention interface does not carry"
        )


def difference(got: Tensor, want: Tensor, model: PreTrainedModel) -> tuple[float, float]:
    """Return the error of logits, relative to their spread, and the largest allowed error.

    Args:
        got: the engine's logits, [n, V].
        want: the expected logits, [n, V].
        model: its dtype and quantisation determine the allowed error.
    """
    # The few scores of a classification head are compared across tokens.
    center = want.mean() if want.shape[-1] < _FEW else want.mean(-1, keepdim=True)
    spread = (want - center).square().mean().sqrt()
    errors = (got - want).square().mean(-1).sqrt() / spread.clamp_min(1e-6)
    # In half precision, one bit may change a router's expert, so single positions may differ. A
    # feature that the engine does not support changes nearly all positions.
    if quantised(model):
        return float(errors.median()), _QUANTISED_TOLERANCE
    error = errors.max() if model.dtype == torch.float32 else errors.median()
    return float(error), _TOLERANCE.get(model.dtype, 0.15)


def _run_tree(engine: TorchEngine, own: PlainOutputs, n_steps: int) -> tuple[Tensor, Tensor]:
    """Run a trunk, two chunks below it, then `n_steps` tokens at three tips.

    Returns the engine's logits and the expected ones, [n, V] each.
    """
    paths: list[list[int]] = own.paths.tolist()
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
        got = [first.logits(i) for i in range(len(_CHUNKS))]
        want = [own.tree[i, ends[i] - 1] for i in range(len(_CHUNKS))]
        for step in range(n_steps):
            places = list(enumerate(end + step for end in ends))
            output = engine.forward(
                [Row(routes[i], paths[i][at : at + 1], at, tips[i], (0,)) for i, at in places]
            )
            got += [output.logits(i) for i in range(_PATHS)]
            want += [own.tree[i, at] for i, at in places]
        return torch.stack([torch.from_numpy(g) for g in got]), torch.stack(want)
    finally:
        for fragment in (trunk, *chunks, *tips):
            store.free(fragment)


def _run_far(engine: TorchEngine, path: list[int], own: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Run the long path in one step, then some of its tokens again in other batches.

    Yields the engine's logits and the expected ones, [n, V] each.

    Args:
        path: token ids.
        own: expected logits of every 16th token.
    """
    fragment = engine.fragments.new(None)
    places = range(0, len(path), _EVERY)
    lonely = places[1:][-_LONELY:]
    crowded = places[1 : -len(lonely)][-_CROWDED:]

    def repeat(at: int) -> Row:
        return Row((Span(fragment, at),), path[at : at + 1], at, None, (0,))

    try:
        first = engine.forward([Row((), path, 0, fragment, tuple(places))])
        yield _stack_logits(first, len(places)), own
        for chosen, n in ((lonely, 1), (crowded, _CROWD)):
            positions = [at for at in chosen for _ in range(n)]
            if positions:
                output = engine.forward(list(map(repeat, positions)))
                yield _stack_logits(output, len(positions)), own[[at // _EVERY for at in positions]]
        if not lonely:
            return
        with engine.fragments.small_chunks():
            output = engine.forward(list(map(repeat, lonely[-1:])))
        yield _stack_logits(output, 1), own[[lonely[-1] // _EVERY]]
        n_kv = min(shape.n_heads for shape, _ in engine.fragments.layout.groups)
        for at, above in ((lonely[0], (Span(fragment, lonely[0]),)), (0, ())):
            for n in (_FEW, max(_MANY, 1 + _PROGRAMS // n_kv)):
                every = -(-n // _COMPARED)
                wanted = range(0, n, every)
                rows = [
                    Row(above, path[at : at + 1], at, None, () if number % every else (0,))
                    for number in range(n)
                ]
                output = engine.forward(rows)
                yield _stack_logits(output, len(wanted)), own[[at // _EVERY] * len(wanted)]
    finally:
        engine.fragments.free(fragment)


def _stack_logits(output: TorchOutput, n: int) -> Tensor:
    """Return the first n logits of an output as one tensor [n, V] on the host."""
    return torch.stack([torch.from_numpy(output.logits(i)) for i in range(n)])
