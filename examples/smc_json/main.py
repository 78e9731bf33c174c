"""Sequential Monte Carlo to JSON: particles under a grammar, weighed by what it cost them."""

from __future__ import annotations

import json

import numpy as np

import weft
from weft import Branch, BranchStore, samples

N, SCHEMA = 12, {
    "type": "object",
    "properties": {
        "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,9}$"},
        "animal": {"enum": ["fox", "otter", "owl", "bear"]},
        "age": {"type": "integer", "minimum": 1, "maximum": 12},
    },
    "required": ["name", "animal", "age"],
    "additionalProperties": False,
}  # fmt: skip


def legal_mass(branch: Branch) -> float:
    """log of the probability that the model itself gives to what the grammar allows next."""
    raw = branch.logits.astype(np.float64)
    weights = np.exp(raw - raw.max())
    return float(np.log(weights[branch.legal()].sum() / weights.sum()))


def resample(branches: list[Branch], logw: np.ndarray, rng: np.random.Generator) -> list[Branch]:
    """Systematic resampling: heavy particles are forked, light ones are let go."""
    shares = np.exp(logw - logw.max())
    edges = np.cumsum(shares / shares.sum())
    chosen = np.searchsorted(edges, (rng.random() + np.arange(len(branches))) / len(branches))
    return [branches[min(at, len(branches) - 1)].fork() for at in chosen]


def main() -> None:
    lm, rng = weft.load("tiny"), np.random.default_rng(0)
    store = BranchStore(lm)
    root = Branch.create(lm, grammar=SCHEMA, temperature=1.0, top_k=0, top_p=1.0, min_p=0, seed=2)
    prompt = weft.Loom(lm, samples.record).tokens
    root.prefill(prompt)
    particles, logw, n_resampled = [root.fork() for _ in range(N)], np.zeros(N), 0
    going = list(range(N))
    while going:
        logw[going] += [legal_mass(particles[at]) for at in going]
        pieces = store.produce([particles[at] for at in going])
        drawn = [(at, p) for at, p in zip(going, pieces, strict=True) if not p.is_stop]
        store.commit([(particles[at], piece.token) for at, piece in drawn])
        going = [at for at, _ in drawn]
        shares = np.exp(logw - logw.max())
        if going and shares.sum() ** 2 / (shares**2).sum() < N / 2:
            particles, n_resampled = resample(particles, logw, rng), n_resampled + 1
            logw[:] = np.log(np.exp(logw - logw.max()).mean()) + logw.max()
            going = list(range(N)) if len(going) == N else going
    best = particles[int(logw.argmax())]
    found = json.loads(best.text)
    print(f"{N} particles, resampled {n_resampled} times, {len({p.text for p in particles})} texts")
    print(f"log evidence {np.log(np.exp(logw - logw.max()).mean()) + logw.max():.3f}")
    print("best:", found)


if __name__ == "__main__":
    main()
