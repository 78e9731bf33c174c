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
from . import advice, options
from .desk import with_grower, with_model
from .draw import grow_watched, show_cost, show_growth, show_tree
from .failures import guarded, tell, write
from .look import show_next, show_path
from .model import TINY
from .options import Tint

if TYPE_CHECKING:
    from ..loom import Heddle
    from .kept import Kept


@guarded
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
    wish = Wish(n, sampling, color, keep=keep, as_json=as_json, as_text=as_text, stays=interactive)
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
        with with_model(loom, own, engine, kv_budget) as kept:
            carry_on(kept, text, chat, wish, special=special)
        return
    with with_grower(options.chosen_model(context, model), engine, kv_budget) as grower:
        kept = grower.begin(text, chat=chat, system=system, special=special, keep=keep)
        try:
            grow_and_report(kept, kept.loom, wish)
        except (WeftError, KeyboardInterrupt):
            keep = keep and bool(kept.loom.children)
            raise
        finally:
            if not keep:
                kept.discard()


def carry_on(
    kept: Kept, text: str, chat: bool | None, wish: Wish, *, special: bool = False
) -> None:
    """Say a text to the node where the reader stands, and grow there; "" grows on as it is."""
    node = kept.at
    TerminalWriter.for_stream(sys.stderr).line(
        (f"continuing node {kept.number(node)} of {kept.name}", "dim")
    )
    wish = wish.with_settings_of(node)
    if special and not text:
        raise ConfigError("--special is about the text that is said to the node; give one")
    if text:
        node = kept.say(node, text, chat=chat, special=special)
    grow_and_report(kept, node, wish)


@guarded
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
    wish = Wish(
        n, sampling, color, as_json=as_json, as_text=as_text, stays=interactive, force=force
    )
    said = options.joined(text, "grow", node)
    if said is not None:
        options.check_text(said, "the text")
    elif special:
        raise ConfigError("--special is about the TEXT that is said to the node; give one")
    with with_model(loom, model, engine, kv_budget) as kept:
        at = kept.node(node)
        wish = wish.with_settings_of(at)
        if said is not None:
            at = kept.say(at, said, chat=chat, special=special)
        grow_and_report(kept, at, wish)


@dataclass(frozen=True, slots=True)
class Wish:
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

    def with_settings_of(self, node: Heddle) -> Wish:
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


def grow_and_report(kept: Kept, node: Heddle, wish: Wish) -> None:
    """Grow, keep, show, suggest; with `stays`, go on by keys. Leaves with 130 on Ctrl-C."""
    out = TerminalWriter.for_stream(sys.stdout)
    made, done = grown(out, kept, node, wish)
    is_kept = wish.keep and kept.try_save()
    if wish.as_json:
        write_growth(kept, made, is_kept=is_kept)
    else:
        if wish.as_text:
            show_cost(TerminalWriter.for_stream(sys.stderr), kept, made, is_kept=is_kept)
        else:
            show_growth(out, kept, made, wish.tint, is_kept=is_kept)
        if done:
            advice.warn_if_poor(kept.model, made)
    if wish.stays:
        converse(out, kept, wish)
    elif done and not wish.as_json:
        if is_kept:
            advice.after_growth(kept, made)
        else:
            advice.after_unkept(kept)
    if not done and not wish.stays:
        told = "interrupted: the branches are as far as they came"
        write("Cancelled", told, "", INTERRUPTED, wish.as_json)
        raise typer.Exit(INTERRUPTED)


def grown(out: TerminalWriter, kept: Kept, node: Heddle, wish: Wish) -> tuple[list[Heddle], bool]:
    """Grow at a node, watched; a node that has ended is told by its number.

    Branches that had ended when the model call failed, or its server died, are kept; all of them
    as far as they came when nobody reads what is written, or its disk is full.
    """
    shown = (
        NullDisplay
        if wish.as_json
        else partial(Printer, out, wish.n, first=None)
        if wish.as_text
        else None
    )
    n_before = len(node.children)
    try:
        return grow_watched(out, kept, node, wish.n, wish.sampling, shown, force=wish.force)
    except EngineError:
        if wish.keep and len(node.children) > n_before and kept.try_save():
            TerminalWriter.for_stream(sys.stderr).line(
                f"the branches that had ended are kept: {kept.name}"
            )
        raise
    except OSError as error:
        is_ours = isinstance(error, WeftError)  # else it is what is written to
        if wish.keep and not is_ours and kept.try_save():
            TerminalWriter.for_stream(sys.stderr).line(
                (f"kept as {kept.name}, as far as it came", "dim")
            )
        raise
    except Terminal:
        number, up = kept.number(node), kept.number(node.parent or node)
        raise Terminal(
            f"node {number} has ended: its last token is an end token",
            hint=f'weft grow {number} "…" says something to it, weft grow {up} -n {wish.n} grows '
            "others beside it, --force grows it anyway",
        ) from None


def write_growth(kept: Kept, made: list[Heddle], *, is_kept: bool, **more: Any) -> None:
    """Write what was grown as an object, after `more`."""
    from ..service.store.wire import growth_object

    name, numbers = (kept.name, kept.numbers()) if is_kept else (None, None)
    told = growth_object(
        kept.loom,
        made,
        name,
        numbers,
        model=kept.model,
        engine=kept.grower.engine,
        stats=kept.grower.stats(),
    )
    write_object({**more, **told})


_HELP = """\
  3            grow node 3             3 some text   say something to node 3, and grow
  r 3          read node 3             n 3           its next tokens
  t            draw the tree           q             quit
r and n alone mean the node last read or grown; 0 is the prompt."""


def converse(out: TerminalWriter, kept: Kept, wish: Wish) -> None:
    """Read keys until q or the end of input; a mistake is told and the next key read."""
    while True:
        out.line()
        last = kept.highest()
        keys = f"{'1-' if last > 1 else ''}{last} grow · r read · n next · q quit"
        line = ask(out, f"{keys} > ")
        if line is None or line in ("q", "quit", "exit"):
            return
        try:
            obey(out, kept, wish, line)
        except WeftError as error:
            tell(error, "run")
        except KeyboardInterrupt:
            TerminalWriter.for_stream(sys.stderr).line("interrupted")


def obey(out: TerminalWriter, kept: Kept, wish: Wish, line: str) -> None:
    """Do what one line says."""
    word, _, rest = line.strip().partition(" ")
    rest = rest.strip()
    if word.isdecimal():
        _grow(out, kept, wish, word, rest)
    elif word in ("r", "read"):
        kept.at = kept.node(rest or None)
        show_path(out, kept, kept.at)
    elif word in ("n", "next"):
        kept.at = kept.node(rest or None)
        show_next(out, kept, kept.at, kept.next(kept.at))
    elif word in ("t", "tree"):
        show_tree(out, kept)
    else:
        out.lines([out.text(row) for row in _HELP.splitlines()])
    if wish.keep and kept.name:
        kept.try_note()


def _grow(out: TerminalWriter, kept: Kept, wish: Wish, number: str, text: str) -> None:
    node = kept.node(number)
    wish = wish.with_settings_of(node)
    if text:
        node = kept.say(node, text)
    # A seed that was given belongs to the first call: the same branches would come again.
    fresh = {name: value for name, value in wish.sampling.items() if name != "seed"}
    wish = Wish(wish.n, fresh, wish.tint, keep=wish.keep, force=wish.force)
    made, _ = grown(out, kept, node, wish)
    is_kept = wish.keep and kept.try_save()
    show_growth(out, kept, made, wish.tint, is_kept=is_kept)
    advice.warn_if_poor(kept.model, made)


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
