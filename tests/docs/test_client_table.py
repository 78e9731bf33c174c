"""The table of docs/tested-clients.md has the clients, versions and features of tests/clients."""

from __future__ import annotations

import pytest

from tools import client_tests


@pytest.mark.parametrize("family", client_tests.families())
def test_rows_of_a_family_match_its_pins_and_marks(family: str) -> None:
    rows, versions = client_tests.read_rows(), client_tests.pins(family)
    for client, features in client_tests.covered(family).items():
        hint = f"run: make test-plugins FAMILY={family}"
        assert client in versions, f"{client} is not pinned in the files of {family}"
        assert client in rows, hint
        _, _, version, passes, fails, _ = rows[client].split("|")
        assert version.strip() == versions[client], hint
        listed = [name.strip() for cell in (passes, fails) for name in cell.split(",")]
        assert {name for name in listed if name} == features, hint


def test_every_row_has_a_test() -> None:
    covered = {client for name in client_tests.families() for client in client_tests.covered(name)}
    assert set(client_tests.read_rows()) <= covered


def test_feature_passes_only_if_all_of_its_tests_pass() -> None:
    outcomes = [
        ("openai", "chat", "passed"),
        ("openai", "chat", "skipped"),
        ("openai", "tools", "passed"),
    ]
    version = client_tests.pins("openai")["openai"]
    assert client_tests.rows_of("openai", outcomes) == {
        "openai": f"| openai | {version} | tools | chat |"
    }
