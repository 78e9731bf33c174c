"""`weft chat`: talk to a model turn by turn; each answer is a node of the loom."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..errors import ConfigError, WeftError
from ..service.interchange.user_text import user_text_of
from ..viz.lanes import BETWEEN, NullDisplay, TextDisplay
from ..viz.terminal import TerminalWriter
from . import hints, options
from .backend import load_for_new_loom, open_with_model
from .failures import handle_errors, print_error
from .growth_display import grow_and_show, show_tree
from .model import TINY
from .run import ask, settings_of, write_growth

if TYPE_CHECKING:
    from ..loom import Heddle
    from .backend import ModelHandle
    from .session import LoomSession

_HELP = """\
  /fork [N]   generate N (4) other answers to your last message, and choose one
  /undo       go back before your last message; it stays in the tree
  /clear      start a new chat; this one stays saved
  /tree       draw the tree of this chat
  /help       show this list
  /quit       leave, as Ctrl-D does. Ctrl-C stops an answer."""

_HINT = "/help lists the commands"


@handle_errors
@options.with_sampling
def chat(
    context: typer.Context,
    model: options.Model = TINY,
    engine: options.Engine = "auto",
    system: options.System = None,
    continues: Annotated[
        bool,
        typer.Option(
            "-c", "--continue", help="Continue at the node last read or grown; --loom implies it."
        ),
    ] = False,
    loom: options.LoomToContinue = None,
    max_tokens: options.MaxTokens = None,
    *,
    sampling: dict[str, Any],
    seed: options.Seed = None,
    kv_budget: options.KvBudget = "auto",
    as_json: Annotated[
        bool,
        typer.Option("--json", help="Write one JSON object for each answer, and nothing else."),
    ] = False,
    verbose: options.Verbose = 0,
) -> None:
    """Talk to a model. Every answer is a node of a saved loom.

    Piped output contains only the answers, separated by lines ---. A message without an answer
    gives an empty text. If input is piped, the exit code is that of the first error.
    """
    sampling = {**sampling, **options.given(max_tokens=max_tokens, seed=seed)}
    if continues or loom is not None:
        if system is not None:
            raise ConfigError("-s cannot be used with -c: the loom already has a system message")
        own = model if options.was_typed(context, "model") else None
        with open_with_model(loom, own, engine, kv_budget) as session:
            talk = Chat(session.model_handle, sampling, session=session, as_json=as_json)
            talk.show_so_far()
            talk.run()
        return
    with load_for_new_loom(options.chosen_model(context, model), engine, kv_budget) as model_handle:
        Chat(model_handle, sampling, system=system, as_json=as_json).run()


class Chat:
    """One chat: its loom, its sampling parameters and its output streams.

    Answers go to stdout. Everything else goes to `out`: stdout on a terminal, else stderr.

    Args:
        model_handle: the model that answers.
        sampling: the sampling parameters that were given.
        system: the system message; None for none.
        session: the loom, with the last answer at `session.at`. None until the first message.
        as_json: write each answer as a JSON object.
    """

    def __init__(
        self,
        model_handle: ModelHandle,
        sampling: dict[str, Any],
        *,
        system: str | None = None,
        session: LoomSession | None = None,
        as_json: bool = False,
    ) -> None:
        if not model_handle.has_template:
            raise ConfigError(
                f"{model_handle.source} has no chat template: it continues text"
                " and does not answer",
                hint=model_handle.template_hint('weft run "…" --raw continues a text'),
            )
        self.answers = TerminalWriter.for_stream(sys.stdout)
        is_interactive = self.answers.is_terminal and not as_json
        self.out = self.answers if is_interactive else TerminalWriter.for_stream(sys.stderr)
        self.model_handle = model_handle
        self.sampling = sampling
        self.system = system
        self.session = session
        self.as_json = as_json
        self.has_answered = False
        self.failure = 0  # the exit code of the first error; 0 without one

    def run(self) -> None:
        """Answer messages and run commands until the end of input; errors are printed.

        Raises: typer.Exit with the code of the first error, if the input is not a terminal.
        """
        if not self.as_json:
            self.out.line(
                (f"{self.model_handle.source} · /help lists the commands, Ctrl-D leaves", "dim")
            )
        line = self._ask("> ")
        while line is not None and line not in ("/quit", "/exit", "/q"):
            typed = None
            try:
                typed = self.run_command(line)
            except WeftError as error:
                code = print_error(error, "chat", as_json=self.as_json)
                self.failure = self.failure or code
            except KeyboardInterrupt:  # before the answer started
                if self.as_json:
                    raise
                self.out.line(("stopped", "dim"))
            line = self._ask("> ") if typed is None else typed
        if not self.as_json:
            self._suggest_commands()
        if self.failure and not options.is_typed():
            raise typer.Exit(self.failure)

    def _suggest_commands(self) -> None:
        """Write the statistics of the chat, and commands to run next."""
        stats = self.model_handle.stats()
        if stats.steps:
            self.out.facts(str(stats))
        if self.session is not None and self.session.name:
            hints.suggest(["weft", "chat", "-c"], ["weft", "tree"], ["weft", "read"])
        else:
            model = self.model_handle.source
            demo = [["weft", "chat"]] if model == TINY else []
            hints.suggest(*demo, *hints.for_model(model))

    def _ask(self, prompt: str) -> str | None:
        """Write a prompt and read one line; None at the end of input."""
        return ask(self.out, "" if self.as_json else prompt)

    def run_command(self, line: str) -> str | None:
        """Run one line of input: a command such as /fork, or a message to the model.

        Returns the next line to run, if the user typed it at the prompt of /fork; else None.
        """
        word, _, rest = line.partition(" ")
        if not line:
            return None
        if word == "/fork":
            return self.fork(rest.strip())
        if word == "/undo":
            self.undo()
        elif word == "/clear":
            self.session = None
            self.out.line(("a new chat", "dim"))
        elif word == "/tree":
            if self.session is None:
                raise ConfigError("the chat is empty", hint=_HINT)
            show_tree(self.out, self.session)
        elif word.startswith("/") and word != "/":
            if word not in ("/help", "/?"):
                raise ConfigError(f"there is no command {word}", hint=_HINT)
            self.out.lines([self.out.text(row) for row in _HELP.splitlines()])
        else:
            options.check_text(line, "the message")
            self.answer(line)
        return None

    def answer(self, text: str) -> None:
        """Send a message and generate one answer."""
        if self.has_answered and self.out is not self.answers and not self.as_json:
            self.answers.write(f"{BETWEEN}\n")
        self.has_answered = True
        if self.session is None:
            self.session = self.model_handle.create_loom(
                text, chat=True, system=self.system, special=False
            )
            node: Heddle = self.session.loom
        else:
            node = self.session.add_user_text(self.session.at, text, chat=True)
        shown = NullDisplay if self.as_json else partial(TextDisplay, self.answers)
        sampling = self._sampling(node)
        try:
            answers, done = grow_and_show(self.out, self.session, node, 1, sampling, shown)
        except OSError as error:
            if not isinstance(error, WeftError):  # the output is closed: save the partial answer
                self.session.try_save()
            raise
        if not done:
            self.out.line(("stopped", "dim"))
        if not answers or not answers[0].text:
            hints.warn_if_poor(self.model_handle.source, answers)
        is_kept = self.session.try_save()
        if self.as_json:
            write_growth(self.session, answers, is_kept=is_kept, said=text)

    def fork(self, number: str) -> str | None:
        """Generate other answers to the last message, and continue from the chosen one.

        number: number of answers as typed; "" means 4.
        Returns a line that was typed instead of a choice; None if there is none.
        """
        session, node = self.session, self._last_message()
        if session is None or node is None:
            raise ConfigError("there is no answer to fork yet; send a message first", hint=_HINT)
        if number and not number.isdecimal():
            raise ConfigError(f"/fork takes a number of answers, not {number!r}", hint=_HINT)
        n, shown = int(number or 4), NullDisplay if self.as_json else None
        first = session.at if session.at is not node else None
        sampling = self._sampling(node)
        answers, _ = grow_and_show(self.out, session, node, n, sampling, shown)
        session.at = first or session.at
        numbers = session.numbers()
        if self.out.is_live:
            for answer in answers:
                self.out.block(str(numbers[answer.id]), answer.text.strip("\n"))
        hints.warn_if_poor(self.model_handle.source, answers)
        is_kept = session.try_save()
        if self.as_json:
            message = user_text_of(node) or session.loom.user_prompt
            write_growth(session, answers, is_kept=is_kept, said=message)
        typed = self._choose(session, node) if answers else None
        self.out.line((f"going on from {session.number(session.at)}", "dim"))
        if session.name:
            session.try_remember()
        return typed

    def _choose(self, session: LoomSession, node: Heddle) -> str | None:
        """Ask for the answer to continue from, and make it the current node.

        node: the message whose answers can be chosen.
        Returns a line that is not a number, to run it as the next one; None after a choice.
        """
        numbers = session.numbers()
        allowed = sorted(numbers[each.id] for each in node.children)
        ways = ", ".join(map(str, allowed))
        while True:
            line = self._ask(f"which one? {ways}; Enter keeps {session.number(session.at)} > ")
            if not line:
                return None
            if not line.isdecimal():
                return line
            if line in map(str, allowed):
                session.at = session.node(line)
                return None
            what = f"{line} is not an answer to your last message; allowed are {ways}"
            print_error(ConfigError(what, hint=_HINT), "chat", as_json=self.as_json)

    def undo(self) -> None:
        """Go back to the answer before the last message."""
        session, node = self.session, self._last_message()
        if session is None or node is None:
            raise ConfigError("there is nothing to undo", hint=_HINT)
        if node.parent is None:
            self.session = None
            self.out.line(("back at the beginning", "dim"))
            return
        session.at = node.parent
        if session.name:
            session.try_remember()
        self.out.line((f"back before: {user_text_of(node) or node.text}", "dim"))

    def _last_message(self) -> Heddle | None:
        """Return the node with the user's last message.

        Returns the root if it contains the only message, and None before the first message.
        """
        if self.session is None:
            return None
        path = self.session.at.path
        return next((node for node in reversed(path) if user_text_of(node) is not None), path[0])

    def show_so_far(self) -> None:
        """Write the messages and answers so far of a chat that is continued."""
        if self.session is not None:
            from .views import show_path

            show_path(self.out, self.session, self.session.at)

    def _sampling(self, node: Heddle) -> dict[str, Any]:
        """Return the sampling parameters of an answer to `node`: earlier ones, and those given."""
        earlier = settings_of(self.session.at) if self.session is not None else {}
        # Stop strings of an earlier `grow` do not apply to a chat.
        earlier.pop("stop", None)
        sampling = {**earlier, **self.sampling}
        if "seed" in sampling:
            # The existing answers used this seed; the next ones must differ.
            sampling["seed"] = (sampling["seed"] + len(node.children)) % 2**64
        return sampling
