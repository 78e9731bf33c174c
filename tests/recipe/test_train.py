"""A run of seconds through all stages: tokenizer, corpus, training, a folder others can load."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytestmark = [pytest.mark.torch]
pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

from recipe import dataset, tokenizer, train  # noqa: E402

EMBEDDED = Path(__file__).parents[2] / "src" / "weft" / "data" / "tiny"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch

    folder, n_threads = tmp_path_factory.mktemp("trained"), torch.get_num_threads()
    torch.set_num_threads(1)  # matrices this small only wait for each other on a busy machine
    train.main(["--tiny-run", "--out", str(folder)])
    torch.set_num_threads(n_threads)
    return folder


@pytest.mark.programs
def test_loss_falls(trained: Path) -> None:
    """From ln 512 = 6.24 at random to below 5; a run that learns nothing stays above 6."""
    results = json.loads((trained / "eval.json").read_text())
    assert results["steps"] == train.TINY_RUN.steps
    assert results["loss"] < 5.0


@pytest.mark.programs
def test_saved_folder_loads_in_transformers(trained: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(trained)
    loaded = AutoTokenizer.from_pretrained(trained)
    text = loaded.apply_chat_template(
        [{"role": "user", "content": "What is 2+2?"}], tokenize=False, add_generation_prompt=True
    )
    assert text == "<|bos|><|user|>What is 2+2?<|end|><|assistant|>"
    ids = loaded(text, add_special_tokens=False, return_tensors="pt").input_ids
    with torch.inference_mode():
        assert model(ids).logits.shape == (1, ids.shape[1], train.TINY_RUN.vocab)


def test_digits_are_tokens_of_their_own(trained: Path) -> None:
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(trained)
    assert loaded.tokenize("1024") == list("1024")


def test_shards_differ_and_batches_cover_every_row_once(trained: Path) -> None:
    import torch

    one, other = (
        dataset.encode(dataset.Shard(seed, 50, trained / "tokenizer.json")) for seed in (1, 2)
    )
    assert list(one[:200]) != list(other[:200])
    rows = torch.arange(6 * 4).view(6, 4)
    stream = dataset.batches(rows.flatten(), n_rows=2, length=4, seed=0)
    rows_of_batches = torch.cat([next(stream) for _ in range(3)])
    assert sorted(rows_of_batches[:, 0].tolist()) == rows[:, 0].tolist()


def test_rate_ramps_up_stays_and_falls_to_two_percent() -> None:
    settings = train.Settings(rate=1.0, warmup=10)
    assert train.rate_at(settings, 0, 0.0) == pytest.approx(0.1)
    assert train.rate_at(settings, 50, 0.5) == 1.0
    assert train.rate_at(settings, 99, 1.0) == pytest.approx(0.02)


@pytest.mark.slow
def test_tokenizer_of_the_embedded_model_is_reproduced_byte_for_byte(tmp_path: Path) -> None:
    tokenizer.train_tokenizer(train.Settings().vocab).save_pretrained(tmp_path)
    assert (tmp_path / "tokenizer.json").read_bytes() == (EMBEDDED / "tokenizer.json").read_bytes()


@pytest.mark.slow
def test_embedded_model_keeps_its_accuracy() -> None:
    """A few of each; 10 of 10 word problems and 40 verdicts at 98 %: below 36 once in 10,000."""
    from recipe.evaluate import QUICK, evaluate

    results = evaluate(EMBEDDED, QUICK)
    assert results["word_greedy"] >= 0.95
    assert results["value_acc"] >= 0.9
