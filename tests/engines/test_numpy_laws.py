"""The laws of the engine protocol: the NumPy engine against a plain forward of its weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from llama_reference import PlainLlama, write_folder
from weft.engines.base import Fragment, FutureTokens, Row, Score, ScoreSpan, Span
from weft.engines.numpy import NumpyEngine, kv
from weft.engines.numpy import step as plan

TOLERANCE = 1e-4
IDS = list(np.random.default_rng(7).integers(0, 61, 120).tolist())


class Rig(SimpleNamespace):
    """An engine, its naive twin, and short names for what tests do."""

    engine: NumpyEngine
    plain: PlainLlama

    def run_row(self, path: tuple[Span, ...], ids: Sequence[int]) -> tuple[Fragment, NDArray[Any]]:
        """Run `ids` as one row into a new fragment; all logits."""
        fragment = self.engine.fragments.new(path[-1].fragment if path else None)
        row = Row(path, ids, sum(span.length for span in path), fragment, tuple(range(len(ids))))
        output = self.engine.forward([row])
        return fragment, np.stack([output.logits(i) for i in range(len(ids))])

    def peek(self, path: tuple[Span, ...], token: int) -> NDArray[Any]:
        """Logits after one more token that leaves no slot."""
        row = Row(path, [token], sum(span.length for span in path), None, (0,))
        return self.engine.forward([row]).logits(0)

    def check(self, path: tuple[Span, ...], ids: Sequence[int], token: int = 3) -> None:
        """The path's slots are those of `ids`: the next logits agree with the twin."""
        np.testing.assert_allclose(
            self.peek(path, token), self.plain([*ids, token])[-1], atol=TOLERANCE, rtol=0
        )


@pytest.fixture(params=["ordinary", "tight"])
def rig(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
    """Tight: every threshold so small that short tests cross them all."""
    if request.param == "tight":
        monkeypatch.setattr(kv, "GROWTH", 3)
        monkeypatch.setattr(kv, "_WIDE", 6)
        monkeypatch.setattr(kv, "_SMALL", 4)
        monkeypatch.setattr(plan, "_MIN_BLOCK", 3)
        monkeypatch.setattr(plan, "_MAX_SCORES", 1)
    plain = write_folder(tmp_path)
    return Rig(engine=NumpyEngine.load(tmp_path), plain=plain)


def full(*parts: Fragment) -> tuple[Span, ...]:
    return tuple(Span(part, part.length) for part in parts)


def assert_close(one: NDArray[Any], other: NDArray[Any]) -> None:
    np.testing.assert_allclose(one, other, atol=TOLERANCE, rtol=0)


def test_one_long_row_equals_the_plain_forward(rig: Rig) -> None:
    _, logits = rig.run_row((), IDS)
    assert_close(logits, rig.plain(IDS))


@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_chunked_prefill_equals_full_prefill(rig: Rig, size: int) -> None:
    fragment = rig.engine.fragments.new(None)
    for lo in range(0, len(IDS), size):
        ids = IDS[lo : lo + size]
        output = rig.engine.forward([Row((), ids, lo, fragment, (len(ids) - 1,))])
        assert_close(output.logits(0), rig.plain(IDS)[lo + len(ids) - 1])
    assert fragment.length == len(IDS)
    rig.check(full(fragment), IDS)


def test_many_and_single_tokens_may_alternate_in_one_fragment(rig: Rig) -> None:
    fragment, lo = rig.engine.fragments.new(None), 0
    for size in (5, 1, 1, 1, 8, 1, 30, 1, 1, 1, 1, 1, 2, 1):
        rig.engine.forward([Row((), IDS[lo : lo + size], lo, fragment)])
        lo += size
        rig.check(full(fragment), IDS[:lo])


def test_extending_a_child_leaves_its_sibling_unchanged(rig: Rig) -> None:
    root, _ = rig.run_row((), IDS[:20])
    one, _ = rig.run_row(full(root), IDS[20:25])
    before = rig.peek(full(root, one), 3)
    two = rig.engine.fragments.new(root)
    for at in range(12):
        rig.engine.forward([Row(full(root), [IDS[50 + at]], 20 + at, two)])
    np.testing.assert_array_equal(rig.peek(full(root, one), 3), before)
    rig.check(full(root, two), IDS[:20] + IDS[50:62])


def test_growing_fragment_may_be_read_by_others(rig: Rig) -> None:
    root, _ = rig.run_row((), IDS[:9])
    tail = rig.engine.fragments.new(root)
    for at in range(10):
        row = Row(full(root), [IDS[9 + at]], 9 + at, tail, (0,))
        reader = Row((*full(root), *full(tail)), [5], 9 + at, None, (0,))
        output = rig.engine.forward([row, reader])
        assert_close(output.logits(1), rig.plain([*IDS[: 9 + at], 5])[-1])


def test_companions_and_their_order_do_not_matter(rig: Rig) -> None:
    root, _ = rig.run_row((), IDS[:16])
    child, _ = rig.run_row(full(root), IDS[16:22])
    cases = [
        ((), IDS[:5]),
        (full(root), [IDS[40]]),
        (full(root), IDS[60:69]),
        (full(root, child), [IDS[41]]),
        ((Span(root, 7),), [IDS[42]]),
        (full(root, child), IDS[70:74]),
        ((Span(root, 7),), IDS[80:83]),
    ]
    rng = np.random.default_rng(3)
    for keep in (True, False):
        for _ in range(3):
            order = rng.permutation(len(cases))
            rows = []
            for path, ids in (cases[i] for i in order):
                dest = rig.engine.fragments.new(None) if keep else None
                position = sum(span.length for span in path)
                rows.append(Row(path, ids, position, dest, (len(ids) - 1,)))
            output = rig.engine.forward(rows)
            for index, i in enumerate(order):
                path, ids = cases[i]
                before = [*IDS[:22]][: sum(span.length for span in path)]
                assert_close(output.logits(index), rig.plain([*before, *ids])[-1])
            for row in rows:
                if row.kv_out is not None:
                    rig.engine.fragments.free(row.kv_out)


def test_equal_suffixes_under_different_prefixes_differ(rig: Rig) -> None:
    one, _ = rig.run_row((), IDS[:6])
    two, _ = rig.run_row((), IDS[6:12])
    assert np.abs(rig.peek(full(one), 3) - rig.peek(full(two), 3)).max() > 0.01


def test_rows_that_decode_together_agree_with_the_twin_at_every_step(rig: Rig) -> None:
    """Rows join late and leave early, in the middle of the bank; row objects are reused."""
    root, _ = rig.run_row((), IDS[:10])
    path = full(root)
    rows: list[Row] = []
    texts: list[list[int]] = []
    rng = np.random.default_rng(1)
    for step in range(40):
        if step % 4 == 0 and len(rows) < 6:
            dest = rig.engine.fragments.new(root)
            rows.append(Row(path, [0], 10, dest, (0,)))
            texts.append(IDS[:10])
        for index, row in enumerate(rows):
            token = int(rng.integers(0, 61))
            texts[index] = [*texts[index], token]
            row.tokens, row.position = [token], len(texts[index]) - 1
        output = rig.engine.forward(rows)
        for index, text in enumerate(texts):
            assert_close(output.logits(index), rig.plain(text)[-1])
        if step % 9 == 8:
            gone = step % len(rows)
            row, text = rows.pop(gone), texts.pop(gone)
            rig.engine.fragments.settle(row.kv_out)
            rig.check((*path, *full(row.kv_out)), text)


@pytest.mark.parametrize("max_copied", [9, 4096])
def test_path_of_many_short_nodes_decodes_as_its_tokens(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, max_copied: int
) -> None:
    """Nodes one below the other, with rows below them all and below some; one is longer."""
    monkeypatch.setattr(plan, "MAX_SHORT", 4)
    monkeypatch.setattr(plan, "MAX_COPIED", max_copied)
    paths: list[tuple[Span, ...]] = [()]
    for size in (2, 1, 3, 7, 1, 4, 2):
        at = sum(span.length for span in paths[-1])
        fragment, _ = rig.run_row(paths[-1], IDS[at : at + size])
        paths.append((*paths[-1], *full(fragment)))
    below = [paths[i] for i in (3, 7, 7, 7, 0)]
    tails = [rig.engine.fragments.new(None) for _ in below]
    for step in range(3):
        starts = [sum(span.length for span in path) for path in below]
        rows = [
            Row(path, [IDS[30 + number + step]], start + step, tail, (0,))
            for number, (path, start, tail) in enumerate(zip(below, starts, tails, strict=True))
        ]
        output = rig.engine.forward(rows)
        for number, start in enumerate(starts):
            known = [*IDS[:start], *IDS[30 + number : 31 + number + step]]
            assert_close(output.logits(number), rig.plain(known)[-1])


@pytest.mark.parametrize("max_slots", [0, 5, 12, 4096])
def test_short_views_are_copied_up_to_the_limit(max_slots: int) -> None:
    views = [
        np.zeros((1, 2, 1, n, 4), np.float32) for n in (4, 5, plan.MAX_SHORT + 1, 3, plan.MAX_SHORT)
    ]
    short, others = plan._split_short(views, max_slots)
    assert sum(view.shape[3] for view in short) <= max_slots
    assert len(short) == {0: 0, 5: 0, 12: 3, 4096: 4}[max_slots]
    assert {id(view) for view in [*short, *others]} == {id(view) for view in views}
    assert len(short) + len(others) == len(views)


def test_short_nodes_one_below_the_other_are_one_product(rig: Rig) -> None:
    path: tuple[Span, ...] = ()
    for at in range(0, 20, 4):
        fragment, _ = rig.run_row(path, IDS[at : at + 4])
        path = (*path, *full(fragment))
    rows = [Row(path, [3], 20, rig.engine.fragments.new(None), (0,)) for _ in range(2)]
    step_plan = plan.StepPlan(rows, rig.engine._config, rig.engine.fragments)
    for block in step_plan._blocks:
        (part,) = block.shared
        assert [keys.shape[1] for keys in part._keys[0]] == [20]


@pytest.mark.parametrize("at", [1, 5, 11])
def test_split_anywhere_changes_nothing(rig: Rig, at: int) -> None:
    store = rig.engine.fragments
    lower, _ = rig.run_row((), IDS[:12])
    tail = store.new(lower)
    for i in range(12):
        rig.engine.forward([Row(full(lower), [IDS[12 + i]], 12 + i, tail)])
    upper = store.split(lower, at)
    assert (upper.length, lower.length) == (at, 12 - at)
    rig.check(full(upper, lower, tail), IDS[:24])
    middle = store.split(tail, at)
    rig.check(full(upper, lower, middle, tail), IDS[:24])
    rig.check(full(upper), IDS[:at])


def test_join_undoes_split_and_joins_strangers(rig: Rig) -> None:
    store = rig.engine.fragments
    fragment, _ = rig.run_row((), IDS[:12])
    child, _ = rig.run_row(full(fragment), IDS[12:17])
    upper = store.split(fragment, 4)
    kept_alive = store.usage()
    store.join(upper, fragment)
    assert store.usage() == kept_alive
    assert fragment.length == 12
    rig.check(full(fragment, child), IDS[:17])
    store.join(fragment, child)
    assert child.length == 17
    rig.check(full(child), IDS[:17])


def test_trim_forgets_the_end_only(rig: Rig) -> None:
    store = rig.engine.fragments
    fragment, _ = rig.run_row((), IDS[:12])
    for i in range(5):
        rig.engine.forward([Row((), [IDS[12 + i]], 12 + i, fragment)])
    for length in (15, 12, 7, 1):
        store.trim(fragment, length)
        rig.check(full(fragment), IDS[:length])
    rig.engine.forward([Row((), [IDS[1]], 1, fragment)])
    rig.check(full(fragment), IDS[:2])


def test_export_free_load_changes_nothing(rig: Rig) -> None:
    store = rig.engine.fragments
    root, _ = rig.run_row((), IDS[:8])
    child = store.new(root)
    for i in range(6):
        rig.engine.forward([Row(full(root), [IDS[8 + i]], 8 + i, child)])
    before = rig.peek(full(root, child), 3)
    data = store.export(child)
    store.free(child)
    repeated = store.load(data, root)
    assert repeated.length == 6
    np.testing.assert_allclose(rig.peek(full(root, repeated), 3), before, atol=1e-6)


def test_row_without_dest_leaves_nothing(rig: Rig) -> None:
    root, _ = rig.run_row((), IDS[:8])
    kept_alive = rig.engine.fragments.usage()
    output = rig.engine.forward([Row(full(root), IDS[8:15], 8, None, (2, 6))])
    assert_close(output.logits(0), rig.plain(IDS[:11])[-1])
    assert_close(output.logits(1), rig.plain(IDS[:15])[-1])
    assert rig.engine.fragments.usage() == kept_alive


def test_logits_rows_are_numbered_by_row_then_place(rig: Rig) -> None:
    store = rig.engine.fragments
    wants = [(1, 3), (), (0,), (0, 2)]
    texts = [IDS[:4], IDS[4:9], IDS[9:10], IDS[10:13]]
    rows = [Row((), ids, 0, store.new(None), at) for ids, at in zip(texts, wants, strict=True)]
    output = rig.engine.forward(rows)
    expected = [rig.plain(ids)[i] for ids, at in zip(texts, wants, strict=True) for i in at]
    for number, logits in enumerate(expected):
        assert_close(output.logits(number), logits)


def test_late_tokens_are_read_from_their_draws(rig: Rig) -> None:
    draws: Any = SimpleNamespace(result=lambda: SimpleNamespace(ids=np.array([9, 4])))
    row = Row((), FutureTokens(draws, 1), 0, rig.engine.fragments.new(None), (0,))
    assert_close(rig.engine.forward([row]).logits(0), rig.plain([4])[-1])


@pytest.mark.parametrize("top", [0, 4])
def test_scores_equal_log_softmax_of_the_twin(rig: Rig, top: int) -> None:
    """Longer than one chunk of logits rows, with a companion and a second span."""
    targets = tuple(IDS[1:101])
    spans = (ScoreSpan(0, targets, top), ScoreSpan(40, (5, 6), top))
    rows = [
        Row((), [7], 0, rig.engine.fragments.new(None), (0,)),
        Row((), IDS[:100], 0, rig.engine.fragments.new(None), (), spans),
    ]
    first, answers = rig.engine.forward(rows).scores()
    assert first == []
    logits = rig.plain(IDS[:100])
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    _check_score(answers[0], logprobs, targets, top)
    _check_score(answers[1], logprobs[40:42], (5, 6), top)


def _check_score(score: Score, logprobs: NDArray[Any], targets: tuple[int, ...], top: int) -> None:
    given = logprobs[np.arange(len(targets)), list(targets)]
    assert_close(score.logprobs, given)
    assert_close(score.entropies, -(np.exp(logprobs) * logprobs).sum(axis=1))
    np.testing.assert_array_equal(score.ranks, (logprobs > given[:, None]).sum(axis=1))
    assert score.top_ids.shape == score.top_logprobs.shape == (len(targets), top)
    assert_close(score.top_logprobs, -np.sort(-logprobs, axis=1)[:, :top])


def test_forward_of_no_rows_returns_empty_scores(rig: Rig) -> None:
    assert rig.engine.forward([]).scores() == []
