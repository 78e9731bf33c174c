"""Notebook displays of branches while they are generated: one output, redrawn in place.

Outside IPython there is no display. IPython is imported only if it is already running.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .color_scale import PROBABILITY
from .lanes import Lane, hidden_lanes
from .notebook import LONGEST, SOFT
from .outline import NOTHING, counted
from .terminal import as_html, cut, one_line
from .tokens import probability

if TYPE_CHECKING:
    from .._core.sched.work import FinishReason
    from ..loom.grow import GrowthDisplay

_log = logging.getLogger(__name__)

# At most ten times a second, to avoid flicker and load on the connection.
REDRAW_S = 0.1
_TAIL = 240
_MAX_LANES = 16
_LANE = "display:flex;gap:.9em;margin:0 0 .45em;line-height:1.55"
_NUMBER = f"flex:none;width:1.8em;text-align:right;{SOFT}"
_TEXT = "flex:1;min-width:0;white-space:pre-wrap;overflow-wrap:anywhere"


def growth_display(n: int) -> GrowthDisplay | None:
    """Return a notebook display for `n` branches; None outside IPython's main thread."""
    shell = _running_ipython()
    if shell is None or not n or threading.current_thread() is not threading.main_thread():
        return None
    # A kernel has a front end that displays HTML; IPython in a terminal has none.
    return LiveLanes(n) if getattr(shell, "kernel", None) is not None else LiveLines(n)


def _running_ipython() -> Any:
    """Return the running IPython shell, or None outside IPython."""
    ipython = sys.modules.get("IPython")
    return None if ipython is None else ipython.get_ipython()


class LiveLanes:
    """A notebook output with all branches of a call, redrawn while the model generates.

    Call `open`, then `push` for each step, then `close`. The last drawing stays in the notebook.

    n: number of branches.
    """

    def __init__(self, n: int) -> None:
        self.lanes = [Lane(number) for number in range(n)]
        self.is_over = False
        self._start = self._drawn_at = time.monotonic()
        self._handle: Any = None

    def open(self) -> None:
        """Create the notebook output and draw the empty lanes in it."""
        self._call_safely(self._create_output)

    def push(
        self, branch: int, pieces: list[tuple[str, float | None]], ended: FinishReason | None
    ) -> None:
        """Append new tokens of a branch, and redraw at most ten times a second.

        Args:
            branch: index of the branch in the call.
            pieces: (text, logprob) of each token; the logprob is None if it is not reported.
            ended: the finish reason; None while the model generates.
        """
        lane = self.lanes[branch]
        lane.push(pieces, ended)
        if time.monotonic() - self._drawn_at >= REDRAW_S:
            self._call_safely(self._draw)

    def close(self) -> None:
        """Draw the final state, which stays in the notebook."""
        self.is_over = True
        # The rate limit applies to the last drawing too.
        time.sleep(max(0.0, self._drawn_at + REDRAW_S - time.monotonic()))
        self._call_safely(self._draw)

    def _create_output(self) -> None:
        """Create the notebook output that `_draw` updates."""
        from IPython.display import display

        self._handle = display(self, display_id=True)

    def _draw(self) -> None:
        """Redraw the notebook output."""
        if self._handle is not None:
            self._drawn_at = time.monotonic()
            self._handle.update(self)

    def _call_safely(self, draw: Any) -> None:
        """Call a drawing function; log its errors, so that generation continues."""
        try:
            draw()
        except Exception as error:
            _log.warning("the notebook's display failed (%s); growth continues without it", error)
            self._handle = None

    def _status_line(self) -> str:
        """Return the last line: numbers of branches, ended branches and tokens, and the time."""
        n_tokens = sum(len(lane.pieces) for lane in self.lanes)
        n_ended = sum(lane.ended is not None for lane in self.lanes)
        parts = [counted(len(self.lanes), "branch", "branches"), counted(n_tokens, "token")]
        if not self.is_over:
            parts.insert(1, f"{n_ended} ended")
        elif n_ended < len(self.lanes):
            parts.insert(1, "stopped; its tokens are in the tree")
        return " · ".join([*parts, f"{time.monotonic() - self._start:.1f} s"])

    def __repr__(self) -> str:
        lines = [_lane_text(lane) for lane in self.lanes[:_MAX_LANES]]
        return "\n".join([*lines, *self._hidden_lines(), self._status_line()])

    def _repr_html_(self) -> str:
        shown = "".join(_lane_html(lane, is_over=self.is_over) for lane in self.lanes[:_MAX_LANES])
        rest = "".join(f'<div style="{SOFT}">{line}</div>' for line in self._hidden_lines())
        return (
            f'<div style="max-width:60em">{shown}{rest}'
            f'<div style="{SOFT}">{as_html(self._status_line())}</div></div>'
        )

    def _hidden_lines(self) -> list[str]:
        """Return a line that counts the branches without room, in a list; [] if all fit."""
        rest = self.lanes[_MAX_LANES:]
        return [hidden_lanes(rest)] if rest else []


class LiveLines:
    """A display for IPython in a terminal: one line per branch, written when the branch has ended.

    n: number of branches.
    """

    def __init__(self, n: int) -> None:
        self.lanes = [Lane(number) for number in range(n)]

    def open(self) -> None:
        """Do nothing."""

    def push(
        self, branch: int, pieces: list[tuple[str, float | None]], ended: FinishReason | None
    ) -> None:
        """Append new tokens of a branch, and write its line if it has ended.

        The arguments are those of `LiveLanes.push`.
        """
        lane = self.lanes[branch]
        lane.push(pieces, ended)
        if ended is not None:
            self._write(lane)

    def close(self) -> None:
        """Write the lines of branches that were stopped before their end."""
        for lane in self.lanes:
            if lane.ended is None and lane.pieces:
                self._write(lane)

    def _write(self, lane: Lane) -> None:
        sys.stdout.write(f"{_lane_text(lane)}\n")
        sys.stdout.flush()


def _lane_text(lane: Lane) -> str:
    """Return a lane as one line of plain text: number, shortened text, status."""
    text = cut(one_line(lane.text), LONGEST) or (NOTHING if lane.ended else "…")
    return f"[{lane.number}] {text}  {_lane_status(lane)}"


def _lane_html(lane: Lane, *, is_over: bool) -> str:
    """Return a lane as HTML: number, colored tokens, status.

    is_over: show the beginning of a long text instead of its end.
    """
    pieces = list(_first_pieces(lane) if is_over else _last_pieces(lane))
    if pieces:
        pieces[-1] = (pieces[-1][0].rstrip("\n"), pieces[-1][1])
    body = "".join(map(_piece_html, pieces))
    if not body:
        body = f'<span style="{SOFT}">{NOTHING if lane.ended else "…"}</span>'
    return (
        f'<div style="{_LANE}"><span style="{_NUMBER}">{lane.number}</span>'
        f'<span style="{_TEXT}" dir="auto">{body}  '
        f'<span style="{SOFT}">{_lane_status(lane)}</span></span></div>'
    )


def _lane_status(lane: Lane) -> str:
    """Return the number of tokens and the finish reason, such as "12 tok · stop"."""
    state = f"{len(lane.pieces)} tok"
    return state if lane.ended is None else f"{state} · {lane.ended}"


def _last_pieces(lane: Lane) -> Iterable[tuple[str, float | None]]:
    """Return the last pieces of a branch that fit in its lane, as (text, logprob)."""
    room = _TAIL
    for at in range(len(lane.pieces) - 1, -1, -1):
        room -= len(lane.pieces[at][0])
        if room < 0:
            return [("…", None), *lane.pieces[at + 1 :]]
    return lane.pieces


def _first_pieces(lane: Lane) -> Iterable[tuple[str, float | None]]:
    """Return the first pieces of a branch that fit in its lane, as (text, logprob)."""
    room = LONGEST
    for at, (text, _) in enumerate(lane.pieces):
        room -= len(text)
        if room < 0:
            return [*lane.pieces[:at], ("…", None)]
    return lane.pieces


def _piece_html(piece: tuple[str, float | None]) -> str:
    """Return a piece, (text, logprob), as HTML colored by its probability."""
    text, logprob = piece
    style = "" if logprob is None else PROBABILITY.inline_css(probability(logprob))
    return f'<span style="{style}">{as_html(text)}</span>' if style else as_html(text)
