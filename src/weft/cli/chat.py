"""`weft chat`: turn by turn, each answer a node; back, apart and over again by commands."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ConfigError, WeftError
from ..service.interchange.said import said_at
from ..viz.lanes import BETWEEN, NullDisplay, TextDisplay
from ..viz.terminal import TerminalWriter
from . import advice, options
from .desk import with_grower, with_model
from .draw import grow_watched, show_tree
from .failures import guarded, tell
from .model import TINY
from .run import ask, settings_of, write_growth

if TYPE_CHECKING:
    from ..loom import Heddle
    from .desk import Grower
    from .kept import Kept

_HELP = """\
  /fork [N]   N other answers to what you said last (4), and choose; Enter keeps the first
  /undo       back to before what you said last; it stays in the tree
  /clear      a new chat; this one stays among your looms
  /tree       the tree of this chat
  /help       this
  /quit       leave; Ctrl-D too. Ctrl-C stops an answer."""

_HINT = "/help lists the commands"


@guarded
@options.with_sampling
def chat(
    context: typer.Context,
    model: options.Model = TINY,
    engine: options.Engine = "auto",
    system: options.System = None,
    go_on: Annotated[
        bool,
        typer.Option(
            "-c", "--continue", help="Go on at the branch last read or grown; --loom does so too."
        ),
    ] = False,
    loom: options.Loom = None,
    max_tokens: options.MaxTokens = None,
    *,
    sampling: dict[str, Any],
    seed: options.Seed = None,
    kv_budget: options.KvBudget = "auto",
    as_json: Annotated[
        bool, typer.Option("--json", help="Write one JSON object an answer, and nothing else.")
    ] = False,
    verbose: options.Verbose = 0,
) -> None:
    """Talk to a model. Every answer is a node of a loom that is kept.

    Into a pipe or a file go the answers alone, with a line --- between two. What is not answered
    leaves its place empty; where the lines come from a pipe or a file, the exit code says so too.
    """
    sampling = {**sampling, **options.given(max_tokens=max_tokens, seed=seed)}
    if go_on or loom is not None:
        if system is not None:
            raise ConfigError("-s has no meaning with -c: the loom has its system message")
        own = model if options.was_typed(context, "model") else None
        with with_model(loom, own, engine, kv_budget) as kept:
            talk = Chat(kept.grower, sampling, kept=kept, as_json=as_json)
            talk.show_so_far()
            talk.run()
        return
    with with_grower(options.chosen_model(context, model), engine, kv_budget) as grower:
        Chat(grower, sampling, system=system, as_json=as_json).run()


class Chat:
    """One chat. kept: its loom, None until something is said; `kept.at` is the last answer.

    as_json: answers are objects. Answers go to stdout; all else, `out`, does so on a terminal only.
    """

    def __init__(
        self,
        grower: Grower,
        sampling: dict[str, Any],
        *,
        system: str | None = None,
        kept: Kept | None = None,
        as_json: bool = False,
    ) -> None:
        if not grower.has_template:
            raise ConfigError(
                f"{grower.source} has no chat template: it continues text and does not answer",
                hint=grower.template_hint('weft run "…" --raw continues a text'),
            )
        self.answers = TerminalWriter.for_stream(sys.stdout)
        is_seen = self.answers.is_terminal and not as_json
        self.out = self.answers if is_seen else TerminalWriter.for_stream(sys.stderr)
        self.grower = grower
        self.sampling = sampling
        self.system = system
        self.kept = kept
        self.as_json = as_json
        self.has_answered = False
        self.failure = 0  # the exit code of the first mistake

    def run(self) -> None:
        """Read lines until the end of input; a mistake is told and the next line read.

        Raises: typer.Exit with the first one's code where nobody has typed the lines.
        """
        if not self.as_json:
            self.out.line(
                (f"{self.grower.source} · /help lists the commands, Ctrl-D leaves", "dim")
            )
        line = self._ask("> ")
        while line is not None and line not in ("/quit", "/exit", "/q"):
            typed = None
            try:
                typed = self.obey(line)
            except WeftError as error:
                code = tell(error, "chat", as_json=self.as_json)
                self.failure = self.failure or code
            except KeyboardInterrupt:  # before its answer has begun
                if self.as_json:
                    raise
                self.out.line(("stopped", "dim"))
            line = self._ask("> ") if typed is None else typed
        if not self.as_json:
            self._say_what_next()
        if self.failure and not options.is_typed():
            raise typer.Exit(self.failure)

    def _say_what_next(self) -> None:
        stats = self.grower.stats()
        if stats.steps:
            self.out.facts(str(stats))
        if self.kept is not None and self.kept.name:
            advice.suggest(["weft", "chat", "-c"], ["weft", "tree"], ["weft", "read"])
        else:
            model = self.grower.source
            demo = [["weft", "chat"]] if model == TINY else []
            advice.suggest(*demo, *advice.for_model(model))

    def _ask(self, prompt: str) -> str | None:
        return ask(self.out, "" if self.as_json else prompt)

    def obey(self, line: str) -> str | None:
        """Do what one line says; return the next one where it has been typed already."""
        word, _, rest = line.partition(" ")
        if not line:
            return None
        if word == "/fork":
            return self.fork(rest.strip())
        if word == "/undo":
            self.undo()
        elif word == "/clear":
            self.kept = None
            self.out.line(("a new chat", "dim"))
        elif word == "/tree":
            if self.kept is None:
                raise ConfigError("nothing has been said yet", hint=_HINT)
            show_tree(self.out, self.kept)
        elif word.startswith("/") and word != "/":
            if word not in ("/help", "/?"):
                raise ConfigError(f"there is no command {word}", hint=_HINT)
            self.out.lines([self.out.text(row) for row in _HELP.splitlines()])
        else:
            options.check_text(line, "what you say")
            self.answer(line)
        return None

    def answer(self, text: str) -> None:
        """Say a text, and let the model answer once."""
        if self.has_answered and self.out is not self.answers and not self.as_json:
            self.answers.write(f"{BETWEEN}\n")
        self.has_answered = True
        if self.kept is None:
            self.kept = self.grower.begin(text, chat=True, system=self.system, special=False)
            node: Heddle = self.kept.loom
        else:
            node = self.kept.say(self.kept.at, text, chat=True)
        shown = NullDisplay if self.as_json else partial(TextDisplay, self.answers)
        sampling = self._sampling(node)
        try:
            made, done = grow_watched(self.out, self.kept, node, 1, sampling, shown)
        except OSError as error:
            if not isinstance(error, WeftError):  # nobody reads: it is kept as far as it came
                self.kept.try_save()
            raise
        if not done:
            self.out.line(("stopped", "dim"))
        if not made or not made[0].text:
            advice.warn_if_poor(self.grower.source, made)
        is_kept = self.kept.try_save()
        if self.as_json:
            write_growth(self.kept, made, is_kept=is_kept, said=text)

    def fork(self, number: str) -> str | None:
        """Grow other answers to what was said last, and go on from the one that is chosen.

        Returns what was typed instead of a choice.
        """
        kept, node = self.kept, self.said()
        if kept is None or node is None:
            raise ConfigError("there is no answer to fork yet: say something first", hint=_HINT)
        if number and not number.isdecimal():
            raise ConfigError(f"/fork takes a number of answers, not {number!r}", hint=_HINT)
        n, shown = int(number or 4), NullDisplay if self.as_json else None
        first = kept.at if kept.at is not node else None
        sampling = self._sampling(node)
        made, _ = grow_watched(self.out, kept, node, n, sampling, shown)
        kept.at = first or kept.at
        numbers = kept.numbers()
        if self.out.is_live:
            for each in made:
                self.out.block(str(numbers[each.id]), each.text.strip("\n"))
        advice.warn_if_poor(self.grower.source, made)
        is_kept = kept.try_save()
        if self.as_json:
            said = said_at(node) or kept.loom.user_prompt
            write_growth(kept, made, is_kept=is_kept, said=said)
        typed = self._choose(kept, node) if made else None
        self.out.line((f"going on from {kept.number(kept.at)}", "dim"))
        if kept.name:
            kept.try_note()
        return typed

    def _choose(self, kept: Kept, node: Heddle) -> str | None:
        """Ask which answer to go on from; return what was typed instead."""
        numbers = kept.numbers()
        allowed = sorted(numbers[each.id] for each in node.children)
        ways = ", ".join(map(str, allowed))
        while True:
            line = self._ask(f"which one? {ways}; Enter keeps {kept.number(kept.at)} > ")
            if not line:
                return None
            if not line.isdecimal():
                return line
            if line in map(str, allowed):
                kept.at = kept.node(line)
                return None
            what = f"{line} is no answer to what you said last; allowed are {ways}"
            tell(ConfigError(what, hint=_HINT), "chat", as_json=self.as_json)

    def undo(self) -> None:
        """Go back to the answer before what was said last."""
        kept, node = self.kept, self.said()
        if kept is None or node is None:
            raise ConfigError("there is nothing to undo", hint=_HINT)
        if node.parent is None:
            self.kept = None
            self.out.line(("back at the beginning", "dim"))
            return
        kept.at = node.parent
        if kept.name:
            kept.try_note()
        self.out.line((f"back before: {said_at(node) or node.text}", "dim"))

    def said(self) -> Heddle | None:
        """Return the node with what the user said last."""
        if self.kept is None:
            return None
        path = self.kept.at.path
        return next((node for node in reversed(path) if said_at(node) is not None), path[0])

    def show_so_far(self) -> None:
        """Write the end of a chat that goes on."""
        if self.kept is not None:
            from .look import show_path

            show_path(self.out, self.kept, self.kept.at)

    def _sampling(self, node: Heddle) -> dict[str, Any]:
        earlier = settings_of(self.kept.at) if self.kept is not None else {}
        # A chat has no stop strings and lengths of its own.
        kept = {name: value for name, value in earlier.items() if name not in ("stop",)}
        sampling = {**kept, **self.sampling}
        if "seed" in sampling:
            # The answers that are there came of this seed: the next ones are to differ.
            sampling["seed"] = (sampling["seed"] + len(node.children)) % 2**64
        return sampling
