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


def test_forked_process_computes_with_one_thread() -> None:
    """PyTorch waits for ever there for threads that did not come along."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKING],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


FORKING_INSIDE = """
import os, signal
import torch
from families import build
from weft.engines.base import Row
from weft.engines.torch import TorchEngine

torch.set_num_threads(2)
engine = TorchEngine.adopt(build("llama"))
children = []
for layer in engine.model.model.layers[:1]:
    layer.register_forward_hook(lambda *_: children.append(os.fork()))
rows = [Row((), [1, 2, 3], 0, None, (2,)), Row((), [4, 5], 0, None, (1,))]
engine._threads._auto.choice(5, 2).index = 1 if MANY else 0  # the threads of the forward
engine.forward(rows)
if not children[0]:
    signal.alarm(30)
    torch.exp(torch.rand(4000, 1000)) @ torch.rand(1000, 1000)
    os._exit(torch.get_num_threads())
assert os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]) == 1
assert torch.get_num_threads() == 2
"""


@pytest.mark.parametrize("many", [True, False])
def test_fork_inside_a_forward_computes_with_one_thread(*, many: bool) -> None:
    """The forward may have all threads or fewer: its end gives the child none back."""
    kept = {name: each for name, each in os.environ.items() if "NUM_THREADS" not in name}
    kept["PYTHONPATH"] = os.pathsep.join(sys.path)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORKING_INSIDE.replace("MANY", str(many))],
        capture_output=True, text=True, check=False, env=kept,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
