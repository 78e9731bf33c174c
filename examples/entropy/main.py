"""Entropy as a control signal: cooler where the model is unsure, as in EDT sampling."""

from __future__ import annotations

import weft
from weft import Branch, samples

T0, BASE, THETA = 1.0, 0.8, 1.5


def temperature(entropy: float) -> float:
    return max(T0 * BASE ** (THETA / max(entropy, 0.1)), 0.01)


def decode(lm: weft.LM, text: str, *, dynamic: bool) -> tuple[Branch, list[float]]:
    prompt = lm.format_chat([{"role": "user", "content": text}])
    branch = Branch.create(lm, temperature=0.7, top_p=0.9, seed=5)
    branch.prefill(lm.tokenize(prompt, special=True, add_bos=False))
    entropies = []
    for _ in range(50):
        entropies.append(branch.model_entropy())
        if dynamic:
            # The random stream and the penalty counts go on: only the temperature changes.
            branch.set_sampler_params(temperature=temperature(entropies[-1]))
        piece = branch.produce()
        if piece.is_stop:
            break
        branch.commit(piece.token)
    return branch, entropies


def main() -> None:
    lm = weft.load("tiny")
    for text in (samples.story, samples.record):
        for dynamic in (False, True):
            branch, entropies = decode(lm, text, dynamic=dynamic)
            name = "by entropy" if dynamic else "fixed 0.7 "
            mean = sum(entropies) / len(entropies)
            print(
                f"{name}  entropy {mean:.2f}  perplexity {branch.perplexity:.2f}  {branch.text!r}"
            )


if __name__ == "__main__":
    main()
