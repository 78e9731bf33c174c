"""A namespace that goes takes its own work with it, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fakes import HiddenFake, LateFake, SequenceFake
from rig import MakeRig, MemoryEngine, assert_result, logits_after, run, sampler
from weft._core.sched.work import Commit, Extend, Logits
from weft.engines.base import Engine
from weft.errors import StaleHandle

ENGINES: dict[str, Callable[[], Engine]] = {
    "plain": MemoryEngine,
    "sequence": lambda: SequenceFake(MemoryEngine(), 8),
    "hidden": lambda: HiddenFake(MemoryEngine()),
    "late": lambda: LateFake(MemoryEngine(), per_step=3),
}


class Owner:
    """Owner of a sequence."""


@pytest.mark.parametrize("kind", ENGINES)
@pytest.mark.parametrize("n_steps", range(6))
def test_dropped_namespace_fails_its_own_work_only(make: MakeRig, kind: str, n_steps: int) -> None:
    """The work may be queued, waiting, live, in flight or committing."""
    rig = make(ENGINES[kind](), n_batch=8)
    owner, places = Owner(), {n: rig.place([1, 2, 3], namespace=n) for n in (None, "law", "med")}
    sequences = {n: rig.scheduler.sequences.create(owner, place) for n, place in places.items()}
    items, work = {}, {}
    for number, (name, place) in enumerate(places.items()):
        items[name] = run(place, number, max_tokens=8)
        long = Extend(rig.place([4] * 11, place), (), (Logits(14),))
        commit = Commit([sequences[name]], [5], [sampler(number)])
        work[name] = rig.submit(items[name], long, commit)
    rig.step(n_steps)
    rig.driver.exclusive(lambda: rig.scheduler.drop_namespace("law", "law was removed"))
    rig.driver.drive([ticket for tickets in work.values() for ticket in tickets])
    for ticket in work["law"]:
        assert ticket.error is None or str(ticket.error) == "law was removed"
    assert isinstance(work["law"][0].error, StaleHandle)
    for name in (None, "med"):
        generated, long, committed = work[name]
        assert_result(rig, items[name], generated.result())
        assert long.result()[0].tolist() == logits_after([1, 2, 3] + [4] * 11).tolist()
        assert rig.scheduler.logits_cache.read(committed.result()[0].row) is not None
    for item in (Extend(places["law"]), items["law"], Commit([sequences["law"]], [5], [None])):
        with pytest.raises(StaleHandle, match="law was removed"):
            rig.submit(item)
    assert all(node.namespace != "law" or not node.resident for node in rig.tree.nodes())


def test_root_of_a_dropped_namespace_is_removed_with_its_last_place(make: MakeRig) -> None:
    rig = make()
    place = rig.place([1, 2], namespace="law")
    rig.drive(Extend(place))
    rig.driver.exclusive(lambda: rig.scheduler.drop_namespace("law", "gone"))
    assert place.ids() == [1, 2]
    del place
    rig.drive(Extend(rig.place([1, 2], namespace="med")))
    rig.driver.exclusive(lambda: rig.scheduler.drop_namespace("med", "gone"))
    assert not rig.tree.roots.keys() & {"law", "med"}


def test_work_in_two_dropped_namespaces_fails_once(make: MakeRig) -> None:
    """They went after it was prepared, and before it entered."""
    rig, owner = make(), Owner()
    places = [rig.place([1, 2], namespace=name) for name in ("law", "med")]
    sequences = [rig.scheduler.sequences.create(owner, place) for place in places]
    tickets, jobs = rig.scheduler.prepare([Commit(sequences, [3, 4], [None, None])])
    for name in ("law", "med"):
        rig.driver.exclusive(
            lambda name=name: rig.scheduler.drop_namespace(name, f"{name} was removed")
        )
    rig.scheduler.enqueue(jobs)
    rig.driver.drive(tickets)
    with pytest.raises(StaleHandle, match="law was removed"):
        tickets[0].result()


@pytest.mark.parametrize("kind", ENGINES)
def test_commit_of_sequences_in_several_namespaces_uses_each_namespace(
    make: MakeRig, kind: str
) -> None:
    rig, owner = make(ENGINES[kind]()), Owner()
    names = [None, None, "law", "med", "med"]
    places = [rig.place([1, number], namespace=name) for number, name in enumerate(names)]
    sequences = [rig.scheduler.sequences.create(owner, place) for place in places]
    (results,) = rig.drive(Commit(sequences, [5] * 5, [sampler(n) for n in range(5)]))
    for number, result in enumerate(results):
        row = rig.scheduler.logits_cache.read(result.row)
        assert row is not None
        assert row.tolist() == logits_after([1, number, 5]).tolist()
