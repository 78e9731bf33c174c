"""KV memory of the NumPy engine: allocation and release."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llama_reference import write_folder
from weft.engines.base import Fragment, Row, Span
from weft.engines.numpy import NumpyEngine
from weft.engines.numpy.kv import TailBuffer
from weft.errors import ModelMismatch


@pytest.fixture
def engine(tmp_path: Path) -> NumpyEngine:
    write_folder(tmp_path)
    return NumpyEngine.load(tmp_path)


def prefill(engine: NumpyEngine, n_tokens: int) -> Fragment:
    fragment = engine.fragments.new(None)
    engine.forward([Row((), [1] * n_tokens, 0, fragment)])
    return fragment


def grow(engine: NumpyEngine, root: Fragment, tails: list[Fragment], n_steps: int) -> None:
    for _ in range(n_steps):
        path = (Span(root, root.length),)
        engine.forward([Row(path, [2], root.length + tail.length, tail) for tail in tails])


def slots(engine: NumpyEngine) -> float:
    """Allocated bytes in slots."""
    return engine.fragments.usage().bytes / engine.info.kv_bytes_per_token


def test_prefill_allocates_exactly_its_slots(engine: NumpyEngine) -> None:
    prefill(engine, 100)
    assert engine.fragments.usage().slots == 100
    assert slots(engine) == 100


def test_growing_leaves_live_in_one_bank_that_grows_by_32(engine: NumpyEngine) -> None:
    root = prefill(engine, 10)
    tails: list[Fragment] = [engine.fragments.new(root) for _ in range(5)]
    grow(engine, root, tails, 32)
    assert slots(engine) == 10 + 5 * 32
    grow(engine, root, tails, 1)
    assert slots(engine) == 10 + 5 * 64


def test_settling_gives_spare_room_back(engine: NumpyEngine) -> None:
    root = prefill(engine, 10)
    tails: list[Fragment] = [engine.fragments.new(root) for _ in range(5)]
    grow(engine, root, tails, 3)
    for tail in tails:
        engine.fragments.settle(tail)
    assert slots(engine) == engine.fragments.usage().slots == 25


def test_bank_shrinks_as_rows_leave(engine: NumpyEngine) -> None:
    root = prefill(engine, 10)
    tails: list[Fragment] = [engine.fragments.new(root) for _ in range(16)]
    grow(engine, root, tails, 3)
    for tail in tails[1:]:
        engine.fragments.free(tail)
    assert slots(engine) == 10 + 32
    engine.fragments.free(tails[0])
    assert slots(engine) == 10


def test_split_copies_nothing(engine: NumpyEngine) -> None:
    root = prefill(engine, 100)
    before = engine.fragments.usage()
    upper = engine.fragments.split(root, 30)
    assert engine.fragments.usage() == before
    assert (upper.length, root.length) == (30, 70)


@pytest.mark.parametrize("drop_upper", [True, False])
def test_survivors_move_out_of_a_block_that_is_mostly_dead(
    engine: NumpyEngine, drop_upper: bool
) -> None:
    root = prefill(engine, 100)
    upper = engine.fragments.split(root, 50)
    middle = engine.fragments.split(root, 25)
    engine.fragments.free(upper if drop_upper else root)
    usage = engine.fragments.usage()
    assert usage.bytes <= 1.10 * usage.slots * engine.info.kv_bytes_per_token
    assert middle.length == 25


def test_body_that_grows_chunk_by_chunk_settles_to_its_size(engine: NumpyEngine) -> None:
    fragment = prefill(engine, 20)
    for lo in range(20, 200, 9):
        engine.forward([Row((), [1] * 9, lo, fragment)])
    assert slots(engine) <= 1.3 * fragment.length
    engine.fragments.settle(fragment)
    assert slots(engine) <= 1.10 * fragment.length


def test_few_long_tails_do_not_widen_all_rows(engine: NumpyEngine) -> None:
    root = prefill(engine, 4)
    short: list[Fragment] = [engine.fragments.new(root) for _ in range(15)]
    long: Fragment = engine.fragments.new(root)
    grow(engine, root, [*short, long], 2)
    grow(engine, root, [long], 400)
    assert slots(engine) <= 4 + 16 * 256 + 1.3 * long.length


def test_joining_halves_of_one_block_copies_nothing(engine: NumpyEngine) -> None:
    root = prefill(engine, 40)
    before = engine.fragments.usage()
    upper = engine.fragments.split(root, 13)
    engine.fragments.join(upper, root)
    assert engine.fragments.usage() == before
    assert (upper.length, root.length) == (0, 40)


def test_freed_fragments_leave_nothing(engine: NumpyEngine) -> None:
    root = prefill(engine, 40)
    upper = engine.fragments.split(root, 13)
    tails: list[Fragment] = [engine.fragments.new(root) for _ in range(3)]
    grow(engine, root, tails, 2)
    for fragment in (tails[1], root, tails[0], upper, tails[2]):
        engine.fragments.free(fragment)
    assert engine.fragments.usage() == (0, 0)


def test_empty_fragment_can_be_settled_exported_and_freed(engine: NumpyEngine) -> None:
    fragment = engine.fragments.new(None)
    engine.fragments.settle(fragment)
    assert engine.fragments.export(fragment)["k.0"].shape[1] == 0
    engine.fragments.free(fragment)
    assert engine.fragments.usage() == (0, 0)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda kv: {},
        lambda kv: kv | {"k.1": kv["k.1"].astype(np.float16)},
        lambda kv: kv | {"v.0": kv["v.0"][:1]},
        lambda kv: kv | {"k.0": kv["k.0"][..., :4]},
        lambda kv: kv | {"v.1": kv["v.1"][:, :2]},
    ],
)
def test_kv_of_another_model_raises(
    engine: NumpyEngine, spoil: Callable[[dict[str, Any]], dict[str, Any]]
) -> None:
    kv = engine.fragments.export(prefill(engine, 3))
    before = engine.fragments.usage()
    with pytest.raises(ModelMismatch, match="recompute"):
        engine.fragments.load(spoil(kv), None)
    assert engine.fragments.usage() == before


def test_export_keeps_the_memory_of_its_slots_and_no_more(engine: NumpyEngine) -> None:
    def owner(array: Any) -> Any:
        return array if array.base is None else owner(array.base)

    data = engine.fragments.export(prefill(engine, 7))
    owners = [owner(array) for name, array in data.items() if name != "dtype"]
    kept_alive = {id(array): array.nbytes for array in owners}
    assert sum(kept_alive.values()) == 7 * engine.info.kv_bytes_per_token


def test_operations_outside_the_fragment_raise(engine: NumpyEngine) -> None:
    fragment = prefill(engine, 3)
    for at in (0, 3, -1):
        with pytest.raises(ValueError, match="cannot cut"):
            engine.fragments.split(fragment, at)
    with pytest.raises(ValueError, match="cannot trim"):
        engine.fragments.trim(fragment, 4)
    with pytest.raises(TypeError, match="NumPy engine"):
        engine.fragments.free(Fragment(3))


class _Tail:
    def __init__(self, tail: int) -> None:
        self.row, self.tail = -1, tail


@pytest.mark.parametrize("seed", range(20))
def test_bring_together_keeps_every_tail_s_slots(seed: int) -> None:
    rng = np.random.default_rng(seed)
    bank = TailBuffer(1, 1, 2)
    tails = [_Tail(int(n)) for n in rng.integers(1, 6, 8)]
    bank.add(tails)
    for value, tail in enumerate(tails):
        bank.row(tail.row)[...] = value
    front = [tails[i] for i in rng.permutation(8)[: int(rng.integers(1, 9))]]
    bank.make_adjacent(front)
    first = min(tail.row for tail in front)
    assert {tail.row for tail in front} == set(range(first, first + len(front)))
    assert not bank.make_adjacent(front)
    for value, tail in enumerate(tails):
        assert bank.rows[tail.row] is tail
        assert (bank.row(tail.row)[:, :, :, : tail.tail] == value).all()
