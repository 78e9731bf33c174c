"""Sequential Monte Carlo to JSON: particles under a grammar, weighed by what it cost them."""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass

import numpy as np

import weft
from weft import Branch, BranchStore, samples

N = 12
FIELDS = {
    "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,9}$"},
    "animal": {"enum": ["fox", "otter", "owl", "bear"]},
    "age": {"type": "integer", "minimum": 1, "maximum": 12},
}
CLOSED = {"required": list(FIELDS), "additionalProperties": False}
SCHEMA = {"type": "object", "properties": FIELDS, **CLOSED}


@dataclass
class Particle:
    """A branch, the log of its weight, and whether it drew an end token: then it only weighs."""

    branch: Branch
    log_weight: float = 0.0
    has_ended: bool = False


def legal_mass(branch: Branch) -> float:
    """log of the probability that the model itself gives to what the grammar allows next."""
    raw = branch.logits.astype(np.float64)
    return float(np.logaddexp.reduce(raw[branch.legal()]) - np.logaddexp.reduce(raw))


def log_mean(particles: list[Particle]) -> float:
    """log of the mean weight; at the end the evidence, how likely the model is to write JSON."""
    return float(np.logaddexp.reduce([p.log_weight for p in particles]) - np.log(len(particles)))


def effective(particles: list[Particle]) -> float:
    """The effective number of particles: n if all weigh the same, 1 if one weighs all."""
    weights = np.exp([p.log_weight - log_mean(particles) for p in particles])
    return float(weights.sum() ** 2 / (weights**2).sum())


def resample(particles: list[Particle], rng: np.random.Generator) -> list[Particle]:
    """Heavy particles are forked, light ones let go; a copy of one that has ended has ended too."""
    mean, n = log_mean(particles), len(particles)
    edges = np.cumsum([np.exp(p.log_weight - mean) / n for p in particles])
    at = np.searchsorted(edges, (rng.random() + np.arange(n)) / n).clip(max=n - 1)
    return [Particle(p.branch.fork(), mean, p.has_ended) for p in map(particles.__getitem__, at)]


def smc(root: Branch, n: int, rng: np.random.Generator, ess: float = 0.5) -> list[Particle]:
    """Grow n particles to their ends, one batch a token, resampling where weights are uneven."""
    store, particles = BranchStore(root.lm), [Particle(root.fork()) for _ in range(n)]
    while going := [p for p in particles if not p.has_ended]:
        for p in going:
            p.log_weight += legal_mass(p.branch)
        pieces = store.produce([p.branch for p in going])
        for p, piece in zip(going, pieces, strict=True):
            p.has_ended = piece.is_stop
        drawn = zip(going, pieces, strict=True)
        store.commit([(p.branch, piece.token) for p, piece in drawn if not p.has_ended])
        if effective(particles) < ess * n:
            particles = resample(particles, rng)
    return particles


def main(model: str = "tiny") -> None:
    lm = weft.load(model)
    root = Branch.create(lm, grammar=SCHEMA, temperature=1.0, top_k=0, top_p=1.0, min_p=0, seed=2)
    root.prefill(weft.Loom(lm, samples.record).tokens)
    for name, ess in (("not resampled", 0.0), ("resampled", 0.5)):
        particles = smc(root.fork(), N, np.random.default_rng(0), ess)
        best = max(particles, key=lambda p: p.log_weight).branch.text
        size = f"effective sample size {effective(particles):.1f} of {N}"
        print(f"{name}: {size}; heaviest particle {json.loads(best)}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny", help="a name, folder or file for weft.load")
    main(parser.parse_args().model)
