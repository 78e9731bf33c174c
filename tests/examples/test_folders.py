"""Every example prints the output of its README, and takes a model."""

from __future__ import annotations

import importlib.util
import platform
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

import weft
from tools import outputs
from weft import Branch, load, samples
from weft.constraints import Choice

ROOT = Path(__file__).parents[2] / "examples"
FOLDERS = sorted(folder.name for folder in ROOT.iterdir() if (folder / "main.py").is_file())
# On an engine of `make test-engines`.
OPTIONAL = {"mlx": pytest.mark.mlx}
RUN = [pytest.param(f, marks=OPTIONAL.get(f, ())) for f in FOLDERS]
NEEDS = {"mlx": "mlx_lm"}
MODEL_FOLDERS = {"engine", "mlx"}  # their models have a format of their own


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / name / "main.py")
    assert spec is not None
    assert spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = loaded  # dataclasses look there
    sys.path.insert(0, str(ROOT / name))  # as Python does for a script
    try:
        spec.loader.exec_module(loaded)
    finally:
        sys.path.remove(str(ROOT / name))
    return loaded


@pytest.mark.programs
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="texts of x86-64")
@pytest.mark.parametrize("name", RUN)
def test_example_prints_the_output_of_its_readme(name: str, tmp_path: Path) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name], reason=f"{NEEDS[name]} is not installed")
    place = outputs.Place(ROOT.parent, tmp_path, Path(sys.executable).parent)
    page = (ROOT / name / "README.md").read_text("utf-8")
    (result,) = outputs.outputs(page, place)
    shown, now = map(outputs.without_times, (result.shown, result.now))
    assert shown == now, f"run `python -m tools.outputs examples/{name}/README.md`"


@pytest.mark.parametrize("name", sorted(set(FOLDERS) - MODEL_FOLDERS))
def test_example_loads_the_model_that_it_is_given(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stop at the load: no example runs further than that here."""

    class Loaded(Exception):
        pass

    def load(model: str, **options: object) -> None:
        raise Loaded(model)

    example = module(name)
    monkeypatch.setattr(weft, "load", load)
    with pytest.raises(Loaded, match="^another$"):
        example.main("another")


@pytest.mark.parametrize("name", FOLDERS)
def test_example_is_short_and_explained(name: str) -> None:
    source = (ROOT / name / "main.py").read_text("utf-8")
    assert len(source.splitlines()) < 90
    assert '"--model"' in source
    readme = (ROOT / name / "README.md").read_text("utf-8")
    assert f"$ python examples/{name}/main.py\n" in readme


@pytest.mark.programs
def test_speculative_tokens_are_distributed_as_the_targets_own(tmp_path: Path) -> None:
    """Chi-square over the first token of 1,000 steps; a right program fails 1 in 10,000 times.

    The same with the draft's distribution in place of the target's must be rejected.
    """
    example = module("speculative")
    large = example.draft_model(tmp_path / "large", n_layers=3)
    small = example.draft_model(tmp_path / "small", n_layers=1)
    prompt = large.format_chat([{"role": "user", "content": samples.story}]).ids
    target, draft = Branch.create(large), Branch.create(small)
    for branch in (target, draft):
        branch.prefill(prompt[:-1])
    after = [branch.fork() for branch in (target, draft)]
    for branch in after:
        branch.prefill(prompt[-1:])
    truth, belief = map(example.probabilities, after)
    rng, n = np.random.default_rng(11), 1000
    example.N_DRAFT = 1
    counts = np.zeros(len(truth))
    for _ in range(n):
        checked, token, n_accepted = example.step(target, draft, prompt[-1], rng)
        counts[checked.tokens[-1] if n_accepted else token] += 1
    assert chi_square(counts, truth * n) < CRITICAL
    assert chi_square(counts, belief * n) > 10 * CRITICAL


@pytest.mark.programs
def test_particles_estimate_the_mass_that_the_grammar_leaves() -> None:
    """Against enumeration, with ends at different lengths, resampled after every token.

    600 particles: the standard error is about 7 %; off by 35 % once in a million runs.
    """
    example, lm = module("smc_json"), load("tiny")
    grammar = Choice(["fox", "fox lived", "otter"])
    root = Branch.create(lm, grammar=grammar, temperature=1.0, top_k=0, top_p=1.0, min_p=0, seed=4)
    root.prefill(lm.tokenize("Once upon a time there was an"))
    particles = example.smc(root, 600, np.random.default_rng(1), ess=1.01)
    assert len({particle.branch.text for particle in particles}) > 1
    assert all(particle.has_ended for particle in particles)
    assert np.exp(example.log_mean(particles)) == pytest.approx(mass(root), rel=0.35)


def mass(branch: Branch) -> float:
    """The probability that the model writes on to a legal end, by going every legal way."""
    raw = branch.logits.astype(np.float64)
    p = np.exp(raw - raw.max()) / np.exp(raw - raw.max()).sum()
    total = 0.0
    for token in np.flatnonzero(branch.legal()).tolist():
        if branch.lm.is_stop_token(token):
            total += p[token]
            continue
        with branch.fork() as child:
            child.commit(token)
            total += p[token] * mass(child)
    return float(total)


# Of 12 degrees of freedom at 1 in 10,000.
CRITICAL = 39.1


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    """Over the 12 likeliest tokens and all others together."""
    top = np.argsort(-expected)[:12]
    counted = np.append(counts[top], counts.sum() - counts[top].sum())
    due = np.append(expected[top], expected.sum() - expected[top].sum())
    return float(((counted - due) ** 2 / np.maximum(due, 1e-9)).sum())
