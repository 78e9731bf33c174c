"""Displays of branches while they are generated: redrawn lanes on a terminal, else plain lines."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Protocol

from rich.cells import cell_len
from rich.console import Group
from rich.live import Live
from rich.text import Text

from .outline import counted
from .terminal import TerminalWriter

if TYPE_CHECKING:
    from ..lm.results import Delta

_REDRAWS_PER_S = 10
_MAX_LINES = 6  # per lane
BETWEEN = "---"  # the line between texts without numbers


class DeltaDisplay(Protocol):
    """A display of branches while they are generated; it receives their deltas as they arrive.

    It is a context manager: entering starts the display, leaving ends it.
    """

    def __enter__(self) -> object: ...

    def __exit__(self, *_: object) -> None: ...

    def push(self, delta: Delta) -> None:
        """Show the new tokens of one branch."""
        ...


class Lane:
    """The text of one branch so far, for a display.

    Attributes:
        number: the branch's number, as displayed.
        pieces: (text, logprob) in order; the logprob is None if the engine does not report it.
        ended: the finish reason; None while the model generates.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.pieces: list[tuple[str, float | None]] = []
        self.ended: str | None = None

    @property
    def text(self) -> str:
        """The generated text so far."""
        return "".join(text for text, _ in self.pieces)

    def push(self, pieces: Sequence[tuple[str, float | None]], ended: str | None) -> None:
        """Append new pieces, (text, logprob), and set the finish reason (None: not finished)."""
        self.pieces += pieces
        self.ended = ended


def hidden_lanes(lanes: Sequence[Lane]) -> str:
    """Return a line that counts the branches for which a display has no room."""
    ended = sum(lane.ended is not None for lane in lanes)
    return f"… {counted(len(lanes), 'more branch', 'more branches')}, {ended} ended"


class Lanes:
    """A live display of all branches of a call on a terminal, redrawn in place.

    Leaving the context erases it.

    Args:
        out: the terminal.
        n: number of branches.
        waiting: returns the text to show until the first delta; None: no text.
        first: the number of the first branch.
    """

    def __init__(
        self,
        out: TerminalWriter,
        n: int,
        waiting: Callable[[], str] | None = None,
        *,
        first: int = 1,
    ) -> None:
        self.out = out
        self.lanes = [Lane(number) for number in range(first, first + n)]
        self.waiting = waiting
        self.n_tokens = 0
        self._began: float | None = None
        # Redrawn by a thread of its own, because no delta arrives while a long prompt runs.
        self._live = Live(
            console=out.console,
            refresh_per_second=_REDRAWS_PER_S,
            transient=True,
            get_renderable=self._render,
        )

    def __enter__(self) -> Lanes:
        self._live.start(refresh=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def push(self, delta: Delta) -> None:
        """Append the new tokens of one branch to its lane; the next refresh shows them."""
        if self._began is None:
            self._began = time.monotonic()
        self.n_tokens += len(delta.token_ids)
        self.lanes[delta.branch].push([(delta.text, sum(delta.logprobs))], delta.finish_reason)

    def _render(self) -> Group:
        """Return all lines of the display."""
        if self._began is None:
            return Group(self.out.text((self.waiting() if self.waiting else "", "dim")))
        return Group(
            *self._render_lanes(self.out.console.height - 2), self._progress_line(self._began)
        )

    def _progress_line(self, start_time: float) -> Text:
        """Return the last line: tokens so far, speed, and how many branches have ended.

        start_time: `time.monotonic()` at the first token.
        """
        ended = sum(lane.ended is not None for lane in self.lanes)
        rate = self.n_tokens / max(time.monotonic() - start_time, 0.1)
        facts = [counted(self.n_tokens, "token"), f"{rate:.0f} tok/s"]
        if len(self.lanes) > 1:
            facts.append(f"{ended} of {len(self.lanes)} ended")
        return self.out.text(("    " + " · ".join(facts) + " · Ctrl-C stops", "dim"))

    def _render_lanes(self, height: int) -> Iterator[Text]:
        """Yield the lines of all lanes that fit in `height` lines, and a count of the others."""
        lane_height = min(max(height // len(self.lanes), 1), _MAX_LINES)
        n_shown = len(self.lanes) if len(self.lanes) <= height else max(height - 1, 1)
        for lane in self.lanes[:n_shown]:
            yield from _last_lines(lane, self.out, lane_height)
        if n_shown < len(self.lanes):
            yield self.out.text((f"   {hidden_lanes(self.lanes[n_shown:])}", "dim"))


def _last_lines(lane: Lane, out: TerminalWriter, height: int) -> list[Text]:
    """Return the end of a branch's text, wrapped, in at most `height` lines."""
    mark = "✓" if lane.ended == "stop" else "-" if lane.ended else " "
    head = f"{lane.number:>2}{mark} "
    cut = "..." if out.is_ascii else "…"
    room = max(out.width - len(head) - 1, 8)
    shown = out.escape(lane.text).lstrip("\n")
    if height == 1:
        shown = shown.rstrip("\n").rpartition("\n")[2]
        rows = [shown if len(shown) <= room else cut + shown[len(cut) - room :]]
    else:
        tail = Text(shown[-room * height :])
        rows = [line.plain for line in tail.wrap(out.console, room)][-height:] or [""]
    style = "green" if lane.ended == "stop" else ""
    first = out.text((head, "cyan"), (rows[0], style))
    return [first, *(out.text(" " * len(head), (row, style)) for row in rows[1:])]


class Printer:
    """A display in plain lines, for pipes and files, where nothing can be redrawn.

    It writes the branches one after the other. The text of a branch waits until all branches with
    lower numbers have ended.

    Args:
        out: the output.
        n: number of branches.
        first: the number of the first branch. None: no numbers, and texts are separated by BETWEEN.
    """

    def __init__(self, out: TerminalWriter, n: int, *, first: int | None = 1) -> None:
        self.out = out
        self.lanes = [Lane(number) for number in range(first or 1, (first or 1) + n)]
        self.is_numbered = first is not None
        self._at = 0
        self._begun = False

    def __enter__(self) -> Printer:
        return self

    def __exit__(self, *_: object) -> None:
        if self._begun:
            self._end_branch()
        # After an interrupted stream: the partial texts of the other branches.
        for lane in self.lanes[self._at :]:
            if not self.is_numbered and lane.text:
                self._write_text(lane.text)
                self._end_branch()

    def push(self, delta: Delta) -> None:
        """Write the new text of the current branch, or store the text of a later branch."""
        self.lanes[delta.branch].push([(delta.text, sum(delta.logprobs))], delta.finish_reason)
        if delta.branch == self._at:
            self._write_text(delta.text)
            while self._at < len(self.lanes) and self.lanes[self._at].ended is not None:
                self._start_next_branch()

    def _start_next_branch(self) -> None:
        """End the current branch, and write the stored text of the next one."""
        if not self._begun:
            self._write_text("")
        self._end_branch()
        if self._at < len(self.lanes) and self.lanes[self._at].text:
            self._write_text(self.lanes[self._at].text)

    def _write_text(self, text: str) -> None:
        """Write text of the current branch, after its number if nothing was written yet."""
        if not self._begun:
            self._begun = True
            head = f"{BETWEEN}\n" if self._at else ""
            self.out.write(f"[{self.lanes[self._at].number}] " if self.is_numbered else head)
        self.out.write(text)

    def _end_branch(self) -> None:
        """End the line of the current branch, and make the next one current."""
        # A text that ends in a newline has ended its line.
        if not self.lanes[self._at].text.endswith("\n"):
            self.out.write("\n")
        self._at, self._begun = self._at + 1, False


class NullDisplay:
    """A display that shows nothing, as for `--json`."""

    def __enter__(self) -> NullDisplay:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def push(self, delta: Delta) -> None: ...


class TextDisplay(NullDisplay):
    """A display of one branch as plain text; on a terminal, it wraps lines between words."""

    def __init__(self, out: TerminalWriter) -> None:
        self.out = out
        self._word = ""
        self._column = 0

    def push(self, delta: Delta) -> None:
        """Write the new text. On a terminal, hold back the last word until it is complete."""
        if not self.out.is_live:
            self.out.write(delta.text)
            return
        *words, self._word = re.split(r"(?<=\s)", self._word + delta.text)
        for word in words:
            self._write_wrapped(word)

    def _write_wrapped(self, word: str) -> None:
        """Write one word with the space after it, on a new line if it does not fit."""
        width = cell_len(word.rstrip())
        if self._column and self._column + width > self.out.width:
            self.out.write("\n")
            self._column = 0
        self.out.write(word)
        self._column = 0 if word.endswith("\n") else self._column + cell_len(word)

    def __exit__(self, *_: object) -> None:
        self._write_wrapped(self._word)
        self.out.write("\n")


def show_stream(display: DeltaDisplay, deltas: Generator[Delta, None, object]) -> bool:
    """Run a stream of deltas to its end and pass them to a display.

    Returns True at the end of the stream, and False if Ctrl-C stopped it. The tokens generated
    until then are in the tree.
    """
    try:
        # Ctrl-C may arrive while a delta is drawn; closing the stream keeps its branches.
        with display, closing(deltas):
            for delta in deltas:
                display.push(delta)
    except KeyboardInterrupt:
        return False
    return True
