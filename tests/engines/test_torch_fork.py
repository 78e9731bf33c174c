"""A process that is forked from one that has a torch engine."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.torch,
    pytest.mark.programs,
    pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here"),
]

FORKING = """
import os, signal
import torch, weft

torch.set_num_threads(2)
lm = weft.load("tiny", engine="torch")


def texts(lm):
    loom = weft.Loom(lm, "Once upon a time")
    return [node.text for node in loom.grow(n=2, max_tokens=6, seed=1, show=False)]


here = texts(lm)
child = os.fork()
if not child:
    signal.alarm(60)
    assert texts(lm) == here
    assert texts(weft.load("tiny", engine="torch")) == here
    os._exit(torch.get_num_threads())
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
assert texts(lm) == here
assert torch.get_num_threads() == 2
"""


def test_it_goes_on_in_one_thread() -> None:
    """PyTorch waits for ever there for threads that did not come along."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKING],
        capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
