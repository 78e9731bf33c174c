"""Install commands in messages name what pip can install today."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

import weft
from weft._core import installation


def install(monkeypatch: pytest.MonkeyPatch, path: Path, origin: object) -> None:
    """Put metadata of Weft first on the path; origin: pip's record of what was installed."""
    folder = path / "weft_lm-0.1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: weft-lm\nVersion: 0.1.0\n")
    if origin is not None:
        (folder / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.syspath_prepend(str(path))


def test_hint_names_the_folder_from_which_pip_installed_weft(monkeypatch, tmp_path) -> None:
    install(monkeypatch, tmp_path, {"url": tmp_path.as_uri(), "dir_info": {"editable": True}})
    assert installation.install_hint("torch") == f'pip install "{tmp_path}[torch]"'


def test_hint_names_the_repository_from_which_pip_installed_weft(monkeypatch, tmp_path) -> None:
    origin = {"url": "https://example.org/weft.git", "vcs_info": {"vcs": "git", "commit_id": "1"}}
    install(monkeypatch, tmp_path, origin)
    hint = 'pip install "weft-lm[torch] @ git+https://example.org/weft.git"'
    assert installation.install_hint("torch") == hint


@pytest.mark.parametrize("origin", [None, {"url": "file:///does/not/exist", "dir_info": {}}])
def test_hint_without_a_usable_origin_names_the_folder_of_a_clone(
    monkeypatch, tmp_path, origin
) -> None:
    install(monkeypatch, tmp_path, origin)
    monkeypatch.setattr(installation, "PIP_TARGET", ".")
    assert installation.install_hint("torch") == 'pip install ".[torch]"'


def test_hint_names_the_distribution_once_it_is_published(monkeypatch, tmp_path) -> None:
    install(monkeypatch, tmp_path, {"url": tmp_path.as_uri(), "dir_info": {}})
    monkeypatch.setattr(installation, "PIP_TARGET", weft.DISTRIBUTION)
    assert installation.install_hint("torch") == 'pip install "weft-lm[torch]"'


def add_engine(site: Path, name: str) -> None:
    """Put metadata of a package with an engine into a folder, and move the folder's time on."""
    folder = site / f"{name}-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
    (folder / "entry_points.txt").write_text(f"[weft.engines]\n{name} = module:Class\n")
    os.utime(site, ns=(0, len(list(site.iterdir()))))


def test_entry_points_are_reread_only_after_an_installation(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), str(tmp_path / "absent")])
    add_engine(tmp_path, "first")
    points = installation.entry_points("weft.engines")
    assert points.names == {"first"}
    assert installation.entry_points("weft.engines") is points
    add_engine(tmp_path, "second")
    assert installation.entry_points("weft.engines").names == {"first", "second"}
