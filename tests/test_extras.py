"""What CI runs on every platform needs the extra `test` and no other."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
OTHERS = (
    "torch transformers mlx mlx_lm peft llama_cpp gguf vllm triton torchao accelerate "
    "fastapi fastapi_swagger uvicorn prometheus_client regex psycopg ray "
    "nbclient ipykernel IPython schemathesis openai playwright PIL llm lm_eval"
).split()
COLLECT = f"""
import sys, pytest
sys.modules.update(dict.fromkeys({OTHERS}))
sys.exit(pytest.main(["-p", "pytest_timeout", "-p", "no:cacheprovider", "-q", "--collect-only"]))
"""


@pytest.mark.programs
def test_all_tests_are_found_without_the_other_extras() -> None:
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-c", COLLECT]
    found = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr
