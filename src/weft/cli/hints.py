"""Suggestions of commands to run next."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .. import samples
from ..viz.terminal import TerminalWriter
from .model import TINY

if TYPE_CHECKING:
    from ..loom import Heddle
    from .session import LoomSession

_MAX_PROMPT = 60  # characters; a longer prompt is not repeated in a suggestion


def next_line(out: TerminalWriter, *commands: Sequence[str]) -> None:
    """Write suggested commands to `out`, one a line after "next:".

    commands: each is a list of arguments, such as ["weft", "tree"].
    """
    for number, command in enumerate(commands):
        typed = " ".join(map(quoted, command))
        out.line(("      " if number else "next: ", "bold"), (typed, "cyan"))


def suggest(*commands: Sequence[str]) -> None:
    """Write suggested commands to stderr. Each is a list of arguments, such as ["weft", "ls"]."""
    next_line(TerminalWriter.for_stream(sys.stderr), *commands)


def quoted(argument: str) -> str:
    """Quote an argument for a shell, if necessary.

    Double quotes are used where every shell accepts them, single quotes elsewhere.
    """
    safe = shlex.quote(argument)
    return safe if safe == argument or set(argument) & set('"$`\\!%') else f'"{argument}"'


def after_growth(session: LoomSession, branches: Sequence[Heddle]) -> None:
    """Suggest commands after growing branches of a saved loom."""
    numbers = session.numbers()
    if not branches:
        suggest(["weft", "tree"])
        return
    at = session.at if any(node is session.at for node in branches) else branches[0]
    number = str(numbers[at.id])
    unfinished = next((node for node in branches if not node.terminal), None)
    if unfinished is not None and session.model_handle.continues:
        grow = ["weft", "grow", str(numbers[unfinished.id]), "-n", "4"]
    else:
        # No branch can be continued: suggest growing more siblings.
        parent = at.parent or session.loom
        grow = ["weft", "grow", str(numbers[parent.id]), "-n", "4"]
    ask = [["weft", "next", number]] if session.model_handle.has_next else []
    suggest(grow, ["weft", "read", number], *ask)


def after_unsaved(session: LoomSession) -> None:
    """Suggest commands for a loom that is not saved, with the same model and prompt."""
    from ..search import Game24

    loom = session.loom
    same = model_flags(session.model)
    if session.model != TINY:
        if not can_repeat(loom.user_prompt):
            suggest(*for_model(session.model))
            return
        raw = ["--raw"] if not loom.chat_template_used and session.model_handle.has_template else []
        solve = [] if raw else [["weft", "solve", loom.user_prompt, *same]]
        suggest(["weft", "run", loom.user_prompt, "-n", "8", *raw, *same], *solve)
        return
    prompt = loom.user_prompt if can_repeat(loom.user_prompt) else samples.story
    if not loom.chat_template_used and session.model_handle.has_template:
        same.append("--raw")
    puzzle = prompt if Game24.read(prompt) is not None else samples.game24
    suggest(
        ["weft", "run", prompt, "-n", "8", "--temperature", "1.2", *same],
        ["weft", "solve", puzzle],
    )


def for_model(model: str) -> list[list[str]]:
    """Return commands that start a new loom or chat with the model."""
    if model == TINY:
        return [["weft", "run", samples.story, "-n", "4"]]
    return [["weft", "chat", *model_flags(model)]]


def can_repeat(prompt: str) -> bool:
    """Return True if a suggested command can contain this prompt: it is short and printable."""
    return len(prompt) <= _MAX_PROMPT and TerminalWriter.for_stream(sys.stderr).is_as_typed(prompt)


def model_flags(model: str) -> list[str]:
    """Return the flags that select this model; [] for the embedded one, the default."""
    return [] if model == TINY else ["-m", model]


def warn_if_poor(model: str, branches: Sequence[Heddle]) -> None:
    """Warn on stderr if all branches are empty or equal, and suggest other options.

    model: the model as -m takes it.
    """
    texts = {node.text for node in branches}
    if len(texts) > 1 or (len(branches) == 1 and texts != {""}):
        return
    if texts and texts != {""}:
        problem, page = "all branches are equal", "docs/troubleshooting.md#all-branches-are-equal"
    else:
        problem, page = "the model wrote nothing", "docs/troubleshooting.md#nonsense-output"
    params = branches[0].params if branches else None
    if params is not None and params.temperature == 0 and texts != {""}:
        TerminalWriter.for_stream(sys.stderr).line(
            (f"{problem}: --temperature 0 takes the likeliest token", "yellow")
        )
        return
    todo = "try --temperature 1, or another prompt"
    if model == TINY:
        problem += "; tiny is a small demo model"
        todo = f'try --temperature 1.5, or a prompt that suits it: weft run "{samples.story}" -n 4'
    TerminalWriter.for_stream(sys.stderr).line((f"{problem}: {todo} ({page})", "yellow"))
