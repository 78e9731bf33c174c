"""Scores of a real model's candidates, against its logits from Transformers."""

from __future__ import annotations

from typing import Any

import pytest

from models.conftest import Load

PROMPT = "The capital of Italy is the city of "
CITIES = ["Rome.", "Paris, in France.", "Seven"]


@pytest.mark.parametrize("name", ["smollm2-torch", "smollm2-numpy"])
def test_scores_equal_those_of_transformers(
    name: str, load_real: Load, transformers_model: Any, transformers_tokenizer: Any
) -> None:
    import torch

    lm = load_real(name)
    n_before = len(transformers_tokenizer.encode(PROMPT.rstrip()))
    scores = lm.score(PROMPT, CITIES, template=False)
    for city, score in zip(CITIES, scores, strict=True):
        ids = transformers_tokenizer.encode(PROMPT + city)
        assert list(score.tokens) == ids[n_before:]
        with torch.inference_mode():
            rows = transformers_model(torch.tensor([ids])).logits[0].log_softmax(-1)
        positions = range(n_before - 1, len(ids) - 1)
        expected = [float(rows[at, ids[at + 1]]) for at in positions]
        assert score.logprobs == pytest.approx(expected, abs=1e-4)
        is_greedy = all(int(rows[at].argmax()) == ids[at + 1] for at in positions)
        assert score.is_greedy == is_greedy


@pytest.mark.parametrize(
    "method",
    [
        "token_length_normalized",
        "greedy_token_selection",
        "unconditional_likelihood_normalized",
        "likelihood",
    ],
)
def test_every_method_chooses_the_capital(method: Any, load_real: Load) -> None:
    lm = load_real("smollm2-torch")
    cities = ["Rome", "Paris", "Berlin"]
    choice = lm.choose(PROMPT, cities, method=method, template=False)
    assert choice.text == "Rome"
