"""Load-time check of a model: tree attention must return the logits of the model's own forward."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ...errors import ModelLoadError, Unsupported
from ..base import Fragments, Row, Span

if TYPE_CHECKING:
    from .engine import MlxEngine

# Root-mean-square error of a position, relative to the spread of the logits.
_TOLERANCE = {"float32": 1e-3, "float16": 0.08, "bfloat16": 0.15}

_TRUNK, _CHUNKS, _PATHS = 8, (7, 6), 3  # 8 + 7 + 6 + 3 single tokens = 24


def check_paths(n_vocab: int) -> NDArray[np.int64]:
    """Return the token ids of the check tree's three paths, [3, 16]; shorter ones are padded."""
    at = np.arange(_PATHS * 16)
    paths = ((at * at * 7 + 13 * at + 5) % n_vocab).reshape(_PATHS, 16)
    paths[:, :_TRUNK] = paths[0, :_TRUNK]
    return paths


def check_tree(engine: MlxEngine, paths: NDArray[np.int64], own: NDArray[np.float32]) -> None:
    """Run the check tree and compare with `own`, the model's plain logits: float32 [3, 16, V].

    Raises:
        Unsupported: the logits differ, so the model has a feature that the engine does not support.
        ModelLoadError: the model's own logits are not finite.
    """
    if not np.isfinite(own).all():
        raise ModelLoadError(
            f"{engine.info.model} has logits that are not finite in {engine.info.dtype}; "
            "load it with another dtype (bfloat16 or float32)",
            hint="docs/troubleshooting.md#nonsense-output lists other causes",
        )
    got, want = _run_tree(engine, paths.tolist(), own)
    spread = np.sqrt(np.square(want - want.mean(-1, keepdims=True)).mean())
    errors = np.sqrt(np.square(got - want).mean(-1)) / max(float(spread), 1e-6)
    # In half precision a router may choose another expert because of the last bit, so that a single
    # position differs. An unsupported feature changes most positions.
    exact = engine.info.dtype == "float32"
    error = float(errors.max() if exact else np.median(errors))
    tolerance = _TOLERANCE.get(engine.info.dtype, 0.15)
    if not error <= tolerance:
        raise Unsupported(
            f"the mlx engine cannot run {engine.info.model}: its logits in a tree differ from its "
            f"own plain forward by {error:.2g} of their spread (allowed: {tolerance}); its "
            "attention has an unsupported feature"
        )


def _run_tree(
    engine: MlxEngine, paths: list[list[int]], own: NDArray[np.float32]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Run the check tree through the engine.

    The tree has a trunk, two chunks below it and a token after each of the three tips. Engines
    without fragments run full paths.

    Returns:
        The engine's logits, and those in `own` for the same tokens.
    """
    ends = [_TRUNK + n for n in _CHUNKS] + [_TRUNK]
    where = [(i, end - 1) for i, end in enumerate(ends[:2])] + list(enumerate(ends))
    want = np.stack([own[i, at] for i, at in where])
    if engine.fragments is None:
        output = engine.forward([Row((), paths[i][: at + 1], 0, None, (at,)) for i, at in where])
        return np.stack([output.logits(number) for number in range(len(where))]), want
    return _run_nodes(engine, engine.fragments, paths, ends), want


def _run_nodes(
    engine: MlxEngine, store: Fragments, paths: list[list[int]], ends: list[int]
) -> NDArray[np.float32]:
    """Run the check tree in fragments; return the logits of the chunks' ends and the tips.

    paths: token ids of the three paths. ends: index of the tip's token in each path.
    """
    trunk, *chunks = (store.new(None) for _ in range(1 + len(_CHUNKS)))
    tips = [store.new(None) for _ in range(_PATHS)]
    try:
        engine.forward([Row((), paths[0][:_TRUNK], 0, trunk)])
        above = (Span(trunk, _TRUNK),)
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
        got = [first.logits(i) for i in range(len(_CHUNKS))]
        return np.stack([*got, *(second.logits(i) for i in range(_PATHS))])
    finally:
        for fragment in (trunk, *chunks, *tips):
            store.free(fragment)
