"""Addresses of servers: Ollama by its name, a server's list of models, names that are not in it."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator
from typing import Any

import pytest

import weft
from fake_server import ServerProcess, run_fake_server
from shallow import TINY
from weft import Loom
from weft.engines.remote.address import Address, ollama_url
from weft.engines.remote.probe import list_models
from weft.errors import ConfigError, EngineUnavailable, ModelLoadError, Unsupported

pytestmark = pytest.mark.remote


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with run_fake_server(TINY, "--without", "chat") as started:
        yield started


@pytest.fixture(scope="module")
def ollama() -> Iterator[ServerProcess]:
    with run_fake_server(TINY, "--ollama") as started:
        yield started


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("", "http://127.0.0.1:11434/v1"),
        ("0.0.0.0", "http://127.0.0.1:11434/v1"),
        ("127.0.0.1:9", "http://127.0.0.1:9/v1"),
        ("box", "http://box:11434/v1"),
        ("[::1]:9", "http://[::1]:9/v1"),
        ("https://box/below/", "https://box/below/v1"),
    ],
)
def test_ollama_url_is_local_unless_ollama_host_names_another(host: str, url: str) -> None:
    assert ollama_url({"OLLAMA_HOST": host}) == url


def test_ollama_name_is_an_address_with_tag_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OLLAMA_HOST", raising=False)
    address = Address.parse("ollama:llama3.2:1b?n_ctx=4096")
    assert (address.base, address.model) == ("http://127.0.0.1:11434/v1", "llama3.2:1b")
    assert address.options == {"n_ctx": "4096"}


def test_list_models_reports_name_kind_and_context(server: ServerProcess) -> None:
    address, listed = list_models(server.base.removesuffix("/v1"))
    assert address.base == server.base
    (model,) = listed
    assert (model.model, model.dialect.name, model.n_ctx) == ("tiny", "vllm", 2048)


def test_ollama_is_recognised_and_its_models_listed(
    ollama: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OLLAMA_HOST", ollama.base.removesuffix("/v1"))
    _, listed = list_models("ollama:")
    assert [(each.model, each.dialect.name) for each in listed] == [
        ("tiny:latest", "ollama"),
        ("other:1b", "ollama"),
    ]


def test_ollama_grows_by_chats_alone_under_a_name_without_tag(
    ollama: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OLLAMA_HOST", ollama.base.removesuffix("/v1"))
    with weft.load("ollama:tiny") as lm:
        assert lm.info.extra["server"] == "ollama"
        assert lm.info.extra["address"] == f"{ollama.base}#tiny:latest"
        (node,) = Loom(lm, "Tell me a story about a fox.").grow(n=1, max_tokens=8, seed=1)
        assert node.text
        with pytest.raises(Unsupported, match="top_k=5"):
            Loom(lm, "Hello").grow(n=1, max_tokens=2, top_k=5)
    bodies = ollama.recorded()["bodies"]
    assert {each["model"] for each in bodies} == {"tiny:latest"}
    assert all("messages" in each for each in bodies)


def test_raw_completions_of_ollama_are_unsupported(ollama: ServerProcess) -> None:
    with pytest.raises(Unsupported, match="through the chat template"):
        weft.load(f"{ollama.base}#tiny?api=completions")
    with pytest.raises(Unsupported, match="leave out tokenizer="):
        weft.load(f"{ollama.base}#tiny", TINY)


def test_a_name_that_ollama_does_not_list_gets_near_names_and_the_command(
    ollama: ServerProcess,
) -> None:
    with pytest.raises(ModelLoadError, match="it has other:1b\n") as raised:
        weft.load(f"{ollama.base}#other")
    assert raised.value.hint == "ollama pull other"


def test_without_an_answer_the_hint_is_how_to_start_ollama(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OLLAMA_HOST", "127.0.0.2")
    with pytest.raises(EngineUnavailable, match="does not answer") as raised:
        weft.load("ollama:llama3.2")
    assert raised.value.hint == "ollama serve starts Ollama"


def test_several_models_and_no_name_is_a_mistake(ollama: ServerProcess) -> None:
    with pytest.raises(ConfigError, match="it has tiny:latest, other:1b") as raised:
        weft.load(ollama.base)
    assert raised.value.hint == f"weft models --at {ollama.base} lists them"


def test_models_command_lists_a_server(weft_command, server: ServerProcess) -> None:
    done = weft_command("models", "--at", server.base)
    assert done.stdout.split() == ["tiny", "vllm", "2,048", "tokens"]
    assert f"weft run -m {server.base}#tiny" in done.stderr.replace('"', "")
    data = json.loads(weft_command("models", "--at", server.base, "--json").stdout)
    (row,) = data["models"]
    assert row == {"name": "tiny", "model": f"{server.base}#tiny", "kind": "vllm", "n_ctx": 2048}
    assert weft_command("models", "--at", "gpt2").exit_code == 2


_SAMPLING = {
    *("temperature", "top_k", "top_p", "min_p", "typical_p", "repetition_penalty"),
    *("presence_penalty", "frequency_penalty", "repeat_penalty", "repeat_last_n", "samplers"),
    *("top_n_sigma", "xtc_probability", "dry_multiplier"),
}


@pytest.mark.parametrize(
    "options",
    [("--owner", "vllm"), ("--owner", "anybody"), ("--owner", "llamacpp"), ("--ollama",)],
)
def test_a_chat_sends_only_the_sampling_that_the_call_gives(options: tuple[str, ...]) -> None:
    with run_fake_server(TINY, *options) as started, weft.load(f"{started.base}#tiny") as lm:
        assert lm.chat_defaults.summary() == "the server's sampling"
        assert lm.defaults.summary() == "temperature 1"
        loom = Loom(lm, "Tell me a story about a fox.")
        for given, sent in (
            ({}, {}),
            ({"temperature": 1.0}, {"temperature": 1.0}),
            ({"temperature": 0.7, "top_p": 1.0}, {"temperature": 0.7, "top_p": 1.0}),
        ):
            (node,) = loom.grow(n=1, max_tokens=4, **given)
            assert node.text
            body = started.bodies()[-1]
            assert {name: body[name] for name in _SAMPLING & set(body)} == sent
        Loom(lm, "Once", template=False).grow(n=1, max_tokens=4)
        assert started.bodies()[-1]["temperature"] == 1


def test_run_reports_the_servers_sampling(ollama: ServerProcess, weft_command: Any) -> None:
    model = f"{ollama.base}#tiny:latest"
    done = weft_command("run", "Hi", "-m", model, "--max-tokens", "4", "--no-keep")
    assert done.exit_code == 0, done.output
    assert "the server's sampling" in done.output
    assert "temperature" not in done.output


@pytest.fixture
def weft_command():
    """`weft_command("models")`: a verb's result."""
    from typer.testing import CliRunner

    from weft.cli.app import app

    return lambda *arguments: CliRunner().invoke(app, list(arguments))


def test_plain_http_loads_no_certificates(
    server: ServerProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[object] = []
    monkeypatch.setattr(
        ssl.SSLContext, "load_verify_locations", lambda *given, **_: loads.append(given)
    )
    assert list_models(server.base)
    assert loads == []
