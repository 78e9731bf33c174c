from __future__ import annotations

import subprocess
import sys

import pytest

from weft._core import doors


@pytest.mark.parametrize("name", doors.DOORS)
def test_every_door_leads_to_what_its_row_names(name: str) -> None:
    module, there = doors.DOORS[name]
    assert getattr(doors, name) is getattr(sys.modules[f"weft.{module}"], there)


def test_there_is_no_other_door() -> None:
    with pytest.raises(AttributeError, match="nowhere"):
        _ = doors.nowhere


def test_nothing_behind_a_door_is_loaded_before_it_opens() -> None:
    names = "('weft.viz', 'weft.service.store', 'weft.compat')"
    behind = f"[m for m in sys.modules if m.startswith({names})]"
    code = f"import sys, weft.loom, weft.asynclm, weft.loading; print({behind})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
