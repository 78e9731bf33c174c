"""Reward models of each head type, against plain Transformers forwards."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import weft
from searches import puzzle, small
from weft import Loom
from weft.engines.hub import resolve
from weft.errors import ConfigError, Unsupported
from weft.search import RewardModel

pytestmark = pytest.mark.torch
PROMPT, LINES = "Use 4 9 10 13 to make 24.", ["10 - 4 = 6", "13 - 9 = 4", "6 * 4 = 24"]
SMALL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}


def saved(folder: Path, kind: str, n_labels: int) -> Any:
    """Save a random reward model with the embedded model's tokenizer; return the model."""
    import shutil

    import torch
    from transformers import AutoTokenizer, Qwen2Config
    from transformers.models.qwen2 import modeling_qwen2

    torch.manual_seed(1)
    tiny = Path(resolve("tiny"))
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    config = Qwen2Config(vocab_size=len(tokenizer), num_labels=n_labels, pad_token_id=0, **SMALL)
    base = "TokenClassification" if kind == "ProcessRewardModel" else kind
    model = getattr(modeling_qwen2, f"Qwen2For{base}")(config).eval()
    if kind == "ProcessRewardModel":
        model.score = torch.nn.Sequential(
            torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, n_labels)
        )
        model.config.architectures = ["Qwen2ForProcessRewardModel"]
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder)
    if kind == "ProcessRewardModel":
        config_file = folder / "config.json"
        config_file.write_text(
            config_file.read_text().replace(
                "Qwen2ForTokenClassification", "Qwen2ForProcessRewardModel"
            )
        )
    for file in tiny.iterdir():
        if "tokenizer" in file.name or "template" in file.name or "special" in file.name:
            shutil.copy(file, folder)
    return model


def plain_outputs(model: Any, ids: list[int]) -> np.ndarray:
    """Return the head's outputs at the last token, by Transformers' own forward."""
    import torch

    with torch.no_grad():
        logits = model(input_ids=torch.tensor([ids])).logits[0]
    return (logits if logits.ndim == 1 else logits[-1]).double().numpy()


def share(outputs: np.ndarray, label: int = -1) -> float:
    weights = np.exp(outputs - outputs.max())
    return float(weights[label] / weights.sum())


@pytest.fixture(scope="module")
def steps_model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("steps")
    return folder, saved(folder, "TokenClassification", 2)


@pytest.mark.parametrize("n_labels", [1, 3])
def test_score_of_a_sequence_classifier_equals_transformers(tmp_path: Path, n_labels: int) -> None:
    model = saved(tmp_path, "SequenceClassification", n_labels)
    reward = RewardModel.load(tmp_path)
    assert reward.kind == "text"
    assert reward.is_verdict == (n_labels > 1)
    texts = ["\n".join(LINES[:n]) for n in (1, 2, 3)]
    scores = reward.score(PROMPT, texts)
    for n, score in enumerate(scores, 1):
        ids = reward.token_ids(PROMPT, *LINES[:n])
        outputs = plain_outputs(model, ids)
        expected = outputs[0] if n_labels == 1 else share(outputs)
        assert score == pytest.approx(expected, abs=1e-4)
    assert len({round(score, 6) for score in scores}) == 3
    reward.close()


def test_chat_of_a_sequence_classifier_ends_after_the_answer(tmp_path: Path) -> None:
    saved(tmp_path, "SequenceClassification", 1)
    reward = RewardModel.load(tmp_path, chat=True)
    chat = [{"role": "user", "content": PROMPT}, {"role": "assistant", "content": "\n".join(LINES)}]
    rendered = reward.lm.text.apply_chat_template(chat, add_generation_prompt=False)
    expected = reward.lm.text.encode(rendered, special=True, add_bos=False)
    assert reward.token_ids(PROMPT, *LINES) == expected
    plain = RewardModel.load(reward.lm, chat=False)
    assert plain.score(PROMPT, ["1"]) != reward.score(PROMPT, ["1"])
    reward.close()


@pytest.mark.parametrize("kind", ["TokenClassification", "ProcessRewardModel"])
def test_step_scores_of_a_process_reward_model_equal_transformers(
    tmp_path: Path, kind: str
) -> None:
    model = saved(tmp_path, kind, 2)
    ids, expected = list[int](), list[float]()
    with weft.load(tmp_path, engine="torch") as lm:
        assert (lm.info.head, lm.info.n_labels) == ("steps", 2)
        ids = lm.text.encode(PROMPT, add_bos=True)
        for line in LINES:
            ids += lm.text.encode(line, add_bos=False) + lm.text.encode("\n", add_bos=False)
            expected.append(share(plain_outputs(model, ids)))
        for reduce, wanted in {
            "last": expected[-1],
            "min": min(expected),
            "prod": float(np.prod(expected)),
            "mean": float(np.mean(expected)),
        }.items():
            reward = RewardModel.load(lm, reduce=reduce)
            assert reward.score(PROMPT, ["\n".join(LINES)]) == pytest.approx([wanted], abs=1e-4)
        first = RewardModel.load(lm, label=0).score(PROMPT, ["\n".join(LINES)])
        assert first == pytest.approx([1 - expected[-1]], abs=1e-4)


def test_second_evaluation_of_a_child_costs_its_own_tokens(steps_model: Any) -> None:
    folder, _ = steps_model
    reward = RewardModel.load(folder)
    ids = [reward.token_ids(PROMPT, *LINES[:n]) for n in range(4)]
    reward.score(PROMPT, [LINES[0]])
    assert reward.n_tokens == len(ids[1])
    reward.score(PROMPT, ["\n".join(LINES[:2]), LINES[0]])
    assert reward.n_tokens == len(ids[2])
    reward.score(PROMPT, ["\n".join(LINES), "\n".join([*LINES[:2], "6 + 4 = 10"])])
    other = reward.token_ids(PROMPT, *LINES[:2], "6 + 4 = 10")
    shared = next(n for n, (a, b) in enumerate(zip(ids[3], other, strict=False)) if a != b)
    assert reward.n_tokens == len(ids[3]) + len(other) - shared
    reward.close()


def test_judge_gives_the_probability_of_yes_after_its_question(lm: weft.LM) -> None:
    reward = RewardModel.load(lm, question="Can {text} make 24?", words=("sure", "impossible"))
    assert reward.kind == "judge"
    assert reward.is_verdict
    score, low = reward.score(PROMPT, ["4 4 10", "1 1 1"])
    logits = Loom(lm, "Can 4 4 10 make 24?").next(top=lm.info.n_vocab)
    good, bad = (lm.text.continuation(word)[0] for word in ("sure", "impossible"))
    odds = {each.id: each.p for each in logits}
    assert score == pytest.approx(odds[good] / (odds[good] + odds[bad]), abs=1e-4)
    assert low < 0.5 < score


# By levels, particles and full answers; test_callbacks has a value in every search.
@pytest.mark.parametrize(
    ("name", "options"), [("tot", {"depth": 1}), ("smc", {"n": 2}), ("best-of-n", {"n": 2})]
)
def test_scores_of_a_search_are_the_values_of_its_reward_model(
    lm: weft.LM, steps_model: Any, name: str, options: dict[str, Any]
) -> None:
    reward = RewardModel.load(steps_model[0], reduce="min")
    prompt = puzzle(name)
    result = small(name, lm, prompt, value=reward, **options)
    nodes = [node for node in result.loom.walk() if node.parent is not None]
    scored = [node for node in nodes if node.score is not None and not node.meta.get("answer")]
    texts = [node.get_prefix_text(1).strip() for node in scored]
    expected = reward.score(prompt, texts)
    if name == "smc":
        expected = list(np.log(np.maximum(expected, 1e-6)))
    assert [node.score for node in scored] == pytest.approx(expected)
    assert scored
    reward.close()


def test_scores_that_are_products_or_sigmoids_are_verdicts_or_not(
    tmp_path: Path, steps_model: Any
) -> None:
    with closing(RewardModel.load(steps_model[0], reduce="prod")) as products:
        assert not products.is_verdict
    saved(tmp_path, "SequenceClassification", 1)
    with closing(RewardModel.load(tmp_path, sigmoid=True)) as sigmoids:
        assert sigmoids.is_verdict


def test_generate_with_a_reward_model_raises_unsupported(steps_model: Any) -> None:
    with (
        weft.load(steps_model[0], engine="torch") as lm,
        pytest.raises(Unsupported, match="is a reward model"),
    ):
        lm.generate("a", max_tokens=2, template=False)


def test_reduce_of_a_sequence_classifier_raises_config_error(tmp_path: Path) -> None:
    saved(tmp_path, "SequenceClassification", 1)
    with pytest.raises(ConfigError, match="scores only full texts"):
        RewardModel.load(tmp_path, reduce="min")


def test_loaded_transformers_object_scores_as_its_folder_does(steps_model: Any) -> None:
    from transformers import AutoTokenizer

    folder, model = steps_model
    by_object = RewardModel.load(model, AutoTokenizer.from_pretrained(folder))
    by_folder = RewardModel.load(folder)
    text = "\n".join(LINES)
    assert by_object.score(PROMPT, [text]) == pytest.approx(by_folder.score(PROMPT, [text]))
    assert type(model).__mro__[0].__module__.startswith("transformers")
    by_object.close()
    by_folder.close()
