"""Pins by hand: a pinned path outlasts all pressure, and what is unpinned, or left, goes."""

from __future__ import annotations

import asyncio

import pytest

import weft
from contract.conftest import Make
from contract.helpers import assert_close, logits_at, prompt_ids, run_all, run_item
from fakes import HiddenFake
from weft._core.kv.place import Place
from weft.errors import ConfigError, KVFull, StaleHandle, Unsupported
from weft.lm.lm import LM
from weft.lm.path_kv import Pin
from weft.loom import Loom

SLOTS = 64


def press(lm: LM, n_tokens: int = SLOTS // 2) -> None:
    """Let other paths want more room than there is."""
    for i in range(4):
        logits_at(lm, [300 + i, *range(20, 19 + n_tokens)])


def left(lm: LM) -> int:
    """How many slots work and pins need, once all that is idle is closed."""
    lm.driver.exclusive(lm.scheduler.close_idle_sequences)
    lm.tree.check()
    return lm.tree.budget.unevictable


def test_pinned_path_survives_pressure_and_unpinned_is_evicted(kv_kind: str, make: Make) -> None:
    lm = make(kv_kind, kv_slots=SLOTS)
    ids = prompt_ids(lm)[:20]
    before = logits_at(lm, ids)
    pin = lm.kv.pin(ids)
    assert pin.is_pinned
    assert pin.place.ids() == ids
    press(lm)
    assert lm.kv.size(ids) == len(ids)
    ran = lm.stats().prefilled
    lm.scheduler.logits_cache.clear()
    assert_close(logits_at(lm, ids), before)
    assert lm.stats().prefilled == ran, "nothing of it is computed again, but one token is read"
    pin.unpin()
    pin.unpin()
    assert not pin.is_pinned
    assert lm.kv.size(ids) == len(ids), "unpinning alone frees nothing"
    press(lm, SLOTS)
    assert lm.kv.size(ids) == 0
    assert left(lm) == 0


def test_pinning_computes_what_is_missing_and_nothing_more_is_pinned(
    kv_kind: str, make: Make
) -> None:
    lm = make(kv_kind, kv_slots=SLOTS)
    ids = prompt_ids(lm)
    with lm.kv.pin(ids[:12]) as pin:
        assert lm.kv.size(ids) == lm.stats().prefilled == 12
        run_all(lm, [run_item(lm, lm.place(ids[:12]), 3, 0, max_tokens=9, stop_ids=frozenset())])
        logits_at(lm, ids[:7])
        logits_at(lm, [*ids[:12], 40, 41])
        assert left(lm) == 12, "what goes on from a pinned path is not pinned"
        press(lm)
        assert lm.kv.size(ids) == 12
        assert pin.is_pinned
    assert left(lm) == 0


def test_path_pinned_twice_is_evicted_after_the_second_unpin(make: Make) -> None:
    lm = make("numpy", kv_slots=SLOTS)
    ids = prompt_ids(lm)[:16]
    first, second, shorter = lm.kv.pin(ids), lm.kv.pin(ids), lm.kv.pin(ids[:5])
    first.unpin()
    first.unpin()
    press(lm)
    assert lm.kv.size(ids) == 16
    assert left(lm) == 16
    second.unpin()
    press(lm, SLOTS - 6)
    assert lm.kv.size(ids) == 5
    shorter.unpin()
    assert left(lm) == 0


def test_collected_pin_is_released(make: Make) -> None:
    lm = make("numpy", kv_slots=SLOTS)
    ids = prompt_ids(lm)[:16]
    pin = lm.kv.pin(ids)
    place = pin.place
    del pin
    assert left(lm) == 0
    assert place.ids() == ids


@pytest.mark.parametrize("change", ["remove", "text", "split", "merge", "clip", "move", "close"])
def test_pin_of_a_node_that_changes_keeps_its_tokens_and_leaks_nothing(
    change: str, make: Make
) -> None:
    lm = make("numpy", kv_slots=200)
    loom = Loom(lm, prompt_ids(lm)[:10])
    node, other = loom.add([400, 401, 402]), loom.add([410])
    node.add([403, 404])
    pin = lm.kv.pin(node)
    n = left(lm)
    assert n == 13
    if change == "remove":
        node.remove()
    elif change == "text":
        node.text = " something else"
    elif change == "split":
        node.split(1)
    elif change == "merge":
        node.merge()
    elif change == "clip":
        node.clip(1)
    elif change == "move":
        other.add_child(node)
    else:
        loom.close()
    del node, other, loom
    assert left(lm) == n
    assert lm.kv.size(pin.place) == n
    pin.unpin()
    assert left(lm) == 0


def test_budget_full_of_pins_raises_until_they_are_released(kv_kind: str, make: Make) -> None:
    lm = make(kv_kind, kv_slots=SLOTS)
    pins = [lm.kv.pin([30 + i, *range(40, 59)]) for i in range(3)]
    with pytest.raises(KVFull, match="60 slots that are pinned by hand") as raised:
        logits_at(lm, [99, *range(20, 40)])
    assert raised.value.hint.startswith("unpin paths")
    with pytest.raises(KVFull, match="pinned by hand"):
        lm.kv.pin([99, *range(20, 40)])
    assert lm.kv.try_pin([99, *range(20, 40)]) is None
    lm.kv.pin([30, *range(40, 59)]).unpin()  # it is there: it needs no more room
    with pytest.raises(KVFull):
        asyncio.run(_pinned(lm, [99, *range(20, 40)]))
    assert left(lm) == 60
    pins.pop().unpin()
    assert logits_at(lm, [99, *range(20, 40)]).size
    assert left(lm) == 40
    for pin in pins:
        pin.unpin()


async def _pinned(lm: LM, ids: list[int]) -> Pin:
    return await lm.kv.apin(ids)


def test_pinning_from_a_loop_is_the_same(make: Make) -> None:
    lm = make("numpy", kv_slots=SLOTS)
    pin = asyncio.run(_pinned(lm, prompt_ids(lm)[:16]))
    press(lm)
    assert lm.kv.size(pin.place) == 16
    pin.unpin()


def test_paths_that_are_pinned_count_among_those_an_engine_can_have(make: Make) -> None:
    lm = make("sequence", n_seq_max=2)
    pins = [lm.kv.pin([30 + i, 40, 41]) for i in range(2)]
    with pytest.raises(KVFull, match="2 resident paths next to 6 slots"):
        logits_at(lm, [99, 20, 21])
    assert lm.kv.try_pin([99, 20]) is None
    pins.pop().unpin()
    logits_at(lm, [99, 20, 21])
    pins.pop().unpin()


def test_try_pin_reserves_slots_and_pins_them_once_computed(make: Make) -> None:
    lm = make("numpy", kv_slots=SLOTS)
    ids = prompt_ids(lm)[:20]
    pin = lm.kv.try_pin(ids)
    assert pin is not None
    assert pin.is_pinned
    assert lm.kv.size(ids) == lm.stats().prefilled == 0
    assert left(lm) == 20
    with pytest.raises(KVFull):
        logits_at(lm, [99, *range(20, 70)])
    want = logits_at(lm, ids)
    press(lm)
    assert lm.kv.size(ids) == 20
    lm.clear_cache()
    assert (lm.kv.size(ids), left(lm), pin.is_pinned) == (0, 20, True)
    assert_close(logits_at(lm, ids), want)
    press(lm)
    assert lm.kv.size(ids) == 20
    pin.unpin()


@pytest.mark.parametrize("is_promised", [False, True])
def test_session_that_nothing_runs_in_gives_its_room_to_a_pin(
    make: Make, is_promised: bool
) -> None:
    lm = make("numpy", kv_slots=30)
    with weft.Branch.create(lm) as branch:
        branch.prefill([40])
        for token in range(41, 60):
            branch.commit(token)
        assert lm.tree.budget.tails
        path = list(range(70, 95))
        pin = lm.kv.try_pin(path) if is_promised else lm.kv.pin(path)
        assert pin is not None
        assert lm.kv.size(path) == (0 if is_promised else 25)
        pin.unpin()


def test_pin_below_the_tip_does_not_cover_later_tokens(kv_kind: str, make: Make) -> None:
    lm = make(kv_kind)
    ids = prompt_ids(lm)[:14]
    logits_at(lm, ids[:10])
    with lm.kv.pin(ids):
        assert left(lm) == 14
        logits_at(lm, [*ids, 40, 41, 42])
        assert left(lm) == 14
    assert left(lm) == 0


def test_removing_an_adapter_releases_its_pins(make: Make) -> None:
    lm = make("numpy", kv_slots=SLOTS)
    end = lm.tree.extend(lm.tree.root("gone#1"), [1, 2, 3])
    theirs = lm.kv.try_pin(Place.from_cursor(lm.tree.holds, end))
    pin = lm.kv.pin([1, 2, 3, 4])
    assert theirs is not None
    assert left(lm) == 7
    lm.driver.exclusive(
        lambda: lm.scheduler.drop_namespace("gone#1", "the LoRA adapter 'gone' was removed")
    )
    assert (theirs.is_pinned, pin.is_pinned, left(lm)) == (False, True, 4)
    with pytest.raises(StaleHandle, match="'gone' was removed"):
        lm.kv.try_pin(theirs.place)
    theirs.unpin()
    assert left(lm) == 4
    pin.unpin()
    assert left(lm) == 0


def test_trimming_and_loading_leave_a_pinned_path(make: Make) -> None:
    lm = make("numpy", kv_slots=SLOTS, offload_slots=SLOTS)
    ids = prompt_ids(lm)[:20]
    saved = lm.kv.to_bytes(ids)
    with lm.kv.pin(ids[:12]):
        logits_at(lm, ids)
        lm.kv.trim(ids, 0)
        assert lm.kv.size(ids) == 12
        assert lm.kv.offload(ids) == 0
        lm.kv.load(saved)
        assert lm.kv.size(ids) == 20
        assert left(lm) == 12
        lm.kv.trim(ids, 0)
        assert lm.kv.size(ids) == 12
    assert left(lm) == 0


def test_pin_ends_with_its_lm_and_nothing_can_be_pinned_then(make: Make) -> None:
    lm = make("numpy")
    pin = lm.kv.pin([1, 2, 3])
    assert repr(pin) == "<Pin of 3 tokens, pinned>"
    lm.driver.exclusive(
        lambda: lm.scheduler.drop_namespace("gone#1", "the LoRA adapter 'gone' was removed")
    )
    assert pin.is_pinned, "a pin of another adapter stays"
    pin.unpin()
    pin = lm.kv.pin([1, 2, 3])
    lm.driver.close()
    assert not pin.is_pinned
    pin.unpin()
    with pytest.raises(StaleHandle):
        lm.kv.pin([1, 2, 3])
    with pytest.raises(StaleHandle):
        lm.kv.try_pin(pin.place)


def test_pin_of_an_invalid_path_raises(make: Make) -> None:
    lm = make("numpy")
    for wrong in ([], lm.place([])):
        with pytest.raises(ConfigError, match="path is empty"):
            lm.kv.pin(wrong)
    with pytest.raises(ConfigError, match="is no path"):
        lm.kv.pin("text")  # type: ignore[arg-type]
    with pytest.raises(Unsupported, match="keeps its KV to itself"):
        LM(HiddenFake(lm.engine), lm.text).kv.pin([1, 2])


def test_offloading_by_hand_moves_a_path_and_brings_it_back(kv_kind: str, make: Make) -> None:
    lm = make(kv_kind, kv_slots=SLOTS, offload_slots=30)
    ids = prompt_ids(lm)[:20]
    want = logits_at(lm, ids)
    assert lm.kv.offload(ids, start=8) == 12
    assert lm.kv.sizes(ids) == (8, 12)
    assert lm.stats().offloaded_bytes == 12 * lm.info.kv_bytes_per_token
    assert lm.kv.offload(ids) == 20
    assert lm.kv.sizes(ids) == (0, 20)
    ran = lm.stats().prefilled
    lm.scheduler.logits_cache.clear()
    assert_close(logits_at(lm, [*ids]), want)
    assert lm.stats().prefilled == ran
    assert lm.kv.sizes(ids) == (20, 0)
    with lm.kv.pin(ids):
        assert lm.kv.offload(ids) == 0, "what is pinned stays"
    logits_at(lm, [*ids, *range(50, 70)])
    with pytest.raises(KVFull, match="40 tokens does not fit on the host, which has room for 30"):
        lm.kv.offload([*ids, *range(50, 70)])
    with pytest.raises(ConfigError, match="start is"):
        lm.kv.offload(ids, start=21)
    assert left(lm) == 0


def test_offload_without_host_memory_raises_and_is_named(make: Make) -> None:
    lm = make("numpy")
    with pytest.raises(Unsupported, match="loaded without offload") as raised:
        lm.kv.offload([1, 2, 3])
    assert "offload=BYTES" in raised.value.hint
