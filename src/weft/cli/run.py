"""`weft run` and `weft grow`: generate branches from a prompt or from a node."""

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

DEPTH = 4  # of an author's note, as `weft.loom.author_note.DEPTH`

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
    min_tokens: options.MinTokens = 0,
    bad_words: options.BadWords = None,
    allowed_token_ids: options.AllowedTokenIds = None,
    stop_token_ids: options.StopTokenIds = None,
    model: options.Model = TINY,
    engine: options.Engine = "auto",
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Apply the chat template, or continue the text as it is.",
            show_default="chat if the model has a template",
        ),
    ] = None,
    special: options.Special = False,
    system: options.System = None,
    continues: Annotated[
        bool,
        typer.Option("-c", "--continue", help="Add the prompt below the node last read or grown."),
    ] = False,
    loom: options.LoomToContinue = None,
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
    more = options.given(max_tokens=max_tokens, seed=seed, stop=options.unescaped(stop))
    constraint = options.constraint(
        json_schema,
        min_tokens=min_tokens,
        bad_words=bad_words,
        allowed_token_ids=allowed_token_ids,
        stop_token_ids=stop_token_ids,
    )
    sampling = {**sampling, **more, **constraint}
    as_text = options.is_text(text_or_tree, color=color, interactive=interactive, json=as_json)
    request = GrowRequest(
        n, sampling, color, keep=keep, as_json=as_json, as_text=as_text, stays=interactive
    )
    # With -i, stdin provides key commands, so piped text is no part of the prompt.
    if interactive:
        text = options.joined(prompt, "run") or ""
    else:
        example = f'weft run "{samples.story}" -n 4'
        text = options.read_prompt(prompt, "run", example=example, is_optional=continues)
    if loom is not None and not continues:
        raise ConfigError("--loom selects the loom for -c; without -c a new loom is created")
    if continues:
        if system is not None:
            raise ConfigError("-s cannot be used with -c: the loom already has a system message")
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
    """Add a text below the current node, then grow branches and report them (`weft run -c`).

    Args:
        session: the loom with its model.
        text: the text to add; "" adds nothing.
        chat: True adds the text as a chat turn, False as plain text, None like the loom's prompt.
        request: what to generate, and how to show it.
        special: parse special tokens in a plain text.
    """
    node = session.at
    TerminalWriter.for_stream(sys.stderr).line(
        (f"continuing node {session.number(node)} of {session.name}", "dim")
    )
    request = request.with_settings_of(node)
    if special and not text:
        raise ConfigError("--special applies to the prompt; give one")
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
            help="Add this text below the node first: a reply, or a continuation.",
        ),
    ] = None,
    n: options.Branches = 4,
    max_tokens: options.MaxTokens = None,
    min_tokens: options.MinTokens = 0,
    bad_words: options.BadWords = None,
    allowed_token_ids: options.AllowedTokenIds = None,
    stop_token_ids: options.StopTokenIds = None,
    loom: options.Loom = None,
    model: options.OwnModel = None,
    engine: options.Engine = "auto",
    chat: Annotated[
        bool | None,
        typer.Option(
            "--chat/--raw",
            help="Add TEXT as the next chat turn, or as it is.",
            show_default="like the loom's prompt",
        ),
    ] = None,
    special: options.Special = False,
    *,
    sampling: dict[str, Any],
    seed: options.Seed = None,
    stop: options.Stop = None,
    force: Annotated[
        bool, typer.Option("--force", help="Also grow a node that has ended.")
    ] = False,
    note: Annotated[
        str | None,
        typer.Option(
            "--note",
            help="Set the loom's author's note, which is inserted into the context while it grows; "
            '"" removes the note.',
        ),
    ] = None,
    note_depth: Annotated[
        int | None,
        typer.Option(
            "--note-depth",
            help="Number of messages (in a chat) or lines (in other text) after the note.",
            show_default=f"{DEPTH}",
        ),
    ] = None,
    interactive: options.Interactive = False,
    color: options.Color = None,
    text_or_tree: options.AsText = None,
    kv_budget: options.KvBudget = "auto",
    as_json: options.Json = False,
    verbose: options.Verbose = 0,
) -> None:
    """Grow more branches from a node.

    An option that is not given has the value with which the node was generated, or else the
    default below. The seed is new, and a node's temperature of 0 becomes the model's default.
    """
    more = options.given(max_tokens=max_tokens, seed=seed, stop=options.unescaped(stop))
    constraint = options.constraint(
        min_tokens=min_tokens,
        bad_words=bad_words,
        allowed_token_ids=allowed_token_ids,
        stop_token_ids=stop_token_ids,
    )
    sampling = {**sampling, **more, **constraint}
    as_text = options.is_text(text_or_tree, color=color, interactive=interactive, json=as_json)
    request = GrowRequest(
        n, sampling, color, as_json=as_json, as_text=as_text, stays=interactive, force=force
    )
    user_text = options.joined(text, "grow", node)
    if user_text is not None:
        options.check_text(user_text, "the text")
    elif special:
        raise ConfigError("--special applies to TEXT; give one")
    with open_with_model(loom, model, engine, kv_budget) as session:
        at = session.node(node)
        request = request.with_settings_of(at)
        change_note(session, note, note_depth)
        if user_text is not None:
            at = session.add_user_text(at, user_text, chat=chat, special=special)
        grow_and_report(session, at, request)


def change_note(session: LoomSession, text: str | None, depth: int | None) -> None:
    """Change the author's note of a loom; print the note that its growth uses to stderr.

    Args:
        text: the new note; "" removes the note, None keeps its text.
        depth: the new depth; None keeps the depth.

    Raises: ConfigError for a depth without a note.
    """
    from ..loom.author_note import AuthorNote

    old = session.loom.note
    if text == "":
        if depth is not None:
            raise ConfigError("--note-depth needs a note; leave it out to remove the note")
        session.set_note(None)
    elif text is not None or depth is not None:
        words = text if text is not None else old.text if old is not None else ""
        if not words:
            raise ConfigError("--note-depth needs a note: give --note TEXT")
        kept = DEPTH if old is None else old.depth
        session.set_note(AuthorNote(words, kept if depth is None else depth))
    if (note := session.loom.note) is not None:
        line = f"author's note at depth {note.depth}: {note.text}"
        TerminalWriter.for_stream(sys.stderr).line((line, "dim"))


@dataclass(frozen=True, slots=True)
class GrowRequest:
    """A generation request of `run` or `grow`, and how to show its result."""

    n: int  # number of branches
    sampling: dict[str, Any]  # only parameters that were given
    tint: Tint | None = None  # color texts by this value
    keep: bool = True  # save the loom
    as_json: bool = False
    as_text: bool = False  # write only the texts
    stays: bool = False  # read key commands afterwards (-i)
    force: bool = False  # also grow a node that has ended

    def __post_init__(self) -> None:
        if self.stays and self.as_json:
            raise ConfigError("-i and --json exclude each other; leave one out")

    def with_settings_of(self, node: Heddle) -> GrowRequest:
        """Return a copy of the request.

        Sampling parameters that were not given have the values with which the node was generated.
        A temperature of 0 is left out: several branches of it would all be equal.
        """
        inherited = settings_of(node)
        if inherited.get("temperature") == 0:
            del inherited["temperature"]
        return replace(self, sampling={**inherited, **self.sampling})


def settings_of(node: Heddle) -> dict[str, Any]:
    """Return the sampling parameters with which a node was generated, for generating more.

    A node that was not generated uses those of its nearest generated ancestor, else of a child.
    The number of branches, the seed and the constraint are left out.
    """
    near = [*reversed(node.path), *node.children]
    params = next((each.params for each in near if each.params is not None), None)
    if params is None:
        return {}
    # Without the seed: it would generate the same branches.
    left_out = ("n", "seed", "constraint", *params.unset)
    return {name: value for name, value in params.keywords().items() if name not in left_out}


def grow_and_report(session: LoomSession, node: Heddle, request: GrowRequest) -> None:
    """Grow branches as requested, save them (if `request.keep`) and show them.

    Then read key commands (-i) or suggest commands.
    Raises: typer.Exit with code 130 if Ctrl-C stopped the branches and -i is not set.
    """
    out = TerminalWriter.for_stream(sys.stdout)
    branches, done = grow_branches(out, session, node, request)
    is_kept = request.keep and session.try_save()
    if request.as_json:
        write_growth(session, branches, is_kept=is_kept)
    else:
        if request.as_text:
            show_cost(TerminalWriter.for_stream(sys.stderr), session, branches, is_kept=is_kept)
        else:
            show_growth(out, session, branches, request.tint, is_kept=is_kept)
        if done:
            hints.warn_if_poor(session.model, branches)
    if request.stays:
        converse(out, session, request)
    elif done and not request.as_json:
        if is_kept:
            hints.after_growth(session, branches)
        else:
            hints.after_unsaved(session)
    if not done and not request.stays:
        message = "interrupted: the branches are as far as they came"
        write("Cancelled", message, "", INTERRUPTED, request.as_json)
        raise typer.Exit(INTERRUPTED)


def grow_branches(
    out: TerminalWriter, session: LoomSession, node: Heddle, request: GrowRequest
) -> tuple[list[Heddle], bool]:
    """Generate branches at a node and show their progress.

    If the model call fails, finished branches are saved. If the output cannot be written, all
    branches are saved with the tokens that they have.

    Returns:
        The branches, and True if they are complete. False means that Ctrl-C stopped them.

    Raises: Terminal, with the node's number, for a node that has ended.
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
                f"the branches that had ended are saved as {session.name}"
            )
        raise
    except OSError as error:
        is_ours = isinstance(error, WeftError)  # otherwise the output could not be written
        if request.keep and not is_ours and session.try_save():
            TerminalWriter.for_stream(sys.stderr).line(
                (f"saved as {session.name}, as far as it came", "dim")
            )
        raise
    except Terminal:
        number, up = session.number(node), session.number(node.parent or node)
        raise Terminal(
            f"node {number} has ended: its last token is an end token",
            hint=f'weft grow {number} "…" replies to it, weft grow {up} -n {request.n} '
            "grows more siblings, --force grows it anyway",
        ) from None


def write_growth(
    session: LoomSession, branches: list[Heddle], *, is_kept: bool, **more: Any
) -> None:
    """Write the branches to stdout as one JSON object.

    Args:
        session: the loom with its model.
        branches: the branches that were generated.
        is_kept: the loom is saved. Only then the object contains its name and node numbers.
        more: fields to write before the others.
    """
    from ..service.store.json_output import growth_object

    name, numbers = (session.name, session.numbers()) if is_kept else (None, None)
    growth = growth_object(
        session.loom,
        branches,
        name,
        numbers,
        model=session.model,
        engine=session.model_handle.engine,
        stats=session.model_handle.stats(),
    )
    write_object({**more, **growth})


_HELP = """\
  3            grow node 3             3 some text   add a text to node 3, and grow
  r 3          read node 3             n 3           its next tokens
  t            draw the tree           q             quit
r and n without a number use the node last read or grown; 0 is the prompt."""


def converse(out: TerminalWriter, session: LoomSession, request: GrowRequest) -> None:
    """Read and run key commands until `q` or the end of input. Errors are printed, not raised."""
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
    """Run one key command, such as `3`, `r 3`, `n` or `t`. Other lines print the help.

    Args:
        out: the output.
        session: the loom with its model.
        request: the number of branches and the sampling parameters for `3`.
        line: the line that the user typed.
    """
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
        session.try_remember()


def _grow(
    out: TerminalWriter, session: LoomSession, request: GrowRequest, number: str, text: str
) -> None:
    """Run the key command that grows branches. number: as typed; text: the text to add first."""
    node = session.node(number)
    request = request.with_settings_of(node)
    if text:
        node = session.add_user_text(node, text)
    # Only the first call uses a given seed: it would generate the same branches.
    sampling = {name: value for name, value in request.sampling.items() if name != "seed"}
    request = GrowRequest(request.n, sampling, request.tint, keep=request.keep, force=request.force)
    branches, _ = grow_branches(out, session, node, request)
    is_kept = request.keep and session.try_save()
    show_growth(out, session, branches, request.tint, is_kept=is_kept)
    hints.warn_if_poor(session.model, branches)


def ask(out: TerminalWriter, prompt: str) -> str | None:
    """Write a prompt and read one line from stdin; return None at its end or on Ctrl-C."""
    with suppress(ImportError):
        import readline  # noqa: F401  (enables line editing and history)
    sys.stdout.flush()
    if out.console.file is not sys.stdout:
        out.write(out.escape(prompt))
        prompt = ""
    try:
        return input(out.escape(prompt)).strip()
    except (EOFError, KeyboardInterrupt):
        out.line()
        return None
