"""Rigs that must be empty when their test is over."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rig import MakeRig, Rig


@pytest.fixture
def make() -> Iterator[MakeRig]:
    rigs: list[Rig] = []

    def make_rig(*args: object, **options: object) -> Rig:
        rigs.append(Rig(*args, **options))  # type: ignore[arg-type]
        return rigs[-1]

    yield make_rig
    for rig in rigs:
        rig.finish()
