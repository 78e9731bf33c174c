"""Rigs that must be empty when their test is over."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rig import MakeRig, Rig


@pytest.fixture
def make() -> Iterator[MakeRig]:
    made: list[Rig] = []

    def make_rig(*args: object, **options: object) -> Rig:
        made.append(Rig(*args, **options))  # type: ignore[arg-type]
        return made[-1]

    yield make_rig
    for rig in made:
        rig.finish()
