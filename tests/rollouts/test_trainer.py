"""Laws of `rollouts.trl`, over a real model object; tests/recipe/test_train_grpo.py runs TRL."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from shallow import shallow
from weft import rollouts
from weft.errors import ConfigError
from weft.lm.lm import LM

pytestmark = pytest.mark.torch

PROMPT = [{"role": "user", "content": "Add 3 and 4."}]


@pytest.fixture(scope="module")
def parts() -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(shallow(), dtype=torch.float32)
    return model.train(), AutoTokenizer.from_pretrained(shallow())


def trainer(parts: tuple[Any, Any], **changed: Any) -> Any:
    """Return what `rollouts.trl` reads of a GRPOTrainer."""
    model, tokenizer = parts
    accelerator = SimpleNamespace(unwrap_model=lambda model: model, process_index=0)
    settings: dict[str, Any] = {
        "temperature": 1.3,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": None,
        "repetition_penalty": 1.0,
        "max_completion_length": 10,
        "chat_template_kwargs": {},
        "args": SimpleNamespace(seed=1, generation_kwargs=None, use_vllm=False),
        **changed,
    }
    return SimpleNamespace(
        model=model, processing_class=tokenizer, accelerator=accelerator, **settings
    )


def plain_logprobs(model: Any, prompt: list[int], completion: list[int], t: float) -> list[float]:
    """Return log-probabilities at a temperature, from one forward of Transformers."""
    import torch

    ids = torch.tensor([prompt + completion])
    with torch.no_grad():
        rows = (model(ids).logits[0, len(prompt) - 1 : -1] / t).log_softmax(-1)
    logprobs: list[float] = rows.gather(1, torch.tensor(completion)[:, None])[:, 0].tolist()
    return logprobs


def test_columns_follow_the_prompts_and_their_repetitions(parts: tuple[Any, Any]) -> None:
    grow = rollouts.trl(branch_at=[0, 3])
    columns = grow([PROMPT] * 4 + ["3 + 4 ="] * 2, trainer(parts))
    chat = parts[1].apply_chat_template(PROMPT, add_generation_prompt=True, return_dict=True)
    text = parts[1]("3 + 4 =")["input_ids"]
    assert columns["prompt_ids"] == [chat["input_ids"]] * 4 + [text] * 2
    lengths = [[len(values) for values in columns[name]] for name in ("completion_ids", "logprobs")]
    assert lengths[0] == lengths[1]
    assert 1 <= min(lengths[0]) <= max(lengths[0]) <= 10


def test_logprobs_equal_a_plain_forward_before_and_after_a_step(parts: tuple[Any, Any]) -> None:
    import torch

    model = parts[0]
    grow, own = rollouts.trl(), trainer(parts)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    logprobs_of_5 = []
    for _ in range(2):
        columns = grow([PROMPT] * 4, own)
        rows = zip(*(columns[name] for name in ("prompt_ids", "completion_ids")), strict=True)
        expected = [plain_logprobs(model, *row, 1.3) for row in rows]
        for logprobs, plain in zip(columns["logprobs"], expected, strict=True):
            assert logprobs == pytest.approx(plain, abs=1e-4)
        logprobs_of_5.append(plain_logprobs(model, columns["prompt_ids"][0], [5], 1.3))
        ids = torch.tensor([columns["prompt_ids"][0]])
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    assert abs(logprobs_of_5[0][0] - logprobs_of_5[1][0]) > 0.01


def test_model_keeps_its_weights_and_training_mode(parts: tuple[Any, Any]) -> None:
    model, tokenizer = parts
    rollouts.trl()([PROMPT] * 2, trainer(parts))
    assert model.training
    lm = LM.from_model(model, tokenizer)
    own = {weight.data_ptr() for weight in model.parameters()}
    assert {weight.data_ptr() for weight in lm.engine.model.parameters()} <= own  # type: ignore[attr-defined]
    assert lm.stats().kv_tokens == 0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"repetition_penalty": 1.1}, "repetition_penalty of the GRPOConfig is 1.1"),
        (
            {"args": SimpleNamespace(seed=1, generation_kwargs={"num_beams": 2}, use_vllm=False)},
            "generation_kwargs of the GRPOConfig",
        ),
    ],
)
def test_settings_that_have_no_effect_raise(
    parts: tuple[Any, Any], changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        rollouts.trl()([PROMPT], trainer(parts, **changed))
