"""`weft run` and `weft grow`: branches from a prompt, or from a node of the last tree drawn."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import samples
from .._core.error_mapping import INTERRUPTED
from ..errors import ConfigError, EngineError, Terminal, WeftError
from ..viz.lanes import NullDisplay, Printer
from ..viz.terminal import TerminalWriter, write_object
from . import hints, options
from .backend import load_for_new_loom, open_with_model
from .failures import handle_errors, print_error, write
from .growth_display import grow_and_show, show_cost, show_growth, show_tree
from .model import TINY
from .options import Tint
from .views import show_next, show_path

if TYPE_CHECKING:
    from ..loom import Heddle
    from .session import LoomSession


@handle_errors
@options.with_sampling
def run(
    context: typer.Context,
    prompt: options.Prompt = None,
    n: options.Branches = 4,
    max_tokens: options.MaxTokens = None,
    model: options.Model = TINY,
    engine: options.Engine = "auto",
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Ask through the chat template, or continue the text as it is.",
            show_default="chat if the model has a template",
        ),
    ] = None,
    special: options.Special = False,
    system: options.System = None,
    go_on: Annotated[
        bool, typer.Option("-c", "--continue", help="Say it to the branch last read or grown.")
    ] = False,
    loom: options.Loom = None,
    interactive: options.Interactive = False,
    *,
    sampling: dict[str, Any],
    seed: options.Seed = None,
    stop: options.Stop = None,
    json_schema: options.JsonSchema = None,
    color: options.Color = None,
    text_or_tree: options.AsText = None,
    keep: options.Keep = True,
    kv_budget: options.KvBudget = "auto",
    as_json: options.Json = False,
    verbose: options.Verbose = 0,
) -> None:
    """Grow branches from a prompt and draw them as a tree."""
    more = options.given(max_tokens=max_tokens, seed=seed, stop=options.stops(stop))
    sampling = {**sampling, **more, **options.constraint(json_schema)}
    as_text = options.is_text(text_or_tree, color=color, interactive=interactive, json=as_json)
    request = GrowRequest(
        n, sampling, color, keep=keep, as_json=as_json, as_text=as_text, stays=interactive
    )
    # Where one stays, what comes in are the keys.
    if interactive:
        text = options.joined(prompt, "run") or ""
    else:
        example = f'weft run "{samples.story}" -n 4'
        text = options.read_prompt(prompt, "run", example=example, is_optional=go_on)
    if loom is not None and not go_on:
        raise ConfigError("--loom says which loom -c continues; without -c a new one is made")
    if go_on:
        if system is not None:
            raise ConfigError("-s has no meaning with -c: the loom has its system message")
        own = model if options.was_typed(context, "model") else None
        with open_with_model(loom, own, engine, kv_budget) as session:
            continue_loom(session, text, chat, request, special=special)
        return
    with load_for_new_loom(options.chosen_model(context, model), engine, kv_budget) as model_handle:
        session = model_handle.create_loom(
            text, chat=chat, system=system, special=special, keep=keep
        )
        try:
            grow_and_report(session, session.loom, request)
        except (WeftError, KeyboardInterrupt):
            keep = keep and bool(session.loom.children)
            raise
        finally:
            if not keep:
                session.discard()


def continue_loom(
    session: LoomSession,
    text: str,
    chat: bool | None,
    request: GrowRequest,
    *,
    special: bool = False,
) -> None:
    """Say a text to the node where the reader stands, and grow there; "" grows on as it is."""
    node = session.at
    TerminalWriter.for_stream(sys.stderr).line(
        (f"continuing node {session.number(node)} of {session.name}", "dim")
    )
    request = request.with_settings_of(node)
    if special and not text:
        raise ConfigError("--special is about the text that is said to the node; give one")
    if text:
        node = session.add_user_text(node, text, chat=chat, special=special)
    grow_and_report(session, node, request)


@handle_errors
@options.with_sampling
def grow(
    node: options.Node,
    text: Annotated[
        list[str] | None,
        typer.Argument(
            help="Say this to the node first: an answer, or how it goes on.",
        ),
    ] = None,
    n: options.Branches = 4,
    max_tokens: options.MaxTokens = None,
    loom: options.Loom = None,
    model: options.OwnModel = None,
    engine: options.Engine = "auto",
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Say TEXT as the next turn of a chat, or add it as it is.",
            show_default="as the prompt was",
        ),
    ] = None,
    special: options.Special = False,
    *,
    sampling: dict[str, Any],
    seed: options.Seed = None,
    stop: options.Stop = None,
    force: Annotated[
        bool, typer.Option("--force", help="Grow a node that has ended, too.")
    ] = False,
    interactive: options.Interactive = False,
    color: options.Color = None,
    text_or_tree: options.AsText = None,
    kv_budget: options.KvBudget = "auto",
    as_json: options.Json = False,
    verbose: options.Verbose = 0,
) -> None:
    """Grow more branches from a node.

    What is not given is as the node itself was grown; the seed is a new one.
    """
    more = options.given(max_tokens=max_tokens, seed=seed, stop=options.stops(stop))
    sampling = {**sampling, **more}
    as_text = options.is_text(text_or_tree, color=color, interactive=interactive, json=as_json)
    request = GrowRequest(
        n, sampling, color, as_json=as_json, as_text=as_text, stays=interactive, force=force
    )
    said = options.joined(text, "grow", node)
    if said is not None:
        options.check_text(said, "the text")
    elif special:
        raise ConfigError("--special is about the TEXT that is said to the node; give one")
    with open_with_model(loom, model, engine, kv_budget) as session:
        at = session.node(node)
        request = request.with_settings_of(at)
        if said is not None:
            at = session.add_user_text(at, said, chat=chat, special=special)
        grow_and_report(session, at, request)


@dataclass(frozen=True, slots=True)
class GrowRequest:
    """What to grow and how to show it.

    as_text: the texts alone. stays: keys follow, in the same process.
    """

    n: int
    sampling: dict[str, Any]
    tint: Tint | None = None
    keep: bool = True
    as_json: bool = False
    as_text: bool = False
    stays: bool = False
    force: bool = False

    def __post_init__(self) -> None:
        if self.stays and self.as_json:
            raise ConfigError("-i and --json exclude each other: keys need a screen")

    def with_settings_of(self, node: Heddle) -> GrowRequest:
        """Return the wish with how the node was grown, for what was not asked for."""
        return replace(self, sampling={**settings_of(node), **self.sampling})


def settings_of(node: Heddle) -> dict[str, Any]:
    """Return how a node was grown, or the nearest before it, or what was grown from it."""
    near = [*reversed(node.path), *node.children]
    params = next((each.params for each in near if each.params is not None), None)
    if params is None:
        return {}
    # Another seed, or the same branches would come again.
    left_out = ("n", "seed", "constraint", *params.unset)
    return {name: value for name, value in params.keywords().items() if name not in left_out}


def grow_and_report(session: LoomSession, node: Heddle, request: GrowRequest) -> None:
    """Grow, keep, show, suggest; with `stays`, go on by keys. Leaves with 130 on Ctrl-C."""
    out = TerminalWriter.for_stream(sys.stdout)
    made, done = grown(out, session, node, request)
    is_kept = request.keep and session.try_save()
    if request.as_json:
        write_growth(session, made, is_kept=is_kept)
    else:
        if request.as_text:
            show_cost(TerminalWriter.for_stream(sys.stderr), session, made, is_kept=is_kept)
        else:
            show_growth(out, session, made, request.tint, is_kept=is_kept)
        if done:
            hints.warn_if_poor(session.model, made)
    if request.stays:
        converse(out, session, request)
    elif done and not request.as_json:
        if is_kept:
            hints.after_growth(session, made)
        else:
            hints.after_unkept(session)
    if not done and not request.stays:
        told = "interrupted: the branches are as far as they came"
        write("Cancelled", told, "", INTERRUPTED, request.as_json)
        raise typer.Exit(INTERRUPTED)


def grown(
    out: TerminalWriter, session: LoomSession, node: Heddle, request: GrowRequest
) -> tuple[list[Heddle], bool]:
    """Grow at a node, watched; a node that has ended is told by its number.

    Branches that had ended when the model call failed, or its server died, are kept; all of them
    as far as they came when nobody reads what is written, or its disk is full.
    """
    shown = (
        NullDisplay
        if request.as_json
        else partial(Printer, out, request.n, first=None)
        if request.as_text
        else None
    )
    n_before = len(node.children)
    try:
        return grow_and_show(
            out, session, node, request.n, request.sampling, shown, force=request.force
        )
    except EngineError:
        if request.keep and len(node.children) > n_before and session.try_save():
            TerminalWriter.for_stream(sys.stderr).line(
                f"the branches that had ended are kept: {session.name}"
            )
        raise
    except OSError as error:
        is_ours = isinstance(error, WeftError)  # else it is what is written to
        if request.keep and not is_ours and session.try_save():
            TerminalWriter.for_stream(sys.stderr).line(
                (f"kept as {session.name}, as far as it came", "dim")
            )
        raise
    except Terminal:
        number, up = session.number(node), session.number(node.parent or node)
        raise Terminal(
            f"node {number} has ended: its last token is an end token",
            hint=f'weft grow {number} "…" says something to it, weft grow {up} -n {request.n} '
            "grows others beside it, --force grows it anyway",
        ) from None


def write_growth(session: LoomSession, made: list[Heddle], *, is_kept: bool, **more: Any) -> None:
    """Write what was grown as an object, after `more`."""
    from ..service.store.json_output import growth_object

    name, numbers = (session.name, session.numbers()) if is_kept else (None, None)
    told = growth_object(
        session.loom,
        made,
        name,
        numbers,
        model=session.model,
        engine=session.model_handle.engine,
        stats=session.model_handle.stats(),
    )
    write_object({**more, **told})


_HELP = """\
  3            grow node 3             3 some text   say something to node 3, and grow
  r 3          read node 3             n 3           its next tokens
  t            draw the tree           q             quit
r and n alone mean the node last read or grown; 0 is the prompt."""


def converse(out: TerminalWriter, session: LoomSession, request: GrowRequest) -> None:
    """Read keys until q or the end of input; a mistake is told and the next key read."""
    while True:
        out.line()
        last = session.highest()
        keys = f"{'1-' if last > 1 else ''}{last} grow · r read · n next · q quit"
        line = ask(out, f"{keys} > ")
        if line is None or line in ("q", "quit", "exit"):
            return
        try:
            run_command(out, session, request, line)
        except WeftError as error:
            print_error(error, "run")
        except KeyboardInterrupt:
            TerminalWriter.for_stream(sys.stderr).line("interrupted")


def run_command(out: TerminalWriter, session: LoomSession, request: GrowRequest, line: str) -> None:
    """Do what one line says."""
    word, _, rest = line.strip().partition(" ")
    rest = rest.strip()
    if word.isdecimal():
        _grow(out, session, request, word, rest)
    elif word in ("r", "read"):
        session.at = session.node(rest or None)
        show_path(out, session, session.at)
    elif word in ("n", "next"):
        session.at = session.node(rest or None)
        show_next(out, session, session.at, session.next(session.at))
    elif word in ("t", "tree"):
        show_tree(out, session)
    else:
        out.lines([out.text(row) for row in _HELP.splitlines()])
    if request.keep and session.name:
        session.try_note()


def _grow(
    out: TerminalWriter, session: LoomSession, request: GrowRequest, number: str, text: str
) -> None:
    node = session.node(number)
    request = request.with_settings_of(node)
    if text:
        node = session.add_user_text(node, text)
    # A seed that was given belongs to the first call: the same branches would come again.
    fresh = {name: value for name, value in request.sampling.items() if name != "seed"}
    request = GrowRequest(request.n, fresh, request.tint, keep=request.keep, force=request.force)
    made, _ = grown(out, session, node, request)
    is_kept = request.keep and session.try_save()
    show_growth(out, session, made, request.tint, is_kept=is_kept)
    hints.warn_if_poor(session.model, made)


def ask(out: TerminalWriter, prompt: str) -> str | None:
    """Return a line that was typed, None at the end of input or on Ctrl-C."""
    with suppress(ImportError):
        import readline  # noqa: F401  (line editing and history, where the system has it)
    sys.stdout.flush()
    if out.console.file is not sys.stdout:
        out.write(out.escape(prompt))
        prompt = ""
    try:
        return input(out.escape(prompt)).strip()
    except (EOFError, KeyboardInterrupt):
        out.line()
        return None
