"""The first notebook runs in a real kernel, shows what it promises, and is committed clean."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "first.ipynb"
# In a process of its own: kernels bring loops, sockets and warnings that are not ours.
EXECUTE = """
import sys, nbformat
from nbclient import NotebookClient
book = nbformat.read(sys.argv[1], 4)
NotebookClient(book, timeout=120, resources={"metadata": {"path": sys.argv[2]}}).execute()
nbformat.write(book, sys.argv[2] + "/out.ipynb")
"""
STOP = """
import sys
from jupyter_client.manager import start_new_kernel
manager, client = start_new_kernel()
client.execute_interactive("import weft; loom = weft.Loom(weft.load(), weft.samples.story)")
never_ends = "logit_bias={loom.lm.eog_token: -100}"
client.execute(f"loom.grow(n=3, max_tokens=1900, temperature=2.0, {never_ends})")
while client.get_iopub_msg(timeout=60)["msg_type"] != "update_display_data":
    pass  # until tokens are shown
manager.interrupt_kernel()
assert client.get_shell_msg(timeout=60)["content"]["ename"] == "KeyboardInterrupt"
outputs = []
while not "".join(outputs).strip():  # after an error a kernel drops requests for a moment
    answer = client.execute_interactive(
        "print([(c.finish_reason, len(c.tokens) > 0) for c in loom.children])",
        output_hook=lambda m: outputs.append(m["content"].get("text", "")),
    )
    assert answer["content"]["status"] in ("ok", "aborted"), answer
print("".join(outputs).strip().splitlines()[-1])
client.stop_channels()
manager.shutdown_kernel(now=True)
"""

needs_kernel = pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("nbclient", "ipykernel"))),
    reason="nbclient or ipykernel is not installed",
)


def run(program: str, *arguments: str) -> str:
    paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
        capture_output=True,
        encoding="utf-8",
        check=False,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def code(book: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in book["cells"] if cell["cell_type"] == "code"]


def test_committed_notebook_is_clean_and_uses_sample_prompts_only() -> None:
    book = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    for cell in code(book):
        assert cell["outputs"] == []
        assert cell["execution_count"] is None
    program = "".join(line for cell in code(book) for line in cell["source"])
    assert "Loom(lm, samples." in program
    assert 'Loom(lm, "' not in program


@pytest.mark.programs
@needs_kernel
def test_notebook_runs_and_shows_static_html_with_text(tmp_path: Path) -> None:
    run(EXECUTE, str(NOTEBOOK), str(tmp_path))
    book = json.loads((tmp_path / "out.ipynb").read_text(encoding="utf-8"))
    shown = [output for cell in code(book) for output in cell["outputs"]]
    assert not [output for output in shown if output["output_type"] == "error"]
    rich = [output["data"] for output in shown if "text/html" in output.get("data", {})]
    assert len(rich) == 7
    for data in rich:
        html = "".join(data["text/html"])
        assert "".join(data["text/plain"])
        assert "<script" not in html
        assert "<style" not in html
    live = [output for output in shown if output["output_type"] == "display_data"]
    assert len(live) == 1
    assert "4 branches" in "".join(live[0]["data"]["text/plain"])
    assert (tmp_path / "first.html").stat().st_size > 10_000
    assert (tmp_path / "first.loom.json").exists()


@pytest.mark.programs
@needs_kernel
@pytest.mark.skipif(sys.platform == "win32", reason="kernels are interrupted otherwise there")
def test_interrupting_the_kernel_keeps_partial_branches() -> None:
    assert run(STOP).strip() == str([("interrupted", True)] * 3)
