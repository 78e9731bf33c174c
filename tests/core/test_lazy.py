from __future__ import annotations

import subprocess
import sys

import pytest

import weft.viz


def test_lazy_name_is_imported_from_its_module() -> None:
    assert weft.viz.show is sys.modules["weft.viz.text"].show  # type: ignore[attr-defined]


def test_unknown_lazy_name_raises_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nowhere"):
        _ = weft.viz.nowhere  # type: ignore[attr-defined]


def test_import_of_loom_loads_neither_viz_nor_store() -> None:
    names = "('weft.viz', 'weft.service.store', 'weft.compat')"
    loaded = f"[m for m in sys.modules if m.startswith({names})]"
    code = f"import sys, weft.loom, weft.asynclm, weft.loading; print({loaded})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
