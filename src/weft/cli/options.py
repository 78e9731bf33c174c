"""The options that verbs share, and how they become values."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from ..errors import ConfigError

Prompt = Annotated[
    str | None,
    typer.Argument(help="What to ask; piped text is appended to it.", show_default=False),
]
Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        envvar="WEFT_MODEL",
        help='"tiny" (embedded), a folder, or a Hub id org/name[@revision].',
    ),
]
Engine = Annotated[
    str, typer.Option("--engine", envvar="WEFT_ENGINE", help="auto, numpy or torch.")
]
KvBudget = Annotated[
    str, typer.Option("--kv-budget", help='Memory for KV, as "4GiB"; auto: what is sensible.')
]
Seed = Annotated[
    int | None,
    typer.Option("--seed", help="The same seed gives the same tree.", show_default=False),
]
Temperature = Annotated[
    float | None,
    typer.Option("--temperature", "--temp", help="0 is greedy.", show_default="the model's"),
]
Json = Annotated[bool, typer.Option("--json", help="Write one JSON object and nothing else.")]


def read_prompt(argument: str | None) -> str:
    """Return the prompt: the argument, and below it what is piped in."""
    piped = _piped()
    if argument is None and not piped:
        raise ConfigError(
            "there is no prompt: give one as the argument, or pipe one in",
            hint='for example: weft run "Tell me a story about a fox." -n 4',
        )
    prompt = "\n\n".join(part for part in (argument, piped) if part)
    if any("\ud800" <= character <= "\udfff" for character in prompt):
        # What Python makes of bytes that the locale's encoding does not know.
        raise ConfigError(
            f"the prompt is not {sys.getfilesystemencoding()} text; convert it",
            hint="iconv -f latin1 -t utf-8 FILE | weft run …",
        )
    return prompt


def given(**options: Any) -> dict[str, Any]:
    """Return the options that were given; for the others the library's defaults hold."""
    return {name: value for name, value in options.items() if value is not None}


def _piped() -> str:
    if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty():
        return ""
    try:
        return sys.stdin.read().strip("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"what is piped in is not {error.encoding} text; convert it") from None
    except OSError:
        return ""  # there is no stdin, as under some services
