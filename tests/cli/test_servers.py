"""The command with a remote model, whose address is stored in the loom."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from cli.conftest import Weft
from fake_server import KEY, ServerProcess, run_fake_server
from shallow import TINY

pytestmark = pytest.mark.remote


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with run_fake_server(TINY) as started:
        yield started


def test_run_and_grow_find_the_remote_server_from_any_folder(
    weft: Weft, server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    near, address = (f"{server.base}#tiny?tokenizer={each}" for each in ("./tiny", TINY))
    monkeypatch.chdir(TINY.parent)
    ran = weft("run", "Tell me a story about a fox.", "-n", "2", "--seed", "1", "-m", near)
    assert ran.exit_code == 0, ran.output
    monkeypatch.chdir(tmp_path)
    grown = weft("grow", "1", "-n", "2", "--max-tokens", "4", "--seed", "1", "--force")
    assert grown.exit_code == 0, grown.output
    assert address in weft("ls").output
    refused = weft("next", "1")
    assert refused.exit_code == 3
    assert "next-token" in refused.output


def test_texts_alone_need_no_tokenizer(weft: Weft, server: ServerProcess) -> None:
    ran = weft("run", "Once upon a time", "-n", "2", "--max-tokens", "4", "-m", server.base)
    assert ran.exit_code == 0, ran.output
    assert weft("grow", "1", "--max-tokens", "3", "--force").exit_code == 0


def test_missing_server_model_and_key_have_messages(weft: Weft, server: ServerProcess) -> None:
    done = weft("run", "x", "-m", "http://127.0.0.1:9/v1")
    assert done.exit_code == 3
    assert "does not answer" in done.output
    done = weft("run", "x", "-m", f"{server.base}#big")
    assert done.exit_code == 3
    assert "it has tiny" in done.output
    with run_fake_server(TINY, "--key") as locked:
        done = weft("run", "x", "-m", locked.base)
        assert done.exit_code == 3
        assert "WEFT_API_KEY" in done.output
        assert KEY not in done.output


def test_hints_skip_answers_that_cannot_continue(weft: Weft) -> None:
    """Suggested commands work, on servers that can continue a message and on others."""
    with run_fake_server(TINY, "--without", "completions") as chatty:
        for dialect, at in (("vllm", "1"), ("openai", "0")):
            address = f"{chatty.base}#tiny?dialect={dialect}"
            ran = weft("run", "Tell me a story.", "-n", "1", "--max-tokens", "4", "-m", address)
            assert ran.exit_code == 0, ran.output
            assert f"next: weft grow {at} -n 4" in ran.stderr
            grown = weft("grow", at, "-n", "1", "--max-tokens", "4", "--force")
            assert grown.exit_code == 0, grown.output
