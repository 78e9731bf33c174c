"""`weft serve` as a process of its own, which tests kill, and a page of it."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx2 as httpx

import ports
from browsing import Desk, watched
from serving import Served
from shallow import TINY
from weft._core.tokens.tokenizer import Tokenizer

if TYPE_CHECKING:
    from playwright.sync_api import Browser


class Program:
    """A server process at one port and with one database; it can be killed and started again.

    model: "tiny", or the folder of another model.
    """

    def __init__(self, port: int, home: Path, model: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        options = ["--port", str(port), "--no-browser"]
        self._command = [sys.executable, "-m", "weft", "serve", model, *options]
        self._environment = {**os.environ, "WEFT_HOME": str(home)}
        self._database = home / "weft.db"
        self._stop_ids = Tokenizer.from_folder(TINY if model == "tiny" else Path(model)).stop_ids
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server and wait until its model is loaded."""
        self._process = subprocess.Popen(
            self._command, env=self._environment, stdout=subprocess.DEVNULL
        )
        while not self._is_ready():
            assert self._process.poll() is None, "the server has exited"
            time.sleep(0.1)

    def kill(self) -> None:
        """End the process as `kill -9` does; it saves nothing."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()

    def saved(self) -> dict[int, str]:
        """Return the texts of growing nodes that are in the database, by the node's number."""
        texts: dict[int, str] = {}
        with closing(sqlite3.connect(self._database)) as connection:
            pieces = connection.execute("SELECT number, text FROM pieces ORDER BY number, first")
            for number, text in pieces:
                texts[number] = texts.get(number, "") + json.loads(text)
        return texts

    def endless(self) -> dict[str, Any]:
        """Sampling that no end token ends."""
        return {"max_tokens": 1500, "logit_bias": {str(token): -1e6 for token in self._stop_ids}}

    def _is_ready(self) -> bool:
        try:
            return bool(urllib.request.urlopen(f"{self.url}/readyz", timeout=2).status == 200)
        except OSError:
            return False


@contextmanager
def running(browser: Browser, home: Path, model: str = "tiny") -> Iterator[tuple[Desk, Program]]:
    """Run a server and a page of it until the end of the block."""
    with ports.reserved() as port:
        program = Program(port, home, model)
        with (
            watched(browser, program.url) as (page, watch),
            httpx.Client(base_url=program.url, timeout=None) as client,
        ):
            watch.allow("net::ERR|status of 5")
            try:
                program.start()
                yield Desk(Served(program.url, client, None, None), page, watch), program  # type: ignore[arg-type]
            finally:
                program.kill()
