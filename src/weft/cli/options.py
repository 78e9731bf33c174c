"""The options that verbs share, how they become values, and what Tab offers for them."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from .._core import atomic_files
from .._core.sampling.params import NAMES, PARAMETERS, TEMPERATURE
from ..errors import ConfigError, GrammarError, WeftError
from ..viz.color_scale import ENTROPY, PROBABILITY, ColorScale
from ..viz.terminal import TerminalWriter, escape_controls
from ..viz.text import node_label
from .hints import quoted

_LABEL = 40


class Tint(StrEnum):
    """What the colour of a token says."""

    PROB = "prob"
    ENTROPY = "entropy"

    @property
    def scale(self) -> ColorScale:
        """The colours."""
        return PROBABILITY if self is Tint.PROB else ENTROPY


def complete_models(incomplete: str) -> list[str]:
    """Return the models here that begin so; folders are the shell's own business."""
    from .start_screen import cached_models, packaged_models

    names = ("tiny", *packaged_models(), *cached_models())
    return [name for name in names if name.startswith(incomplete)]


def complete_looms(incomplete: str) -> list[tuple[str, str]]:
    """Return the looms that begin so, with their prompts."""
    return [pair for pair in _looms() if pair[0].startswith(incomplete)]


def complete_nodes(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return the numbers of the loom's last tree that begin so, with the nodes' texts."""
    try:
        found = list(_nodes(context.params.get("loom")))
    except WeftError:
        return []
    return [pair for pair in found if pair[0].startswith(incomplete)]


def complete_looms_and_nodes(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Return the looms that begin so, then the nodes, for an argument that may be either."""
    return complete_looms(incomplete) + complete_nodes(context, incomplete)


def _looms() -> Iterator[tuple[str, str]]:
    from .backend import select_backend

    try:
        with select_backend() as backend:
            rows = backend.rows()
    except WeftError:
        return
    for row in rows:
        if row.name.isprintable():
            yield row.name, _line(row.prompt)


def _nodes(loom: str | None) -> Iterator[tuple[str, str]]:
    from .backend import select_backend

    with select_backend() as backend:
        session = backend.open(loom or backend.last_loom() or backend.last_loom_anywhere())
        texts = {session.number(node): node_label(node) for node in session.loom.walk()}
    for number in sorted(texts):
        yield str(number), _line(texts[number])


def _line(text: str) -> str:
    line = escape_controls(" ".join(text.split()))
    return line if len(line) <= _LABEL else f"{line[: _LABEL - 1]}…"


# Nothing but escapes: "\\neq" is LaTeX.
_ESCAPES = re.compile(r"(\\[nt])+")

Prompt = Annotated[
    list[str] | None,
    typer.Argument(help="What to ask; piped text is appended to it.", show_default=False),
]
AsText = Annotated[
    bool | None,
    typer.Option(
        "--text/--tree",
        help="Write the texts alone, with a line --- between them, or draw the tree, too.",
        show_default="the tree on a terminal, else the texts",
    ),
]
Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        envvar="WEFT_MODEL",
        help='"tiny" (embedded), "smollm2", a folder, a GGUF file, a Hub id org/name[@revision],'
        " ollama:NAME, or a server http://host:8000/v1#model?tokenizer=FOLDER.",
        autocompletion=complete_models,
    ),
]
OwnModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        help="Where the loom's model is now, as -m of weft run takes it.",
        show_default="the loom's",
        autocompletion=complete_models,
    ),
]
Engine = Annotated[
    str,
    typer.Option(
        "--engine",
        envvar="WEFT_ENGINE",
        help="auto: the one that fits the model; numpy, torch, mlx, llamacpp, vllm, remote, or one"
        " of another package.",
    ),
]
KvBudget = Annotated[
    str,
    typer.Option(
        "--kv-budget",
        envvar="WEFT_KV_BUDGET",
        help='Memory for KV, as "4GiB"; auto: what is sensible.',
    ),
]
ChatTemplate = Annotated[
    Path | None,
    typer.Option(
        "--chat-template",
        help="A file with a Jinja chat template instead of the model's own.",
        show_default=False,
        dir_okay=False,
    ),
]
Special = Annotated[
    bool,
    typer.Option(
        "--special", help="With --raw: read special tokens in the text as such, not as letters."
    ),
]
Keep = Annotated[
    bool,
    typer.Option(
        "--log/--no-log",
        "--keep/--no-keep",
        help="Keep the loom, for grow, tree, read, export.",
    ),
]
System = Annotated[
    str | None, typer.Option("--system", "-s", help="A system message.", show_default=False)
]
Interactive = Annotated[
    bool, typer.Option("-i", "--interactive", help="Stay, and grow on by keys.")
]
Branches = Annotated[int, typer.Option("-n", help="How many branches.")]
MaxTokens = Annotated[
    int | None,
    typer.Option("--max-tokens", help="New tokens a branch, at most.", show_default="256"),
]
_MODELS = "the model's"
Temperature = Annotated[
    float | None,
    typer.Option(*TEMPERATURE.names, help=TEMPERATURE.help, show_default=_MODELS),
]
Seed = Annotated[
    int | None,
    typer.Option(
        "--seed", help="The same seed gives the same tree, up to rounding.", show_default=False
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        "--stop",
        help=r"Text that ends a branch; may be given again. \n is a line end.",
        show_default=False,
    ),
]
JsonSchema = Annotated[
    Path | None,
    typer.Option(
        "--json-schema",
        help="Only JSON that fits the schema in this file.",
        show_default=False,
        dir_okay=False,
    ),
]
Color = Annotated[
    Tint | None,
    typer.Option(
        "--color",
        "--colour",
        help="Colour the texts by their tokens' probability or entropy.",
        show_default=False,
    ),
]
Node = Annotated[
    str,
    typer.Argument(
        help="A number of the last tree drawn; 0 is the prompt.",
        autocompletion=complete_nodes,
        show_default=False,
    ),
]
OptionalNode = Annotated[
    str | None,
    typer.Argument(
        help="A number of the last tree drawn; 0 is the prompt.",
        autocompletion=complete_nodes,
        show_default="the node last read or grown",
    ),
]
OptionalLoom = Annotated[
    str | None,
    typer.Argument(
        help="A loom's name (weft ls), or a .loom.json file to keep.",
        autocompletion=complete_looms,
        show_default="the one drawn last in this terminal",
    ),
]
Loom = Annotated[
    str | None,
    typer.Option(
        "--loom",
        help="A loom's name (weft ls), or a .loom.json file to keep.",
        autocompletion=complete_looms,
        show_default="the one drawn last in this terminal",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Write one JSON object and nothing else.")]
Verbose = Annotated[
    int,
    typer.Option(
        "-v",
        "--verbose",
        count=True,
        help="Show context, threads, template, BOS and sampling; -vv: all logs. Or WEFT_LOG=info.",
        show_default=False,
    ),
]


def read_prompt(
    words: list[str] | None, verb: str, *, example: str = "", is_optional: bool = False
) -> str:
    """Return the prompt: the argument, and below it what is piped in. example: a command to try."""
    argument, piped = joined(words, verb), _piped()
    if argument is None and not piped:
        if is_optional:
            return ""
        raise ConfigError(
            "there is no prompt: give one as the argument, or pipe one in",
            hint=f"for example: {example}" if example else "",
        )
    prompt = "\n\n".join(part for part in (argument, piped) if part)
    if not prompt.strip():
        raise ConfigError("the prompt is empty: say what to go on from")
    check_text(prompt, "the prompt")
    return prompt


def joined(words: list[str] | None, *verb: str) -> str | None:
    """Return a text that was typed without quotes as one; says how it is typed best."""
    if not words:
        return None
    text = " ".join(words)
    out = TerminalWriter.for_stream(sys.stderr)
    if len(words) > 1:
        # What begins as options do is none after a --.
        end = ["--"] if text.startswith("-") else []
        typed = " ".join(map(quoted, ["weft", *verb, *end, text]))
        out.line(
            ("hint: ", "bold"), "taken as one text; quotes keep it as it is: ", (typed, "cyan")
        )
    return text


def is_text(asked: bool | None, **others: Any) -> bool:
    """Whether to write texts alone: where that is asked for, or where stdout is no terminal.

    others: flags that ask for something else. Raises: ConfigError where both are asked for.
    """
    flags = [f"--{name}" for name, value in others.items() if value]
    if asked and flags:
        raise ConfigError(f"--text and {flags[0]} exclude each other: texts alone have no figures")
    return not flags and not sys.stdout.isatty() if asked is None else asked


def check_text(text: str, what: str) -> None:
    """Refuse what Python makes of bytes that the locale's encoding does not know."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ConfigError(
            f"{what} is not {sys.getfilesystemencoding()} text; convert it",
            hint="iconv -f latin1 -t utf-8 FILE | weft run …",
        )


def given(**options: Any) -> dict[str, Any]:
    """Return the options that were given; for the others the library's defaults hold."""
    return {name: value for name, value in options.items() if value is not None}


def with_sampling(verb: Callable[..., None]) -> Callable[..., None]:
    """Put the flags of all sampling parameters where a verb has `sampling`: what was given of them.

    A parameter has one where its row of the table names it.
    """
    signature = inspect.signature(verb, eval_str=True)
    flags = {name: flag for name in NAMES if (flag := PARAMETERS[name].flag)}

    @functools.wraps(verb)
    def run(**values: Any) -> None:
        verb(sampling=given(**{name: values.pop(name) for name in flags}), **values)

    listed: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        if parameter.name != "sampling":
            listed.append(parameter)
            continue
        for name, flag in flags.items():
            option = typer.Option(None, *flag.names, help=flag.help, show_default=_MODELS)
            kind = flag.type | None
            listed.append(parameter.replace(name=name, default=option, annotation=kind))
    run.__annotations__ = {each.name: each.annotation for each in listed}
    run.__signature__ = signature.replace(parameters=listed)  # type: ignore[attr-defined]
    return run


def constraint(schema: Path | None) -> dict[str, Any]:
    """Return the sampling option for a schema's file. Raises: ConfigError, GrammarError."""
    if schema is None:
        return {}
    from ..constraints import JsonSchema

    given = atomic_files.read_json(schema, ConfigError, "no JSON schema")
    if not isinstance(given, dict | bool):
        raise GrammarError(
            f"{schema} holds {atomic_files.repr_short(given)}; a JSON schema is an object"
        )
    try:
        made = JsonSchema(given)
        made.checked()
        return {"constraint": made}
    except GrammarError as error:
        raise GrammarError(f"{schema}: {error}", hint=error.hint) from error


def chosen_model(context: typer.Context, model: str) -> str | None:
    """Return the model that was asked for, by a flag or the environment; None for the default."""
    source = context.get_parameter_source("model")
    return None if source is not None and source.name == "DEFAULT" else model


def was_typed(context: typer.Context, name: str) -> bool:
    """Whether an option was given as a flag, not by the environment or by default."""
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def stops(texts: list[str] | None) -> list[str] | None:
    """Return stop strings: shells make it hard to type a line end, so its escape is one too."""
    if not texts:
        return None
    return [
        text.replace("\\n", "\n").replace("\\t", "\t") if _ESCAPES.fullmatch(text) else text
        for text in texts
    ]


def is_typed() -> bool:
    """Whether somebody types what is read: stdin is no pipe and no file."""
    return sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()


def _piped() -> str:
    if sys.stdin is None or sys.stdin.closed or is_typed():
        return ""
    try:
        return sys.stdin.read().strip("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"what is piped in is not {error.encoding} text; convert it") from None
    except OSError:
        return ""  # there is no stdin, as under some services
