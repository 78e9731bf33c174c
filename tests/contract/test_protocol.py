"""The engine protocol without the tree: the contract of `engines/base` for fragments and rows.

The tree, the scheduler and the interfaces use only a part of it, so that a fault here may stay
hidden. The expected values come from the engine's own plain forward; other files compare that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from contract.conftest import Make, NewEngine
from contract.helpers import assert_close, within
from weft.engines.base import Engine, Fragment, Fragments, Row, ScoreSpan, Span
from weft.errors import ForwardError, ModelMismatch, WeftError

IDS = [5, 40, 41, 300, 17, 9, 77, 120, 33, 64, 2, 81]

Arrays = dict[str, NDArray[Any]]


@pytest.fixture
def engine(kv_kind: str, make: Make) -> Iterator[Engine]:
    engine = make(kv_kind).engine
    yield engine
    assert store_of(engine).usage() == (0, 0)


def store_of(engine: Engine) -> Fragments:
    assert engine.fragments is not None
    return engine.fragments


def plain(engine: Engine, ids: Sequence[int]) -> NDArray[np.float32]:
    """Logits after every one of `ids`, from one row without any KV."""
    output = engine.forward([Row((), list(ids), 0, None, tuple(range(len(ids))))])
    return np.stack([output.logits(i) for i in range(len(ids))])


def grown(engine: Engine, first: int, n_single: int = 0) -> Fragment:
    """A fragment that holds the beginning of IDS: `first` tokens at once, then single ones."""
    fragment = store_of(engine).new(None)
    engine.forward([Row((), IDS[:first], 0, fragment)]).synchronize()
    for at in range(first, first + n_single):
        engine.forward([Row((), IDS[at : at + 1], at, fragment)]).synchronize()
    return fragment


def check_slots(engine: Engine, *fragments: Fragment) -> None:
    """Check that the fragments contain the first tokens of IDS, by predicting the next."""
    path = tuple(Span(fragment, fragment.length) for fragment in fragments)
    at = sum(span.length for span in path)
    result = engine.forward([Row(path, IDS[at : at + 1], at, None, (0,))]).logits(0)
    assert_close(result, plain(engine, IDS)[at])


def kv_names(engine: Engine) -> set[str]:
    return {f"{kind}.{layer}" for layer in range(engine.info.n_layers) for kind in "kv"}


def test_engine_info_is_consistent(kind: str, make: Make) -> None:
    engine = make(kind).engine
    info = engine.info
    assert (engine.fragments is None) == (info.kv == "hidden") == (info.kv_bytes_per_token == 0)
    assert info.fingerprint
    assert (info.max_paths is not None) == (info.kv == "sequence")


@pytest.mark.parametrize("n_single", [0, 3])
def test_join_undoes_split(engine: Engine, n_single: int) -> None:
    store, lower = store_of(engine), grown(engine, 5, n_single)
    length = lower.length
    upper = store.split(lower, 3)
    assert (upper.length, lower.length) == (3, length - 3)
    check_slots(engine, upper, lower)
    store.join(upper, lower)
    assert lower.length == store.usage().slots == length
    check_slots(engine, lower)
    store.trim(lower, 2)
    check_slots(engine, lower)
    store.free(lower)


def test_half_that_grows_leaves_the_other_unchanged(engine: Engine) -> None:
    if engine.info.kv == "sequence":
        pytest.skip("there a fragment that others stand on does not grow")
    store, lower = store_of(engine), grown(engine, 7)
    upper = store.split(lower, 3)
    before = store.export(lower)
    engine.forward([Row((), [91, 92], 3, upper)]).synchronize()
    for name, array in store.export(lower).items():
        np.testing.assert_array_equal(array, before[name])
    result = engine.forward([Row((Span(upper, 5),), [93], 5, None, (0,))]).logits(0)
    assert_close(result, plain(engine, [*IDS[:3], 91, 92, 93])[-1])
    store.free(lower)
    store.free(upper)


def test_exported_arrays_are_copies_of_the_slots(engine: Engine) -> None:
    store, fragment = store_of(engine), grown(engine, 3, 3)
    data = store.export(fragment)
    kv = {name: array for name, array in data.items() if name in kv_names(engine)}
    assert set(kv) == kv_names(engine)
    assert {array.shape[1] for array in kv.values()} == {6}
    assert sum(array.nbytes for array in kv.values()) == 6 * engine.info.kv_bytes_per_token
    store.trim(fragment, 0)
    engine.forward([Row((), [1, 2, 3, 4, 1, 2], 0, fragment)]).synchronize()
    store.free(fragment)
    cut = {name: array[:, :4] if name in kv else array for name, array in data.items()}
    back = store.load(cut, None)
    assert back.length == store.usage().slots == 4
    for array in kv.values():
        array[:] = 0
    check_slots(engine, back)
    store.free(back)


def test_exported_kv_has_the_dtype_of_the_engine(engine: Engine) -> None:
    store, fragment = store_of(engine), grown(engine, 3)
    assert str(store.export(fragment).get("dtype", engine.info.dtype)) == engine.info.dtype
    store.free(fragment)


def without_last_layer(kv: Arrays) -> Arrays:
    last = str(len(kv) // 2 - 1)
    return {name: array for name, array in kv.items() if name[2:] != last}


def with_another_axis(kv: Arrays) -> Arrays:
    return {name: array[..., None] for name, array in kv.items()}


def with_twice_the_bytes(kv: Arrays) -> Arrays:
    return {name: np.concatenate([array, array], axis=2) for name, array in kv.items()}


def as_complex(kv: Arrays) -> Arrays:
    return {name: array.astype(np.complex128) for name, array in kv.items()}


SPOILS = [without_last_layer, with_another_axis, with_twice_the_bytes, as_complex]


@pytest.mark.parametrize("spoil", SPOILS, ids=lambda spoil: spoil.__name__)
def test_load_of_another_models_kv_raises(
    engine: Engine, spoil: Callable[[Arrays], Arrays]
) -> None:
    store, fragment = store_of(engine), grown(engine, 5)
    data = store.export(fragment)
    marks = {name: array for name, array in data.items() if name not in kv_names(engine)}
    wrong = spoil({name: array for name, array in data.items() if name not in marks})
    before = store.usage()
    with pytest.raises(ModelMismatch):
        store.load({**wrong, **marks}, None)
    assert store.usage() == before
    store.free(fragment)


def test_unused_capacity_is_limited_by_growth_and_freed_by_settle(engine: Engine) -> None:
    store, slot = store_of(engine), engine.info.kv_bytes_per_token
    fragments = [store.new(None) for _ in range(4)]
    for at in range(5):
        rows = [Row((), IDS[at : at + 1], at, fragment) for fragment in fragments]
        engine.forward(rows).synchronize()
    assert 4 * 5 * slot <= store.usage().bytes <= 4 * (5 + store.growth) * slot
    for fragment in fragments:
        store.settle(fragment)
    assert 4 * 5 * slot <= store.usage().bytes <= 4 * 6 * slot
    for fragment in fragments:
        check_slots(engine, fragment)
        store.free(fragment)


@pytest.mark.parametrize("start", [0, 2, 5])
def test_scores_from_any_start_equal_those_of_its_logits(engine: Engine, start: int) -> None:
    targets = (8, 50, 7)
    span = ScoreSpan(start, targets, 2)
    (none, (score,)) = engine.forward([Row((), [7], 0), Row((), IDS, 0, scores=(span,))]).scores()
    assert none == []
    logits = plain(engine, IDS)[start : start + 3].astype(float)
    logp = logits - np.logaddexp.reduce(logits, axis=1)[:, None]
    np.testing.assert_allclose(score.logprobs, logp[range(3), targets], atol=within(1e-3))
    np.testing.assert_array_equal(score.top_ids, np.argsort(-logp, kind="stable")[:, :2])


def test_logits_are_in_the_order_of_rows_and_indices(engine: Engine) -> None:
    rows = [Row((), IDS[:4], 0, None, (1, 3)), Row((), IDS[:2], 0), Row((), IDS, 0, None, (0, 7))]
    output = engine.forward(rows)
    for number, at in enumerate([1, 3, 0, 7]):
        assert_close(output.logits(number), plain(engine, IDS)[at])
    output.logits(0)[:] = 0  # the caller's own copy
    assert_close(output.logits(0), plain(engine, IDS)[1])


WRONG: dict[str, dict[str, Any]] = {
    "id": {"tokens": [1, 1 << 20]},
    "negative id": {"tokens": [1, -1]},
    "beyond the model's positions": {"tokens": [1] * 5000},
    "place": {"position": 7},
    "wanted token": {"logits_at": (7,)},
    "scored token": {"scores": (ScoreSpan(0, (1, 2)),)},
    "target": {"scores": (ScoreSpan(0, (1 << 20,)),)},
    "adapter": {"adapter": "nobody"},
    "more slots than there are": {},
}


@pytest.mark.parametrize("what", WRONG)
def test_forward_that_raises_changes_nothing(engine: Engine, what: str) -> None:
    store = store_of(engine)
    good, bad = grown(engine, 4), grown(engine, 4)
    row: dict[str, Any] = {"prefix": (), "tokens": [1], "position": 4, "kv_out": bad, **WRONG[what]}
    if what == "more slots than there are":
        row |= {"prefix": (Span(good, 5),), "position": 5, "kv_out": None}
    right: dict[str, Any] = {"prefix": (), "tokens": [9] * 4, "position": 4, "kv_out": good}
    right["adapter"] = row.get("adapter")  # one for all rows of a call
    for order in ([right, row], [row, right]):
        with pytest.raises((WeftError, IndexError)):
            engine.forward([Row(**each) for each in order]).synchronize()
    assert (good.length, bad.length, store.usage().slots) == (4, 4, 8)
    check_slots(engine, good)
    check_slots(engine, bad)
    store.free(good)
    store.free(bad)


def test_invalid_cuts_raise_and_change_nothing(engine: Engine) -> None:
    store, fragment = store_of(engine), grown(engine, 4)
    for at in (-1, 0, 4, 5):
        with pytest.raises(ValueError, match="cannot"):
            store.split(fragment, at)
    for length in (-1, 5):
        with pytest.raises(ValueError, match="cannot"):
            store.trim(fragment, length)
    assert fragment.length == store.usage().slots == 4
    check_slots(engine, fragment)
    store.free(fragment)


def test_closed_engine_raises_and_close_is_idempotent(new_engine: NewEngine) -> None:
    engine = new_engine()
    if engine.fragments is not None:
        engine.forward([Row((), IDS, 0, engine.fragments.new(None))]).synchronize()
    engine.close()
    engine.close()
    if engine.fragments is not None:
        assert engine.fragments.usage() == (0, 0)
    with pytest.raises(ForwardError, match="closed"):
        engine.forward([Row((), IDS, 0)])
