"""The browser of who sits at this machine, where somebody does."""

from __future__ import annotations

import os
import sys
import threading
import webbrowser
from collections.abc import Mapping

# Set by services that run programs for nobody in particular.
_UNATTENDED = ("CI", "BUILD_ID", "TF_BUILD")
# A shell of another machine: a browser would open there where nobody sits.
_REMOTE = ("SSH_CONNECTION", "SSH_CLIENT", "SSH_TTY")
_DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY")


def has_screen(
    environment: Mapping[str, str] | None = None,
    *,
    is_terminal: bool | None = None,
    platform: str = sys.platform,
) -> bool:
    """Whether a person sits here: at a terminal, before a screen, and not from another machine.

    None: this process's own environment and streams.
    """
    given = os.environ if environment is None else environment
    if is_terminal is None:
        is_terminal = sys.stdin.isatty() and sys.stderr.isatty()
    if not is_terminal or any(given.get(name) for name in (*_UNATTENDED, *_REMOTE)):
        return False
    if platform in ("darwin", "win32"):
        return True
    return any(given.get(name) for name in _DISPLAYS)


def show(url: str, *, wait_s: float = 0.0) -> None:
    """Open a page in the browser.

    wait_s: how long the launcher may take at most; some return only when the browser is closed.
    """
    thread = threading.Thread(target=_open, args=(url,), daemon=True)
    thread.start()
    thread.join(wait_s)


def _open(url: str) -> None:
    try:
        webbrowser.open(url)
    except webbrowser.Error:  # its address was told
        pass
