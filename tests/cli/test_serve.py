"""`weft serve`: options, and errors at start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weft.cli.browser import has_screen
from weft.cli.serve import engine_options, page_of
from weft.errors import ConfigError
from weft.service.api.address import address


def test_unknown_serve_options_are_passed_to_the_engine() -> None:
    given = ["--tensor-parallel-size", "2", "--enforce-eager", "--dtype=half", "--x", "[1, 2]"]
    assert engine_options(given) == {
        "tensor_parallel_size": 2,
        "enforce_eager": True,
        "dtype": "half",
        "x": [1, 2],
    }


@pytest.mark.parametrize("given", [["size", "2"], ["--"], ["-x"]])
def test_serve_argument_that_is_no_option_raises(given: list[str]) -> None:
    with pytest.raises(ConfigError, match="start with --"):
        engine_options(given)


@pytest.mark.parametrize(
    ("host", "port", "url"),
    [
        ("", "", "http://127.0.0.1:8000"),
        ("0.0.0.0", "", "http://127.0.0.1:8000"),
        ("box:9", "", "http://box:9"),
        ("box:9", "7", "http://box:7"),
        ("https://box", "", "https://box:443"),
        ("http://box:80/", "", "http://box:80"),
        ("::1", "", "http://[::1]:8000"),
        ("[::1]:9", "", "http://[::1]:9"),
    ],
)
def test_host_and_port_variables_give_a_url(host: str, port: str, url: str) -> None:
    assert address({"WEFT_HOST": host, "WEFT_PORT": port}).url == url


@pytest.mark.parametrize(
    "given", [{"WEFT_PORT": "x"}, {"WEFT_HOST": "a:b"}, {"WEFT_HOST": "ftp://x"}]
)
def test_invalid_address_raises(given: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="allowed is"):
        address(given)


@pytest.mark.parametrize("given", [["--tensor-parallel-size", "2"], ["--tensor-parallel-size=2"]])
def test_engine_option_without_a_model_reaches_the_engine(weft, given: list[str]) -> None:
    result = weft("serve", "--port", "0", *given)
    assert result.exit_code == 2
    assert "the numpy engine has no option 'tensor_parallel_size'" in result.stderr


def test_public_host_without_key_is_an_error(weft) -> None:
    result = weft("serve", "--host", "0.0.0.0")
    assert result.exit_code == 2
    assert "API key" in result.stderr


@pytest.mark.parametrize("broken", ["address", "file", "home"])
def test_serve_with_broken_database_exits_like_other_verbs(
    weft: Any, home: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    home.mkdir(parents=True, exist_ok=True)
    if broken == "address":
        monkeypatch.setenv("WEFT_DB", "foo://x")
    elif broken == "file":
        (home / "weft.db").write_text("no database " * 100)
    else:
        (home / "file").write_text("")
        monkeypatch.setenv("WEFT_HOME", str(home / "file" / "x"))
    serve, listed = weft("serve", "--port", "0", "--no-browser"), weft("ls")
    assert serve.exit_code == listed.exit_code != 0
    # The hint to a verb's options names the verb.
    assert serve.stderr.replace("weft serve", "weft ls") == listed.stderr
    assert "serving" not in serve.output


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("tiny", "--also", "tiny"), 1, "already"),
        (("-m", "tiny", "--also", "tiny"), 1, "already"),
        (("--model", "./nosuch"), 3, "./nosuch"),
        (("-m", "./nosuch", "--tensor-parallel-size", "2"), 3, "./nosuch"),
        (("tiny", "-m", "smollm2"), 2, "'tiny' and, with -m, 'smollm2'"),
        (("--engine", "nosuch"), 2, "nosuch"),
    ],
)
def test_serve_with_invalid_models_exits_at_start(
    weft: Any, arguments: tuple[str, ...], code: int, message: str
) -> None:
    result = weft("serve", *arguments, "--port", "0", "--no-browser")
    assert (result.exit_code, message in result.stderr) == (code, True), result.output
    assert "serving" not in result.output


@pytest.mark.parametrize(
    ("environment", "is_terminal", "platform", "sits"),
    [
        ({"DISPLAY": ":0"}, True, "linux", True),
        ({"WAYLAND_DISPLAY": "wayland-0"}, True, "linux", True),
        ({}, True, "linux", False),
        ({}, True, "darwin", True),
        ({}, True, "win32", True),
        ({}, False, "darwin", False),
        ({"CI": "true"}, True, "darwin", False),
        ({"SSH_CONNECTION": "10.0.0.1 5 10.0.0.2 22"}, True, "darwin", False),
        ({"DISPLAY": ":0", "SSH_TTY": "/dev/pts/1"}, True, "linux", False),
    ],
)
def test_has_screen_needs_a_local_desktop(
    environment: dict[str, str], is_terminal: bool, platform: str, sits: bool
) -> None:
    assert has_screen(environment, is_terminal=is_terminal, platform=platform) is sits


def test_page_of_replaces_wildcard_addresses() -> None:
    assert page_of("http://0.0.0.0:80") == "http://127.0.0.1:80"
    assert page_of("http://[::]:80") == "http://[::1]:80"
    assert page_of("http://127.0.0.1:80") == "http://127.0.0.1:80"
