"""What to type next: commands that exist, for what is there."""

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

_LONG = 60  # a prompt above this is not repeated


def next_line(out: TerminalWriter, *commands: Sequence[str]) -> None:
    """Write commands to try next."""
    for number, command in enumerate(commands):
        typed = " ".join(map(quoted, command))
        out.line(("      " if number else "next: ", "bold"), (typed, "cyan"))


def suggest(*commands: Sequence[str]) -> None:
    """Write commands to try next where messages go."""
    next_line(TerminalWriter.for_stream(sys.stderr), *commands)


def quoted(argument: str) -> str:
    """Return an argument as one types it: in double quotes where every shell takes them."""
    safe = shlex.quote(argument)
    return safe if safe == argument or set(argument) & set('"$`\\!%') else f'"{argument}"'


def after_growth(session: LoomSession, made: Sequence[Heddle]) -> None:
    """Suggest how to go on from new branches of a kept loom."""
    numbers = session.numbers()
    if not made:
        suggest(["weft", "tree"])
        return
    at = session.at if any(node is session.at for node in made) else made[0]
    number = str(numbers[at.id])
    going = next((node for node in made if not node.terminal), None)
    if going is not None and session.model_handle.continues:
        grow = ["weft", "grow", str(numbers[going.id]), "-n", "4"]
    else:
        # None can go on: from where they began, others can be had.
        begin = at.parent or session.loom
        grow = ["weft", "grow", str(numbers[begin.id]), "-n", "4"]
    ask = [["weft", "next", number]] if session.model_handle.has_next else []
    suggest(grow, ["weft", "read", number], *ask)


def after_unkept(session: LoomSession) -> None:
    """Suggest how to go on where nothing is kept: the same model, asked in the same way."""
    from ..search import Game24

    loom = session.loom
    same = of_model(session.model)
    if session.model != TINY:
        if not can_repeat(loom.user_prompt):
            suggest(*for_model(session.model))
            return
        raw = ["--raw"] if not loom.chat_template_used and session.model_handle.has_template else []
        solve = [] if raw else [["weft", "solve", loom.user_prompt, *same]]
        suggest(["weft", "run", loom.user_prompt, "-n", "8", *raw, *same], *solve)
        return
    asked = loom.user_prompt if can_repeat(loom.user_prompt) else samples.story
    if not loom.chat_template_used and session.model_handle.has_template:
        same.append("--raw")
    puzzle = asked if Game24.read(asked) is not None else samples.game24
    suggest(
        ["weft", "run", asked, "-n", "8", "--temperature", "1.2", *same],
        ["weft", "solve", puzzle],
    )


def for_model(model: str) -> list[list[str]]:
    """Return a command that sends the model another prompt."""
    if model == TINY:
        return [["weft", "run", samples.story, "-n", "4"]]
    return [["weft", "chat", *of_model(model)]]


def can_repeat(prompt: str) -> bool:
    """Whether a prompt can be written in a command to copy."""
    return len(prompt) <= _LONG and TerminalWriter.for_stream(sys.stderr).is_as_typed(prompt)


def of_model(model: str) -> list[str]:
    """Return what makes a command ask this model again."""
    return [] if model == TINY else ["-m", model]


def warn_if_poor(model: str, branches: Sequence[Heddle]) -> None:
    """Say what to try when the branches are all empty or all equal."""
    texts = {node.text for node in branches}
    if len(texts) > 1 or (len(branches) == 1 and texts != {""}):
        return
    what = "all branches are equal" if texts and texts != {""} else "nothing came"
    params = branches[0].params if branches else None
    if params is not None and params.temperature == 0 and texts != {""}:
        TerminalWriter.for_stream(sys.stderr).line(
            (f"{what}: --temperature 0 takes the likeliest token", "yellow")
        )
        return
    todo = "try --temperature 1, or another prompt"
    if model == TINY:
        what += "; tiny is a small demo model"
        todo = f'try --temperature 1.5, or what it was made for: weft run "{samples.story}" -n 4'
    TerminalWriter.for_stream(sys.stderr).line((f"{what}: {todo}", "yellow"))
