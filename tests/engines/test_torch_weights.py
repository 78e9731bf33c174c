"""Weights that are changed in place: no result computed before is used."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from families import build  # noqa: E402
from weft import LM, AsyncLM, Branch, BranchStore, Loom, load  # noqa: E402

pytestmark = pytest.mark.torch
IDS = [5, 17, 33, 8, 90, 41]


@pytest.fixture
def model():
    return build("llama").eval()


@pytest.fixture
def lm(model) -> LM:
    from tokenizers import Tokenizer, decoders, models

    backend = Tokenizer(models.BPE({chr(40 + i): i for i in range(80)}, []))
    backend.decoder = decoders.ByteLevel()
    return load(model, backend)


def train(model) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(0.7)


def truth(model, ids) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor([ids])).logits[0, -1].float().numpy()


def test_every_face_answers_by_the_weights_as_they_are(model, lm) -> None:
    branch, other = Branch.create(lm, seed=1, temperature=0.0), Branch.create(lm, seed=2)
    for one in (branch, other):
        one.prefill(IDS[:-1])
        one.commit(IDS[-1])
    loom, model_of = Loom(lm, IDS, template=False), AsyncLM(lm, as_torch=False)
    strict = AsyncLM(lm, as_torch=False, strict=True)
    before = truth(model, IDS)
    np.testing.assert_allclose(branch.logits, before, atol=1e-4)
    strict.next_token_logprobs_sync(IDS)
    loom.next(5)
    branch.produce()
    train(model)
    after = truth(model, IDS)
    assert np.abs(after - before).max() > 0.1
    assert branch.produce().token == int(after.argmax())
    np.testing.assert_allclose(branch.logits, after, atol=1e-4)
    np.testing.assert_allclose(other.fork().logits, after, atol=1e-4)
    expected = torch.tensor(after).log_softmax(-1).numpy()
    for face in (model_of, strict):
        np.testing.assert_allclose(face.next_token_logprobs_sync(IDS), expected, atol=1e-4)
    got = asyncio.run(model_of.next_token_logprobs(IDS))
    np.testing.assert_allclose(got, expected, atol=1e-4)
    assert loom.next(1)[0].id == int(after.argmax())


def test_commit_after_a_weight_change_recomputes_its_path(model, lm) -> None:
    branches = [Branch.create(lm, seed=n) for n in range(3)]
    store = BranchStore(lm)
    store.prefill([(branch, IDS) for branch in branches])
    store.produce(branches)
    train(model)
    store.commit([(branch, 7) for branch in branches])
    for branch in branches:
        np.testing.assert_allclose(branch.logits, truth(model, [*IDS, 7]), atol=1e-4)
    rows = torch.tensor(truth(model, IDS)).log_softmax(-1)
    assert branches[0].perplexity == pytest.approx(float((-rows[7]).exp()), rel=1e-3)


def test_nothing_is_recomputed_while_the_weights_stay(lm) -> None:
    branch = Branch.create(lm, seed=1)
    branch.prefill(IDS)
    before = lm.stats()
    branch.logits, branch.fork().produce()
    repeated = Branch.create(lm, seed=1)
    repeated.prefill(IDS)
    assert (lm.stats().prefilled, lm.stats().recomputed) == (before.prefilled, before.recomputed)


def test_clear_cache_drops_kv_of_weights_changed_through_data(model, lm) -> None:
    branch = Branch.create(lm, seed=1)
    branch.prefill(IDS)
    branch.produce()
    for weight in model.parameters():
        weight.data.mul_(0.7)
    lm.clear_cache()
    assert lm.stats().kv_tokens == 0
    np.testing.assert_allclose(branch.logits, truth(model, IDS), atol=1e-4)


def test_logits_that_were_set_stay_set(lm) -> None:
    branch = Branch.create(lm, seed=1, temperature=0.0)
    branch.prefill(IDS)
    mine = np.zeros(lm.info.n_vocab, np.float32)
    mine[9] = 5
    branch.set_logits(mine)
    lm.scheduler.logits_cache.budget_bytes = 0
    lm.clear_cache()
    Branch.create(lm).prefill([4, 5])
    assert branch.produce().token == 9
    np.testing.assert_array_equal(branch.logits, mine)
