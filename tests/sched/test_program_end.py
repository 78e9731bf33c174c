"""A program that ends while the LM's thread steps: it ends as it was told to."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.programs]

CANCELLED = """
import asyncio, sys, weft
model = weft.AsyncLM(weft.load("tiny", engine="torch"))
paths = [[i] * 60 for i in range(20, 40)]
async def main():
    try:
        await asyncio.wait_for(model.batch_next_token_logprobs(paths), 0.05)
    except TimeoutError:
        sys.exit(3)
asyncio.run(main())
"""
LATER = """
import atexit
late = lambda: print(bool(weft.Loom(lm, "Once").grow(max_tokens=3, show=False)[0].text))
atexit.register(late)  # before weft's own: it runs after that
import asyncio, weft
lm = weft.load("tiny", engine="torch")
asyncio.run(weft.AsyncLM(lm).next_token_logprobs([5, 6]))
"""


def ran(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120
    )


def test_a_step_under_way_is_ended_first() -> None:
    for _ in range(3):
        done = ran(CANCELLED)
        assert (done.returncode, done.stderr) == (3, "")


def test_an_lm_still_answers_after_its_thread_has_ended() -> None:
    done = ran(LATER)
    assert (done.returncode, done.stdout.strip()) == (0, "True"), done.stderr
