"""Engines by name, and the result that host engines share."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import weft.engines as registry
from weft._core.installation import install_hint
from weft._core.sampling.params import SamplingParams
from weft._core.sampling.sampler import BatchSampler, Sampler, draw_at, draw_rows
from weft.cli.engines import plugin_problems
from weft.engines.base import HostOutput, Output, RetainedRow
from weft.engines.stub import StubEngine
from weft.errors import ConfigError, EngineUnavailable


def offer(monkeypatch: pytest.MonkeyPatch, **targets: str) -> None:
    points = EntryPoints(
        EntryPoint(name, target, registry.ENTRY_POINT_GROUP) for name, target in targets.items()
    )
    monkeypatch.setattr(registry, "entry_points", lambda group: points.select(group=group))


def test_numpy_engine_has_a_name() -> None:
    assert registry.engine_class("numpy").__name__ == "NumpyEngine"


def test_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="'onnx'.*numpy, torch"):
        registry.engine_class("onnx")


def test_third_parties_add_engines_but_replace_none(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, mine="weft.engines.base:Engine", numpy="weft.engines.base:Engine")
    assert registry.engine_class("mine").__name__ == "Engine"
    assert registry.engine_class("numpy").__name__ == "NumpyEngine"
    names = registry.engine_names()
    assert (names[0], names[-1], names.count("numpy")) == ("numpy", "mine", 1)


def test_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_torch(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'transformers'", name="transformers")

    monkeypatch.setattr(registry, "import_module", without_torch)
    with pytest.raises(EngineUnavailable, match="transformers") as caught:
        registry.engine_class("torch")
    assert caught.value.hint == install_hint("torch")


def test_third_party_s_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, mine="no_such_package_here:Engine")
    with pytest.raises(EngineUnavailable, match="pip install no_such_package_here"):
        registry.engine_class("mine")


def test_fault_of_weft_itself_is_not_called_a_missing_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    offer(monkeypatch, mine="weft.no_such_module:Engine")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        registry.engine_class("mine")


@pytest.mark.parametrize(
    ("target", "why"),
    [
        ("json:Nothing", "AttributeError.*Nothing"),
        ("json:loads", "no class derived from"),
        ("json:JSONDecoder", "no class derived from"),
        ("antigravity_of_nobody", "antigravity_of_nobody"),
        ("broken_plugin:X", "RuntimeError: no device"),
    ],
)
def test_broken_plugin_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, target: str, why: str
) -> None:
    (tmp_path / "broken_plugin.py").write_text("raise RuntimeError('no device')")
    monkeypatch.syspath_prepend(tmp_path)
    offer(monkeypatch, mine=target)
    with pytest.raises(EngineUnavailable, match=why) as caught:
        registry.engine_class("mine")
    assert "'mine'" in str(caught.value)
    assert registry.plugins() == {"mine": target}
    assert plugin_problems() == {"mine": str(caught.value)}


def test_importing_the_registry_imports_no_engine() -> None:
    code = (
        "import sys, weft.engines; "
        "heavy = {'torch', 'transformers', 'weft.engines.numpy', 'weft.engines.torch'}; "
        "bad = heavy & set(sys.modules); "
        "sys.exit(str(bad) if bad else 0)"
    )
    paths = [str(path) for path in importlib.import_module("weft").__path__]
    result = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {paths[0]!r} + '/..'); {code}"],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr


class Bare(HostOutput):
    """An output that says nothing of its own about keeping."""

    retain = Output.retain


@pytest.mark.parametrize("kind", [HostOutput, Bare])
@pytest.mark.parametrize("indices", [[3], [0, 2], range(4)])
def test_retained_logits_are_the_requested_ones(
    kind: type[HostOutput], indices: Sequence[int]
) -> None:
    logits = np.arange(12, dtype=np.float32).reshape(4, 3)
    kept = kind(logits, []).retain(indices)
    for number, index in enumerate(indices):
        assert kept.logits(number).tolist() == logits[index].tolist()
        assert not np.shares_memory(kept.logits(number), logits)
    keeps_all = kind is HostOutput and len(indices) > 1
    assert kept.n_bytes == (4 if keeps_all else len(indices)) * 12


def test_engine_draws_from_kept_rows_of_any_output() -> None:
    engine = StubEngine(n_vocab=90)
    logits = np.random.default_rng(3).standard_normal((6, 90)).astype(np.float32)
    first, second = (
        HostOutput(logits[:4], []).retain([1, 3]),
        HostOutput(logits[4:], []).retain([0]),
    )
    rows = [RetainedRow(second, 0), RetainedRow(first, 1)]
    samplers = [Sampler(SamplingParams(), stream) for stream in range(5)]
    batch = draw_at(BatchSampler(samplers), [0, 1, 1, 0, 1], [9] * 5)
    got = engine.draw(rows, batch).result()
    expected = draw_rows([logits[i] for i in (4, 3, 3, 4, 3)], samplers, [9] * 5, kept=True)
    for name in ("ids", "logprobs", "entropies", "kept"):
        assert np.array_equal(getattr(got, name), getattr(expected, name)), name


def test_host_output_hands_out_copies_and_draws_at_once() -> None:
    logits = np.arange(6, dtype=np.float32).reshape(2, 3)
    output = HostOutput(logits, [[], []])
    output.logits(1)[:] = 0
    assert output.logits(1).tolist() == [3, 4, 5]
    observed: list[Any] = []
    batch: Any = SimpleNamespace(on_host=lambda given: observed.append(given) or "drawn")
    assert output.draw(batch).result() == "drawn"
    assert observed[0] is logits
    output.synchronize()
    assert output.scores() == [[], []]
