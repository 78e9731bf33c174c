"""A program that ends while the LM's thread steps exits cleanly."""

from __future__ import annotations

import signal
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

CONSTRAINED = """
import atexit, logging, sys, threading
logging.basicConfig()  # log messages reach stderr
import weft
from weft.constraints import Regex
lm = weft.load("tiny", engine=sys.argv[1])
loom, streaming = weft.Loom(lm, "Once"), threading.Event()
def last():
    streaming.clear()
    print(streaming.wait())  # the thread keeps running
    some = loom.grow(n=2, max_tokens=9, seed=1, constraint=Regex("[a-z ]{3,9}"), show=False)
    print(all(node.text.strip().islower() for node in some))
atexit.register(last)
def grow():
    for event in loom.stream(n=2, max_tokens=900, constraint=Regex("[a-z ]{900,1000}")):
        streaming.set()
threading.Thread(target=grow, daemon=True).start()
streaming.wait()
"""

INLINE = """
import atexit, sys, threading
late = lambda: print(bool(weft.Loom(lm, "Once").grow(max_tokens=3, show=False)[0].text))
atexit.register(late)  # before weft's own: it runs after that
import weft
lm = weft.load("tiny", engine=sys.argv[1])
loom, begun = weft.Loom(lm, "Once upon a time"), threading.Event()
def grow():
    for event in loom.stream(n=8, max_tokens=900, temperature=1.0):
        begun.set()
threading.Thread(target=grow, daemon=True).start()
begun.wait()
print(not [each for each in threading.enumerate() if each.name.startswith("weft")])
"""

INTERRUPTED = """
import atexit, os, signal, threading
import torch, weft
lm = weft.load("tiny", engine="torch")
forward, large, begun = lm.engine.forward, torch.ones(3000, 3000), threading.Event()
def slow(rows):
    begun.set()
    large @ large
    return forward(rows)
lm.engine.forward = slow
loom = weft.Loom(lm, "Once upon a time")
threading.Thread(target=lambda: loom.grow(max_tokens=900, show=False), daemon=True).start()
begun.wait()
def interrupt():
    for _ in range(3):
        os.kill(os.getpid(), signal.SIGINT)
# Before weft's own has begun: from there on it waits for the step.
atexit.register(lambda: threading.Timer(0.1, interrupt).start())
"""


def ran(program: str, *given: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program, *given], capture_output=True, text=True)


def test_running_step_ends_before_the_program_exits() -> None:
    for _ in range(3):
        done = ran(CANCELLED)
        assert (done.returncode, done.stderr) == (3, "")


def test_lm_still_answers_after_its_thread_has_ended() -> None:
    done = ran(LATER)
    assert (done.returncode, done.stdout.strip()) == (0, "True"), done.stderr


@pytest.mark.parametrize("engine", ["numpy", "torch"])
def test_constrained_generation_continues_while_the_program_ends(engine: str) -> None:
    """Python's executors take no more work by then; masks are filled without."""
    pytest.importorskip("llguidance")
    done = ran(CONSTRAINED, engine)
    assert (done.returncode, done.stdout.split()) == (0, ["True", "True"]), done.stderr
    assert done.stderr == ""


@pytest.mark.parametrize("engine", ["numpy", "torch"])
def test_step_of_a_daemon_thread_ends_before_the_program_exits(engine: str) -> None:
    """The LM has no thread of its own there; what the program does last is answered."""
    for _ in range(3):
        done = ran(INLINE, engine)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.split() == ["True", "True"]


def test_ctrl_c_at_program_exit_waits_for_the_step_too() -> None:
    """It ended the wait, and the thread died within PyTorch, which aborts the process."""
    done = ran(INTERRUPTED)
    assert done.returncode in (0, 130, -signal.SIGINT), (done.returncode, done.stderr)
    assert "terminate called" not in done.stderr
    assert "KeyboardInterrupt" in done.stderr  # it came
