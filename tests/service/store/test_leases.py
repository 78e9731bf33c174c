"""LoomLeases: one owner at a time, until the lease expires by the database's clock."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from weft.errors import ConfigError
from weft.service.store.leases import LoomLeases
from weft.service.store.library import Library


@pytest.fixture
def leases(library: Library) -> LoomLeases:
    return LoomLeases(library.database)


def test_acquire_returns_none_until_release(leases: LoomLeases) -> None:
    assert leases.holder("loom") is None
    mine = leases.acquire("loom", "a", 60)
    assert mine is not None
    assert (mine.owner, mine.term) == ("a", 1)
    assert 50 < mine.left_s <= 60
    assert leases.acquire("loom", "b", 60) is None
    assert leases.renew("loom", "b", 60) is None
    assert not leases.release("loom", "b")
    extended = leases.acquire("loom", "a", 120)
    assert extended is not None
    assert extended.term == 1
    assert extended.left_s > 100
    assert [each.loom for each in leases.owned_by("a")] == ["loom"]
    assert leases.release("loom", "a")
    assert not leases.release("loom", "a")
    assert leases.holder("loom") is None
    other = leases.acquire("loom", "b", 60)
    assert other is not None
    assert other.term == 2


def test_expired_lease_can_be_acquired_but_not_renewed(leases: LoomLeases) -> None:
    assert leases.acquire("loom", "a", 0.05)
    while leases.holder("loom") is not None:
        time.sleep(0.01)
    assert leases.renew("loom", "a", 60) is None
    taken = leases.acquire("loom", "b", 60)
    assert taken is not None
    assert (taken.owner, taken.term) == ("b", 2)
    assert leases.acquire("loom", "a", 60) is None


def test_concurrent_acquire_gives_one_owner(leases: LoomLeases) -> None:
    with ThreadPoolExecutor(8) as pool:
        won = list(pool.map(lambda n: leases.acquire("loom", f"owner {n}", 60), range(16)))
    assert sum(each is not None for each in won) == 1


def test_acquire_with_invalid_arguments_raises(leases: LoomLeases) -> None:
    for ttl in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="ttl_s"):
            leases.acquire("loom", "a", ttl)
    with pytest.raises(ConfigError, match="owner"):
        leases.acquire("loom", "", 1)
