"""Options that several verbs share: their parsing and their shell completion."""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .._core import atomic_files
from .._core.sampling.params import NAMES, PARAMETERS, TEMPERATURE, SamplingParams
from ..errors import ConfigError, GrammarError, WeftError
from ..viz.color_scale import ENTROPY, PROBABILITY, ColorScale
from ..viz.terminal import TerminalWriter, escape_controls
from ..viz.text import node_label
from .hints import quoted

if TYPE_CHECKING:
    from ..constraints import Constraint

_LABEL = 40


class Tint(StrEnum):
    """A value of --color: the statistic of each token that its color shows."""

    PROB = "prob"
    ENTROPY = "entropy"

    @property
    def scale(self) -> ColorScale:
        """The color scale of this statistic."""
        return PROBABILITY if self is Tint.PROB else ENTROPY


def complete_models(incomplete: str) -> list[str]:
    """Complete a model's name in the shell: return the models that start with `incomplete`.

    The shell completes folders itself.
    """
    from .start_screen import cached_models, packaged_models

    names = ("tiny", *packaged_models(), *cached_models())
    return [name for name in names if name.startswith(incomplete)]


def complete_looms(incomplete: str) -> list[tuple[str, str]]:
    """Complete a loom's name in the shell: return (name, prompt) of matching looms."""
    return [pair for pair in _looms() if pair[0].startswith(incomplete)]


def complete_nodes(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Complete a node's number in the shell: return (number, text) of matching nodes.

    context: the command line so far; its --loom selects the loom.
    """
    try:
        nodes = list(_nodes(context.params.get("loom")))
    except WeftError:
        return []
    return [pair for pair in nodes if pair[0].startswith(incomplete)]


def complete_looms_and_nodes(context: typer.Context, incomplete: str) -> list[tuple[str, str]]:
    """Complete a loom's name or a node's number in the shell: return matching looms, then nodes."""
    return complete_looms(incomplete) + complete_nodes(context, incomplete)


def _looms() -> Iterator[tuple[str, str]]:
    """Yield (name, prompt) of the saved looms, for completion."""
    from .backend import select_backend

    try:
        with select_backend() as backend:
            rows = backend.summaries()
    except WeftError:
        return
    for row in rows:
        if row.name.isprintable():
            yield row.name, _line(row.prompt)


def _nodes(loom: str | None) -> Iterator[tuple[str, str]]:
    """Yield (number, text) of a loom's nodes, for completion."""
    from .backend import select_backend

    with select_backend() as backend:
        session = backend.open(loom or backend.last_loom() or backend.last_loom_anywhere())
        texts = {session.number(node): node_label(node) for node in session.loom.walk()}
    for number in sorted(texts):
        yield str(number), _line(texts[number])


def _line(text: str) -> str:
    """Return a text shortened to one line."""
    line = escape_controls(" ".join(text.split()))
    return line if len(line) <= _LABEL else f"{line[: _LABEL - 1]}…"


# Only texts that consist of escapes: "\\neq" is LaTeX.
_ESCAPES = re.compile(r"(\\[nt])+")

Prompt = Annotated[
    list[str] | None,
    typer.Argument(help="The prompt; piped text is appended to it.", show_default=False),
]
AsText = Annotated[
    bool | None,
    typer.Option(
        "--text/--tree",
        help="Write only the texts, separated by lines ---, or draw the tree as well.",
        show_default="tree on a terminal, else text",
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
        help="Where the loom's model is now, if its files were moved; takes the same values as "
        "weft run -m.",
        show_default="the loom's",
        autocompletion=complete_models,
    ),
]
Engine = Annotated[
    str,
    typer.Option(
        "--engine",
        envvar="WEFT_ENGINE",
        help="auto (an engine that fits the model), numpy, torch, mlx, llamacpp, vllm, remote, or"
        " an engine from another package.",
    ),
]
KvBudget = Annotated[
    str,
    typer.Option(
        "--kv-budget",
        envvar="WEFT_KV_BUDGET",
        help='Memory for the KV cache, such as "4GiB"; auto: a share of the free memory.',
    ),
]
ChatTemplate = Annotated[
    Path | None,
    typer.Option(
        "--chat-template",
        help="A file with a Jinja chat template, used instead of the model's own.",
        show_default=False,
        dir_okay=False,
    ),
]
Special = Annotated[
    bool,
    typer.Option(
        "--special",
        help="With --raw: parse special tokens in the text instead of reading them as characters.",
    ),
]
Keep = Annotated[
    bool,
    typer.Option(
        "--log/--no-log",
        "--keep/--no-keep",
        help="Save the loom, so that grow, tree, read and export can use it.",
    ),
]
System = Annotated[
    str | None, typer.Option("--system", "-s", help="A system message.", show_default=False)
]
Interactive = Annotated[
    bool,
    typer.Option("-i", "--interactive", help="Stay open and continue with single-key commands."),
]
Branches = Annotated[int, typer.Option("-n", help="Number of branches.")]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens", help="Maximum number of new tokens for each branch.", show_default="256"
    ),
]
MinTokens = Annotated[
    int,
    typer.Option("--min-tokens", help="No branch ends before this many new tokens.", min=0),
]
BadWords = Annotated[
    list[str] | None,
    typer.Option(
        "--bad-words",
        help="Text that no branch contains, as the tokenizer splits it; can be repeated.",
        show_default=False,
    ),
]
AllowedTokenIds = Annotated[
    list[int] | None,
    typer.Option(
        "--allowed-token-ids",
        help="Allow only this token id; can be repeated to allow more. Include an end token if a"
        " branch may end by itself.",
        min=0,
        show_default=False,
    ),
]
StopTokenIds = Annotated[
    list[int] | None,
    typer.Option(
        "--stop-token-ids",
        help="Token id that ends a branch, besides the model's end tokens; can be repeated.",
        min=0,
        show_default=False,
    ),
]
_MODELS = "the model's"
Temperature = Annotated[
    float | None,
    typer.Option(*TEMPERATURE.names, help=TEMPERATURE.help, show_default=_MODELS),
]
Seed = Annotated[
    int | None,
    typer.Option(
        "--seed",
        help="Random seed; the same seed gives the same tree, up to rounding.",
        show_default=False,
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option(
        "--stop",
        help=r"Text that ends a branch; can be repeated. \n is a newline.",
        show_default=False,
    ),
]
JsonSchema = Annotated[
    Path | None,
    typer.Option(
        "--json-schema",
        help="Generate only JSON that matches the JSON schema in this file.",
        show_default=False,
        dir_okay=False,
    ),
]
Color = Annotated[
    Tint | None,
    typer.Option(
        "--color",
        "--colour",
        help="Color tokens by probability or entropy.",
        show_default=False,
    ),
]
Node = Annotated[
    str,
    typer.Argument(
        help="A node number, as weft tree shows it; 0 is the prompt.",
        autocompletion=complete_nodes,
        show_default=False,
    ),
]
OptionalNode = Annotated[
    str | None,
    typer.Argument(
        help="A node number, as weft tree shows it; 0 is the prompt.",
        autocompletion=complete_nodes,
        show_default="the node last read or grown",
    ),
]
OptionalLoom = Annotated[
    str | None,
    typer.Argument(
        help="A loom's name (see weft ls), or a .loom.json file to import.",
        autocompletion=complete_looms,
        show_default="the loom last used in this terminal",
    ),
]
Loom = Annotated[
    str | None,
    typer.Option(
        "--loom",
        help="A loom's name (see weft ls), or a .loom.json file to import.",
        autocompletion=complete_looms,
        show_default="the loom last used in this terminal",
    ),
]
LoomToContinue = Annotated[  # of commands that begin a loom unless they continue one
    str | None,
    typer.Option(
        "--loom",
        help="A loom's name (see weft ls), or a .loom.json file to import.",
        autocompletion=complete_looms,
        show_default="a new loom; with -c the loom last used in this terminal",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Write one JSON object and nothing else.")]
Verbose = Annotated[
    int,
    typer.Option(
        "-v",
        "--verbose",
        count=True,
        help="Log context, threads, template, BOS and sampling; -vv logs everything. Or set"
        " WEFT_LOG=info.",
        show_default=False,
    ),
]


def read_prompt(
    words: list[str] | None, verb: str, *, example: str = "", is_optional: bool = False
) -> str:
    """Return the prompt: the arguments, followed by the text that is piped to stdin.

    Args:
        words: the arguments; None for none.
        verb: the verb, for error messages.
        example: a complete command for the hint of an error.
        is_optional: return "" if there is no prompt, instead of raising ConfigError.
    """
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
        raise ConfigError("the prompt is empty; give a text to continue")
    check_text(prompt, "the prompt")
    return prompt


def joined(words: list[str] | None, *verb: str) -> str | None:
    """Join the words of a text argument, and return None for no words.

    For several words, a note shows how to quote them.

    verb: the command before the words, such as "grow" and a node, for the note.
    """
    if not words:
        return None
    text = " ".join(words)
    out = TerminalWriter.for_stream(sys.stderr)
    if len(words) > 1:
        # After --, words that start with - are not options.
        end = ["--"] if text.startswith("-") else []
        typed = " ".join(map(quoted, ["weft", *verb, *end, text]))
        out.line(
            ("hint: ", "bold"), "taken as one text; quotes keep it as it is: ", (typed, "cyan")
        )
    return text


def is_text(flag: bool | None, **others: Any) -> bool:
    """Return True if only texts are written: for --text, or if stdout is not a terminal.

    others: flags that exclude --text. Raises: ConfigError if --text and one of them is given.
    """
    flags = [f"--{name}" for name, value in others.items() if value]
    if flag and flags:
        raise ConfigError(f"--text and {flags[0]} exclude each other; leave one out")
    return not flags and not sys.stdout.isatty() if flag is None else flag


def check_text(text: str, what: str) -> None:
    """Raise ConfigError for a text with bytes that are invalid in the locale's encoding.

    what: the name of the text, for the message.
    """
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ConfigError(
            f"{what} is not {sys.getfilesystemencoding()} text; convert it",
            hint="iconv -f latin1 -t utf-8 FILE | weft run …",
        )


def given(**options: Any) -> dict[str, Any]:
    """Return the options that are not None. The library applies its defaults for the rest."""
    return {name: value for name, value in options.items() if value is not None}


def with_sampling(verb: Callable[..., None]) -> Callable[..., None]:
    """Replace a verb's parameter `sampling` by one flag for each sampling parameter.

    The verb gets the given flags as a dict. `PARAMETERS` says which parameters have a flag.
    """
    signature = inspect.signature(verb, eval_str=True)
    flags = {name: flag for name in NAMES if (flag := PARAMETERS[name].flag)}

    @functools.wraps(verb)
    def run(**values: Any) -> None:
        sampling = {name: values.pop(name) for name in flags}
        for name, value in sampling.items():
            if isinstance(value, list):
                sampling[name] = unescaped(value)
        verb(sampling=given(**sampling), **values)

    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        if parameter.name != "sampling":
            parameters.append(parameter)
            continue
        for name, flag in flags.items():
            shown = _MODELS if PARAMETERS[name].from_model else _default_text(name)
            option = typer.Option(None, *flag.names, help=flag.help, show_default=shown)
            kind = flag.type | None
            parameters.append(parameter.replace(name=name, default=option, annotation=kind))
    run.__annotations__ = {each.name: each.annotation for each in parameters}
    run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return run


def _default_text(name: str) -> str:
    """Return the default of a sampling parameter, for the help."""
    value = getattr(SamplingParams(), name)
    if isinstance(value, tuple):
        return " ".join(value).replace("\n", r"\n")
    return "all" if value is None else f"{value:g}"


def constraint(
    schema: Path | None = None,
    *,
    min_tokens: int = 0,
    bad_words: list[str] | None = None,
    allowed_token_ids: list[int] | None = None,
    stop_token_ids: list[int] | None = None,
) -> dict[str, Any]:
    """Return {"constraint": …} for --json-schema and the limits on tokens; {} without them.

    Raises: ConfigError for --json-schema with --min-tokens, for an empty bad word, or if the file
        cannot be read; GrammarError for a wrong schema.
    """
    if schema is not None and min_tokens:
        raise ConfigError("--min-tokens and --json-schema exclude each other; leave one out")
    json_schema = None if schema is None else _read_schema(schema)
    if not (min_tokens or bad_words or allowed_token_ids or stop_token_ids):
        return given(constraint=json_schema)
    from ..constraints import TokenLimits

    limits = TokenLimits(
        allowed=allowed_token_ids or None,
        bad_words=unescaped(bad_words) or (),
        min_tokens=min_tokens,
        stop_ids=stop_token_ids or (),
        inner=json_schema,
    )
    return {"constraint": limits}


def _read_schema(path: Path) -> Constraint:
    """Return the JSON schema in a file.

    Raises: ConfigError if the file cannot be read; GrammarError for a wrong schema.
    """
    from ..constraints import JsonSchema

    data = atomic_files.read_json(path, ConfigError, "no JSON schema")
    if not isinstance(data, dict | bool):
        raise GrammarError(
            f"{path} holds {atomic_files.repr_short(data)}; a JSON schema is an object"
        )
    try:
        json_schema = JsonSchema(data)
        json_schema.validated()
        return json_schema
    except GrammarError as error:
        raise GrammarError(f"{path}: {error}", hint=error.hint) from error


def chosen_model(context: typer.Context, model: str) -> str | None:
    """Return the model that a flag or WEFT_MODEL gives; None if neither is set.

    Args:
        context: Typer's context, which records where a value came from.
        model: the value of -m, which can be the default.
    """
    source = context.get_parameter_source("model")
    return None if source is not None and source.name == "DEFAULT" else model


def was_typed(context: typer.Context, name: str) -> bool:
    """Return True if an option was given on the command line.

    False for a value of the environment or a default.

    Args:
        context: Typer's context, which records where a value came from.
        name: name of the verb's parameter.
    """
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def unescaped(texts: list[str] | None) -> list[str] | None:
    """Return the texts of an option that can be repeated, such as --stop; None for none.

    A text that consists only of the escapes \\n and \\t is replaced by these characters.
    """
    if not texts:
        return None
    return [
        text.replace("\\n", "\n").replace("\\t", "\t") if _ESCAPES.fullmatch(text) else text
        for text in texts
    ]


def is_typed() -> bool:
    """Return True if stdin is a terminal."""
    return sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()


def _piped() -> str:
    """Return the text that is piped to stdin; "" for a terminal."""
    if sys.stdin is None or sys.stdin.closed or is_typed():
        return ""
    try:
        return sys.stdin.read().strip("\n")
    except UnicodeDecodeError as error:
        raise ConfigError(f"the piped text is not {error.encoding}; convert it") from None
    except OSError:
        return ""  # some services run programs without a stdin
