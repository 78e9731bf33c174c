"""An engine that wants its own thread is called from one thread only, whatever the caller does."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import pytest

from contract.conftest import Make
from contract.helpers import logits_at, prompt_ids, run_all, run_item
from fakes import TaggedFragments, Wrapped
from weft.engines.base import Engine, Fragment, Output, Row
from weft.errors import StaleHandle
from weft.lm.lm import LM


class OwnedFragments(TaggedFragments):
    """Notes which threads call it."""

    def __init__(self, engine: OwnedEngine) -> None:
        assert engine.inner.fragments is not None
        super().__init__(engine.inner.fragments, 1 << 30)
        self.engine = engine

    def new(self, parent: Fragment | None) -> Fragment:
        self.engine.note()
        return super().new(parent)

    def free(self, fragment: Fragment) -> None:
        self.engine.note()
        super().free(fragment)

    def export(self, fragment: Fragment) -> dict[str, Any]:
        self.engine.note()
        return super().export(fragment)

    def load(self, data: dict[str, Any], parent: Fragment | None) -> Fragment:
        self.engine.note()
        return super().load(data, parent)


class OwnedEngine(Wrapped):
    """Notes which threads call it."""

    def __init__(self, inner: Engine) -> None:
        super().__init__(inner, same_thread_only=True)
        self.threads: set[int] = set()
        self.fragments = OwnedFragments(self)

    def note(self) -> None:
        self.threads.add(threading.get_ident())

    def forward(self, rows: Sequence[Row]) -> Output:
        self.note()
        return super().forward(rows)

    def close(self) -> None:
        self.note()


def test_one_thread_calls_the_engine_from_first_to_last(make: Make) -> None:
    lm = make("numpy", OwnedEngine)
    engine = lm.engine
    assert isinstance(engine, OwnedEngine)
    ids = prompt_ids(lm)
    place = lm.place(ids)
    want = run_all(lm, [run_item(lm, place, 1, i) for i in range(3)])
    arrays = lm.kv.export(place)
    lm.clear_cache()
    lm.kv.insert(ids, arrays)
    repeated = run_all(lm, [run_item(lm, place, 1, i) for i in range(3)])
    assert [r.tokens for r in repeated] == [r.tokens for r in want]
    caught: list[object] = []
    other = threading.Thread(target=lambda: caught.append(logits_at(lm, ids)))
    other.start()
    other.join()
    assert caught
    lm.close()
    assert len(engine.threads) == 1
    assert threading.get_ident() not in engine.threads
    lm.clear_cache()  # there is none
    with pytest.raises(StaleHandle):
        lm.driver.exclusive(lm.scheduler.close_idle_sequences)


def test_error_of_an_errand_reaches_who_sent_it(make: Make) -> None:
    lm = make("numpy", OwnedEngine)
    ids = prompt_ids(lm)
    arrays = lm.kv.export(lm.place(ids))
    with pytest.raises(ValueError, match="slots, but the path has"):
        lm.kv.insert([*ids, 9], arrays)
    assert isinstance(lm, LM)
    assert logits_at(lm, ids).shape == (lm.info.n_vocab,)
