"""Install commands in messages name what pip can install today."""

from __future__ import annotations

import json
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
