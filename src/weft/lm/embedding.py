"""The implementation of `LM.embed`: pool the model's final hidden states into vectors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, get_args

import numpy as np

from .._core.validation import check_int
from ..engines.base import Engine, Pooling, Row
from ..errors import ConfigError, ContextOverflow, StaleHandle

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .lm import LM

_TINY_NORM = 1e-8  # a vector this short has no direction


def embed(
    lm: LM,
    texts: Sequence[str | Sequence[int]],
    *,
    pooling: Pooling | None = None,
    normalize: bool = True,
) -> NDArray[np.float32]:
    """Compute an embedding vector for each text: float32 [N, n_embd]; see `LM.embed`."""
    _check_open(lm)
    if pooling is None:
        pooling = lm.info.pooling or "mean"
    if pooling not in get_args(Pooling):
        raise ConfigError(f"pooling is {pooling!r}; allowed are {', '.join(get_args(Pooling))}")
    ids = [_token_ids(lm, index, text) for index, text in enumerate(_check_texts(texts))]
    out = np.empty((len(ids), lm.info.n_embd), np.float32)
    for indices in _batches([len(one) for one in ids], lm.scheduler.n_batch):
        some = [ids[index] for index in indices]
        states = lm.driver.exclusive(lambda some=some: _hidden_states(lm, some))  # type: ignore[misc]
        for index, state in zip(indices, states, strict=True):
            out[index] = _pool(state, pooling)
    if normalize:
        norms = np.linalg.norm(out, axis=1, keepdims=True)
        out /= np.where(norms > _TINY_NORM, norms, 1)
    return out


def _check_open(lm: LM) -> None:
    if lm.closed:
        raise StaleHandle("this LM is closed; load it again")


def _check_texts(texts: Sequence[str | Sequence[int]]) -> Sequence[str | Sequence[int]]:
    """Return the texts; raise ConfigError for anything but a list."""
    if isinstance(texts, str | bytes) or not isinstance(texts, Sequence):
        raise ConfigError(f"texts is a {type(texts).__name__}; allowed is a list of texts")
    return texts


def _token_ids(lm: LM, index: int, text: str | Sequence[int]) -> list[int]:
    """Return the validated token ids of one text.

    index: index of the text in the call, for error messages.
    """
    if isinstance(text, bytes) or not isinstance(text, Sequence) or not text:
        raise ConfigError(f"text {index} is {text!r:.60}; give a text that is not empty")
    if isinstance(text, str):
        lm.check_length(text)
        ids = lm.tokenize(text)
    else:
        ids = [check_int("a token id", token, 0) for token in text]
        lm.text.check_ids(ids)
    if not ids:
        raise ConfigError(f"text {index}, {text!r:.60}, has no tokens; leave it out")
    if len(ids) > lm.n_ctx:
        raise ContextOverflow(
            f"text {index} has {len(ids)} tokens, but the context is {lm.n_ctx}",
            n_tokens=len(ids),
            n_ctx=lm.n_ctx,
            hint="embed it in parts, or load the model with a larger n_ctx",
        )
    return ids


def _batches(lengths: Sequence[int], n_batch: int) -> Iterator[list[int]]:
    """Yield indices of texts in groups that fit in one forward.

    A text longer than a forward is a group of its own.

    Args:
        lengths: number of tokens of each text.
        n_batch: maximum number of tokens of a forward.
    """
    group: list[int] = []
    total = 0
    for index, length in enumerate(lengths):
        if group and total + length > n_batch:
            yield group
            group, total = [], 0
        group.append(index)
        total += length
    if group:
        yield group


def _hidden_states(lm: LM, ids: list[list[int]]) -> list[NDArray[np.float32]]:
    """Compute the final hidden states of full texts: [T, n_embd] each.

    It uses the engine directly, so it must not run during a step.
    """
    _check_open(lm)  # it may have been closed since `embed` started
    engine, n_batch = lm.engine, lm.scheduler.n_batch
    if len(ids) == 1 and len(ids[0]) > n_batch:
        return [_hidden_states_of_long_text(engine, ids[0], n_batch)]
    return engine.hidden_states([Row((), one, 0) for one in ids])


def _hidden_states_of_long_text(
    engine: Engine, ids: list[int], n_batch: int
) -> NDArray[np.float32]:
    """Compute the final hidden states of a text that is longer than a forward: [T, n_embd].

    It runs in several forwards; their KV is freed afterwards.
    """
    fragments = engine.fragments
    if fragments is None:
        return engine.hidden_states([Row((), ids, 0)])[0]
    kept = fragments.new(None)
    try:
        parts = [
            engine.hidden_states([Row((), ids[at : at + n_batch], at, kv_out=kept)])[0]
            for at in range(0, len(ids), n_batch)
        ]
    finally:
        fragments.free(kept)
    return np.concatenate(parts)


def _pool(state: NDArray[np.float32], pooling: Pooling) -> NDArray[np.float32]:
    """Combine a text's hidden states [T, n_embd] into one vector [n_embd]."""
    if pooling == "mean":
        mean: NDArray[np.float32] = state.mean(axis=0, dtype=np.float64).astype(np.float32)
        return mean
    row: NDArray[np.float32] = state[0 if pooling == "cls" else -1]
    return row
