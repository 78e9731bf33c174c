"""`-i`: one stays, and grows, reads and asks by keys, with the model and its KV at hand."""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from ..errors import WeftError
from . import advice, report
from .failures import tell
from .growing import Wish, grown
from .next import show_next
from .out import Out
from .read import show_path
from .turns import say

if TYPE_CHECKING:
    from ..lm import LM
    from .kept import Kept

_HELP = """\
  3            grow node 3             3 some text   say something to node 3, and grow
  r 3          read node 3             n 3           its next tokens
  t            draw the tree           q             quit
r and n alone mean the node last read or grown; 0 is the prompt."""


def converse(out: Out, lm: LM, kept: Kept, wish: Wish) -> None:
    """Read keys until q or the end of input; a mistake is told and the next key read."""
    while True:
        out.line()
        last = kept.numbering.next - 1
        keys = f"{'1-' if last > 1 else ''}{last} grow · r read · n next · q quit"
        line = ask(out, f"{keys} > ")
        if line is None or line in ("q", "quit", "exit"):
            return
        try:
            obey(out, lm, kept, wish, line)
        except WeftError as error:
            tell(error, "run")
        except KeyboardInterrupt:
            Out.of(sys.stderr).line("interrupted")


def obey(out: Out, lm: LM, kept: Kept, wish: Wish, line: str) -> None:
    """Do what one line says."""
    word, _, rest = line.strip().partition(" ")
    rest = rest.strip()
    if word.isdecimal():
        _grow(out, lm, kept, wish, word, rest)
    elif word in ("r", "read"):
        kept.at = kept.node(rest or None)
        show_path(out, kept, kept.at)
    elif word in ("n", "next"):
        kept.at = kept.node(rest or None)
        show_next(out, kept, kept.at, kept.at.next())
    elif word in ("t", "tree"):
        report.show_tree(out, kept)
    else:
        out.lines([out.text(row) for row in _HELP.splitlines()])
    if wish.keep and kept.name:
        kept.try_note()


def _grow(out: Out, lm: LM, kept: Kept, wish: Wish, number: str, text: str) -> None:
    node = kept.node(number)
    wish = wish.with_settings_of(node)
    if text:
        node = say(lm, node, text)
    # A seed that was given belongs to the first call: the same branches would come again.
    fresh = {name: value for name, value in wish.sampling.items() if name != "seed"}
    wish = Wish(wish.n, fresh, wish.tint, keep=wish.keep, force=wish.force)
    made, _ = grown(out, lm, kept, node, wish)
    is_kept = wish.keep and kept.try_save()
    report.show(out, lm, kept, made, wish.tint, is_kept=is_kept)
    advice.warn_if_poor(str(kept.loom.meta.get("model", "")), made)


def ask(out: Out, prompt: str) -> str | None:
    """Return a line that was typed, None at the end of input or on Ctrl-C."""
    with suppress(ImportError):
        import readline  # noqa: F401  (line editing and history, where the system has it)
    sys.stdout.flush()
    try:
        return input(out.shown(prompt)).strip()
    except (EOFError, KeyboardInterrupt):
        out.line()
        return None
