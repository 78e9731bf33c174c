"""Open pages in the browser, if a user sits at this machine."""

from __future__ import annotations

import os
import sys
import threading
import webbrowser
from collections.abc import Mapping

# Set by CI services.
_UNATTENDED = ("CI", "BUILD_ID", "TF_BUILD")
# Set in SSH sessions: a browser would open on the wrong machine.
_REMOTE = ("SSH_CONNECTION", "SSH_CLIENT", "SSH_TTY")
_DISPLAYS = ("DISPLAY", "WAYLAND_DISPLAY")


def has_screen(
    environment: Mapping[str, str] | None = None,
    *,
    is_terminal: bool | None = None,
    platform: str = sys.platform,
) -> bool:
    """Return True if a user sits at this machine: a terminal, a display, no SSH and no CI.

    Args:
        environment: environment variables; None takes those of this process.
        is_terminal: stdin and stderr are a terminal; None examines those of this process.
        platform: the platform, as `sys.platform` names it.
    """
    variables = os.environ if environment is None else environment
    if is_terminal is None:
        is_terminal = sys.stdin.isatty() and sys.stderr.isatty()
    if not is_terminal or any(variables.get(name) for name in (*_UNATTENDED, *_REMOTE)):
        return False
    if platform in ("darwin", "win32"):
        return True
    return any(variables.get(name) for name in _DISPLAYS)


def show(url: str, *, wait_s: float = 0.0) -> None:
    """Open a page in the browser, in another thread. Errors are ignored.

    wait_s: maximum seconds to wait for that thread. The program that it starts may run until the
    browser exits.
    """
    thread = threading.Thread(target=_open, args=(url,), daemon=True)
    thread.start()
    thread.join(wait_s)


def _open(url: str) -> None:
    """Open a page; errors are ignored."""
    try:
        webbrowser.open(url)
    except webbrowser.Error:  # the caller has printed the address
        pass
