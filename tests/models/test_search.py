"""Searches of a real model: a judge as reward model, and checks of prefixes."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import pytest

from models.conftest import Load
from weft import search

PROMPT = "What is the capital of France?"
QUESTION = "Question: {prompt}\nAnswer: {text}\nIs the answer right? Answer Yes or No."


@pytest.mark.parametrize("name", ["smollm2-torch", "smollm2-numpy"])
def test_judge_gives_the_probability_of_yes_of_transformers(
    name: str, load_real: Load, transformers_model: Any, transformers_tokenizer: Any
) -> None:
    import torch

    reward = search.RewardModel.load(load_real(name), question=QUESTION)
    yes, no = (transformers_tokenizer.encode(word)[0] for word in ("Yes", "No"))
    answers = ["Paris.", "Berlin, of course."]
    for answer, score in zip(answers, reward.score(PROMPT, answers), strict=True):
        question = QUESTION.format(prompt=PROMPT, text=answer)
        ids = transformers_tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        with torch.inference_mode():
            logits = transformers_model(torch.tensor([ids])).logits[0, -1]
        assert score == pytest.approx(float(logits[[yes, no]].softmax(0)[0]), abs=1e-4)


def test_weighted_votes_are_sums_of_the_judge_s_scores(load_real: Load) -> None:
    lm = load_real("smollm2-numpy")
    reward = search.RewardModel.load(lm, question=QUESTION)
    result = search.weighted_best_of_n(
        lm, PROMPT, n=3, max_tokens=12, seed=1, value=reward, extract=lambda text: text[:1]
    )
    nodes = result.loom.children
    scores = reward.score(PROMPT, [node.text for node in nodes])
    assert [node.score for node in nodes] == pytest.approx(scores)
    sums = Counter[str]()
    for node, score in zip(nodes, scores, strict=True):
        sums[node.text[:1]] += score
    assert [vote.answer for vote in result.votes] == [key for key, _ in sums.most_common()]
    assert result.text[:1] == result.votes[0].answer


def test_prefix_check_without_any_e_needs_few_checks(load_real: Load) -> None:
    lm, n_checks = load_real("smollm2-numpy"), 0

    def no_e(text: str, ended: bool) -> bool:
        nonlocal n_checks
        n_checks += 1
        return "e" not in text

    result = search.smc(
        lm, PROMPT, n=2, depth=1, max_tokens=8, seed=1, answer_tokens=0, prefix_check=no_e
    )
    assert all("e" not in particle.text for particle in result.particles)
    assert math.fsum(particle.weight for particle in result.particles) == pytest.approx(1)
    n_tokens = sum(len(particle.node.tokens) for particle in result.particles)
    assert n_tokens <= n_checks < 200 * n_tokens < lm.info.n_vocab
