"""Who lives: a process here by its number and its beginning, one elsewhere by when it was seen."""

from __future__ import annotations

import os
from typing import Any

import pytest
import sqlalchemy as sa

from weft.store.library import Library
from weft.store.tables import writers
from weft.store.writers import DEAD_S, Writer, dead


def sign(library: Library, writer: Writer) -> str:
    return library.database.write(writer.sign)


def change(library: Library, mark: str, **values: Any) -> None:
    statement = sa.update(writers).where(writers.c.id == mark).values(**values)
    library.database.write(lambda connection: connection.execute(statement))


def is_dead(library: Library, mark: str) -> bool:
    return mark in library.database.read(
        lambda connection: dead(connection, {mark}, library.database)
    )


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="processes are told by /proc")
def test_a_process_here_lives_while_it_runs_however_long_it_is_silent(library: Library) -> None:
    writer = Writer(library.database)
    mark = sign(library, writer)
    change(library, mark, beat=0.0)
    assert not is_dead(library, mark)
    change(library, mark, began="1")  # its number, given to another one
    assert is_dead(library, mark)
    writer.close()
    writer.close()


def test_a_process_elsewhere_is_dead_after_a_minute_of_silence(library: Library) -> None:
    writer = Writer(library.database)
    mark = sign(library, writer)
    now = library.database.now
    change(library, mark, host="elsewhere", beat=now - DEAD_S + 20)
    assert not is_dead(library, mark)
    change(library, mark, beat=now - DEAD_S - 1)
    assert is_dead(library, mark)
    writer.beat()
    assert not is_dead(library, mark)
    writer.close()


def test_processes_of_former_days_are_forgotten(library: Library) -> None:
    old, new = Writer(library.database), Writer(library.database)
    mark = sign(library, old)
    change(library, mark, beat=0.0)
    assert sign(library, new) == sign(library, new)
    assert is_dead(library, mark)
    query = sa.select(writers.c.id)
    rows = library.database.read(lambda connection: connection.execute(query).scalars().all())
    assert rows == [new.id]
    old.close()
    new.close()
