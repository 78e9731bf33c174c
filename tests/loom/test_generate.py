"""`LM.generate`: a prompt in, a list of nodes out."""

from __future__ import annotations

import asyncio

import pytest

import weft
from weft import Heddle, Loom, SamplingParams
from weft.errors import ConfigError

PROMPT = "What is 37 + 58?"
MESSAGES = [{"role": "user", "content": PROMPT}]


def test_generate_of_text_equals_grow_of_chat_loom(lm: weft.LM) -> None:
    answers = lm.generate(PROMPT, n=3, max_tokens=6, seed=1)
    grown = Loom(lm, PROMPT).grow(n=3, max_tokens=6, seed=1)
    assert [answer.text for answer in answers] == [child.text for child in grown]
    assert [str(answer) for answer in answers] == [child.text for child in grown]
    assert [str(each) for each in lm.generate(MESSAGES, max_tokens=6, seed=1)] == [grown[0].text]


def test_generated_nodes_are_children_of_a_loom_that_grows_on(lm: weft.LM) -> None:
    (answer,) = lm.generate(PROMPT, max_tokens=3, seed=2)
    assert isinstance(answer, Heddle)
    assert isinstance(answer.parent, Loom)
    assert answer.path == [answer.parent, answer]
    (further,) = answer.grow(max_tokens=2)
    assert str(further) == further.text
    assert "├" in str(answer.parent) or "└" in str(answer.parent)  # a loom still draws its tree


def test_generate_takes_sampling_params_raw_prompts_and_token_ids(lm: weft.LM) -> None:
    params = SamplingParams(n=2, max_tokens=4, seed=3)
    raw = lm.generate("4 + 9", params, template=False)
    ids = lm.generate(lm.tokenize("4 + 9"), params=params)
    assert [node.params for node in raw] == [params, params]
    assert [node.tokens for node in raw] == [node.tokens for node in ids]
    assert lm.generate(MESSAGES, system="Be brief.", max_tokens=1)[0].parent is not None


def test_awaited_generate_gives_the_same(lm: weft.LM) -> None:
    async def main() -> list[str]:
        calls = (lm.agenerate(PROMPT, max_tokens=4, seed=seed) for seed in (1, 2))
        return [str(answers[0]) for answers in await asyncio.gather(*calls)]

    expected = [str(lm.generate(PROMPT, max_tokens=4, seed=seed)[0]) for seed in (1, 2)]
    assert asyncio.run(main()) == expected


def test_generate_of_several_prompts_names_the_remedy(lm: weft.LM) -> None:
    with pytest.raises(ConfigError, match=r"\[lm\.generate\(prompt\) for prompt in prompts\]"):
        lm.generate(["a", "b"])
    with pytest.raises(ConfigError, match="max_tokens"):
        lm.generate(PROMPT, max_new_tokens=5)
