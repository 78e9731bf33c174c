"""Tests the examples of docs/clients.md: OpenAI code, llm file and allowed origins."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2 as httpx
import pytest

from serving import serving
from weft.errors import ConfigError
from weft.service.server import ServerConfig

if TYPE_CHECKING:
    from serving import Served

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "clients.md"
HERE = "http://127.0.0.1:8000"


def blocks(language: str) -> list[str]:
    text = PAGE.read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def test_the_code_of_the_page_runs(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("openai", reason="openai is not installed")
    (code,) = blocks("python")
    scope: dict[str, Any] = {}
    exec(code.replace(HERE, served.url), scope)  # as a reader would run it
    assert len(scope["completion"].choices) == 4
    scope["client"].close()
    assert capsys.readouterr().out.startswith("[")


@pytest.mark.filterwarnings("ignore")  # of other packages' code
def test_llm_works_with_the_config_file_of_the_page(
    served: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llm", reason="llm is not installed; make test-plugins")
    from click.testing import CliRunner
    from llm.cli import cli

    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    (file,) = blocks("yaml")
    (tmp_path / "extra-openai-models.yaml").write_text(file.replace(HERE, served.url))

    def run(*arguments: str) -> str:
        done = CliRunner().invoke(cli, list(arguments))
        assert done.exit_code == 0, done.output
        return done.output

    answer = run("-m", "weft", "Tell me a story about a fox.", "-o", "max_tokens", "8")
    assert answer.strip()
    run("-m", "weft", "-c", "And then?", "-o", "max_tokens", "8")
    (second,) = json.loads(run("logs", "-n", "1", "--json"))
    details = json.loads(second["token_details"])
    assert details["prompt_tokens_details"]["cached_tokens"] > 8
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["a"],
        "additionalProperties": False,
    }
    number = run("-m", "weft", "--schema", json.dumps(schema), "A number", "-o", "max_tokens", "40")
    assert isinstance(json.loads(number)["a"], int)
    run("-m", "weft-text", "Once upon a", "-o", "max_tokens", "4", "-o", "logprobs", "3")
    (logged,) = json.loads(run("logs", "-n", "1", "--json"))
    assert logged["response_json"]["logprobs"]


def test_the_origins_of_the_page_may_be_allowed() -> None:
    text = PAGE.read_text(encoding="utf-8")
    origins = tuple(dict.fromkeys(re.findall(r"--allow-origin (\S+?)`", text)))
    assert len(origins) == 2
    with serving(ServerConfig(port=0, origins=origins), wait=False) as server:
        for origin in origins:
            reply = httpx.get(f"{server.url}/healthz", headers={"Origin": origin}, timeout=None)
            assert reply.status_code == 200
            assert reply.headers["access-control-allow-origin"] == origin
        other = {"Origin": "app://other"}
        reply = httpx.get(f"{server.url}/healthz", headers=other, timeout=None)
        assert reply.status_code == 403


@pytest.mark.parametrize("origin", ["null", "*", "http://a/b", "a", "://a", "http://"])
def test_invalid_origin_is_rejected(origin: str) -> None:
    with pytest.raises(ConfigError, match="origin is"):
        ServerConfig(origins=(origin,))
