"""Calls on the same branches queue: each takes all of its branches, or waits for one of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .branch import Branch
    from .tenancy import Tenancy


@contextmanager
def turn(tenancy: Tenancy, branches: Sequence[Branch]) -> Iterator[None]:
    """Have the branches for oneself; blocks while others have them."""
    mine: Future[Any] = Future()
    while (other := _claim(tenancy, branches, mine)) is not None:
        other.result()
    try:
        yield
    finally:
        _release(tenancy, branches, mine)


@asynccontextmanager
async def aturn(tenancy: Tenancy, branches: Sequence[Branch]) -> AsyncIterator[None]:
    """The same for an event loop, which goes on meanwhile."""
    mine: Future[Any] = Future()
    while (other := _claim(tenancy, branches, mine)) is not None:
        await asyncio.shield(asyncio.wrap_future(other))
    try:
        yield
    finally:
        _release(tenancy, branches, mine)


def _claim(tenancy: Tenancy, branches: Sequence[Branch], mine: Future[Any]) -> Future[Any] | None:
    with tenancy.turns:
        for branch in branches:
            if branch.busy is not None:
                return branch.busy
        for branch in branches:
            branch.busy = mine
        return None


def _release(tenancy: Tenancy, branches: Sequence[Branch], mine: Future[Any]) -> None:
    with tenancy.turns:
        for branch in branches:
            branch.busy = None
    mine.set_result(None)
