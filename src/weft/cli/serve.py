"""`weft serve`: serve models and looms over HTTP."""

from __future__ import annotations

import ast
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import ConfigError
from ..service.api.address import address
from ..viz.terminal import TerminalWriter
from . import options
from .browser import has_screen, show
from .failures import handle_errors
from .model import TINY

_PANEL = "Access"


@handle_errors
def serve(
    context: typer.Context,
    model: Annotated[
        str,
        typer.Argument(
            envvar="WEFT_MODEL",
            help="Model to load at start; takes the same values as weft run -m.",
            autocompletion=options.complete_models,
        ),
    ] = TINY,
    model_option: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="The same as the argument MODEL.",
            autocompletion=options.complete_models,
            show_default=False,
        ),
    ] = None,
    also: Annotated[
        list[str] | None,
        typer.Option("--also", help="Another model to load; can be repeated.", show_default=False),
    ] = None,
    engine: options.Engine = "auto",
    kv_budget: options.KvBudget = "auto",
    offload: Annotated[
        str | None,
        typer.Option(
            "--offload",
            help='Host memory for KV that exceeds the budget, such as "8GiB"; it is copied back'
            " when it is needed.",
            show_default="none",
        ),
    ] = None,
    draft: Annotated[
        str | None,
        typer.Option(
            "--draft",
            help='"lookup" drafts tokens from earlier text; repetitive text is faster, and '
            "equal up to rounding.",
            show_default="none",
        ),
    ] = None,
    n_ctx: Annotated[
        int | None,
        typer.Option(
            "--n-ctx", help="Maximum number of tokens of a path.", show_default="the model's own"
        ),
    ] = None,
    chat_template: options.ChatTemplate = None,
    host: Annotated[
        str | None,
        typer.Option(
            "--host",
            help="Address to listen on. Public addresses need an API key. Or set WEFT_HOST.",
            show_default="127.0.0.1",
        ),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(
            "--port",
            "-p",
            help="Port; 0 takes any free one. Or set WEFT_PORT.",
            show_default="8000",
        ),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            envvar="WEFT_API_KEY",
            help="Key that clients must send, as Authorization: Bearer KEY. Other users can see"
            " command lines: prefer WEFT_API_KEY.",
            show_default=False,
            show_envvar=False,
        ),
    ] = None,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-host",
            help="A host name that clients may use for the server; can be repeated.",
            show_default="this machine's own; any if public",
        ),
    ] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            "--allow-origin",
            help="An origin whose pages may use the server, such as https://example.org.",
            show_default="the server's own",
        ),
    ] = None,
    model_root: Annotated[
        list[Path] | None,
        typer.Option(
            "--model-root",
            help="A folder from which requests may load models.",
            show_default="none",
        ),
    ] = None,
    allow_hub: Annotated[
        bool, typer.Option("--allow-hub", help="Allow requests to load models from the Hub.")
    ] = False,
    memory_budget: Annotated[
        str | None,
        typer.Option(
            "--memory-budget",
            help='Memory for models and their KV, such as "24GiB"; idle models are unloaded.',
            show_default="no limit",
        ),
    ] = None,
    max_models: Annotated[
        int | None,
        typer.Option(
            "--max-models",
            help="Maximum number of loaded models. Loading more unloads idle models, but never"
            " those given here.",
            show_default="three more than are given here",
        ),
    ] = None,
    db: Annotated[
        str | None,
        typer.Option(
            "--db",
            envvar="WEFT_DB",
            help="URL of the looms' database, such as postgresql://…",
            show_default="a file in WEFT_HOME",
        ),
    ] = None,
    max_n: Annotated[
        int,
        typer.Option("--max-n", help="Maximum number of branches that one call grows at a node."),
    ] = 128,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", help="Maximum number of new tokens of a branch.")
    ] = 32_768,
    max_jobs: Annotated[
        int,
        typer.Option(
            "--max-jobs",
            help="Maximum number of running jobs; further requests are rejected with 429.",
        ),
    ] = 256,
    grace: Annotated[
        float,
        typer.Option("--grace", help="Seconds that running jobs get to finish after SIGTERM."),
    ] = 10.0,
    browser: Annotated[
        bool | None,
        typer.Option(
            "--browser/--no-browser",
            help="Open the page in the browser.",
            show_default="on a local desktop; not over SSH, not in CI",
        ),
    ] = None,
    verbose: options.Verbose = 0,
) -> None:
    """Serve models, looms and a web page over HTTP.

    The server runs until Ctrl-C. Unlisted options are passed to the engine, for example
    weft serve ./folder --engine vllm --tensor-parallel-size 2
    """
    from .._core.validation import check_int
    from ..lm.lm import check_draft
    from ..loading import display_name, parse_bytes
    from ..service.server.config import ServerConfig, ServerLimits
    from ..service.server.run import serve as serve_forever

    if model.startswith("--"):  # an option of the engine, and no model is given
        context.args.insert(0, model)
        model = os.environ.get("WEFT_MODEL") or TINY
    elif model_option is not None and options.was_typed(context, "model"):
        raise ConfigError(
            f"the model is {model!r:.80} and, with -m, {model_option!r:.80}; give one",
            hint="--also loads another model",
        )
    default = address()
    config = ServerConfig(
        models=(model if model_option is None else model_option, *(also or ())),
        engine=engine,
        engine_options=engine_options(context.args),
        n_ctx=n_ctx,
        kv_budget=kv_budget,
        offload=offload,
        draft=check_draft(draft),
        chat_template=chat_template,
        host=default.host if host is None else host,
        port=default.port if port is None else port,
        api_key=api_key or None,
        hosts=tuple(allow_host or ()),
        origins=tuple(allow_origin or ()),
        model_roots=tuple(model_root or ()),
        hub=allow_hub,
        memory_budget=None
        if memory_budget is None
        else parse_bytes(memory_budget, "--memory-budget", auto=False),
        max_models=None if max_models is None else check_int("--max-models", max_models, 1),
        db=db,
        grace_s=grace,
        limits=ServerLimits(
            n=check_int("--max-n", max_n, 1),
            tokens=check_int("--max-tokens", max_tokens, 1),
            jobs=check_int("--max-jobs", max_jobs, 1),
        ),
    )
    out = TerminalWriter.for_stream(sys.stderr)

    def announce(url: str, models: list[str]) -> None:
        out.line("serving ", (", ".join(models), "cyan"), " at ", (url, "bold"))
        if url.rpartition(":")[2] != str(default.port):
            host_and_port = url.partition("//")[2].replace("0.0.0.0", default.host)
            out.line(
                (f"Set WEFT_HOST={host_and_port} to make other commands use this server.", "dim")
            )
        if has_screen() if browser is None else browser:
            show(page_of(url))

    if out.is_terminal:
        out.line((f"loading {', '.join(map(display_name, config.models))}", "dim"))
    serve_forever(config, announce)


def page_of(url: str) -> str:
    """Return a server's URL for this machine's browser.

    The addresses 0.0.0.0 and ::, which a browser cannot open, become the loopback address.
    """
    return url.replace("//0.0.0.0:", "//127.0.0.1:").replace("//[::]:", "//[::1]:")


def engine_options(arguments: list[str]) -> dict[str, Any]:
    """Parse command-line options for the engine, such as `--max-model-len 4096`.

    Returns the values by Python name, such as {"max_model_len": 4096}. Values are numbers, true,
    false, Python literals or texts. An option without a value is True.

    Raises: ConfigError for an argument that is not an option.
    """
    parsed: dict[str, Any] = {}
    rest = list(arguments)
    while rest:
        name, has_value, value = rest.pop(0).partition("=")
        if not name.startswith("--") or len(name) == 2:
            raise ConfigError(f"{name!r:.80} is not an option; options of an engine start with --")
        if not has_value:
            value = rest.pop(0) if rest and not rest[0].startswith("--") else "true"
        parsed[name[2:].replace("-", "_")] = read_value(value)
    return parsed


def read_value(text: str) -> Any:
    """Return the value of an option: a number, list, dict, bool, None, or else the text."""
    words = {"true": True, "false": False, "null": None, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
    return value if isinstance(value, int | float | list | dict) else text
