"""The vLLM engine: native runs, rows by open requests, adapters, and what it refuses."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
pytest.importorskip("vllm", reason="vllm is not installed")

from safetensors.numpy import save_file  # noqa: E402

import weft  # noqa: E402
from weft import AsyncLM, Branch, Loom  # noqa: E402
from weft.constraints import GBNF, Allow, Choice, Lark, Lazy, Regex  # noqa: E402
from weft.engines.base import Row, ScoreSpan  # noqa: E402
from weft.engines.vllm.rows import RowReader  # noqa: E402
from weft.errors import (  # noqa: E402
    ConfigError,
    ContextOverflow,
    ForwardError,
    ModelLoadError,
    StaleHandle,
    Unsupported,
)
from weft.lm import LM  # noqa: E402
from weft.sampling.metrics import log_softmax  # noqa: E402
from weft.sampling.params import SamplingParams  # noqa: E402

SMALL = {"kv_cache_memory_bytes": 256 << 20, "max_num_seqs": 64}
TINY = Path(str(weft.__file__)).parent / "data" / "tiny"
PROMPT = "Use 4 9 10 13 to make 24."
PROMPTS = [
    *(f"Use {a} {b} 10 13 to make 24." for a in range(3, 8) for b in range(5, 10)),
    *(
        f"Once upon a time a {kind} {animal} named {name}"
        for kind in ("brave", "small", "old", "clever", "kind")
        for animal, name in (
            ("fox", "Anna"), ("owl", "Tom"), ("otter", "Mia"), ("bear", "Ben"), ("cat", "Kira")
        )
    ),
]  # fmt: skip


@pytest.fixture(scope="module")
def lm() -> Iterator[LM]:
    options = {**SMALL, "enable_lora": True, "max_lora_rank": 8}
    with weft.load("tiny", engine="vllm", dtype="float32", engine_options=options) as made:
        yield made


@pytest.fixture(scope="module")
def reference() -> Iterator[LM]:
    with weft.load("tiny") as made:
        yield made


def reader_of(lm: LM) -> RowReader:
    return lm.engine._reader


def rows_after(lm: LM, ids: list[int], *, adapter: str | None = None) -> np.ndarray:
    output = lm.engine.forward([Row((), ids, 0, None, (len(ids) - 1,), (), adapter)])
    return output.logits(0)


# The same model ---------------------------------------------------------------------------------


def test_greedy_texts_of_50_prompts_are_those_of_the_numpy_engine(lm: LM, reference: LM) -> None:
    assert len(set(PROMPTS)) == 50

    def texts(of: LM) -> list[str]:
        looms = [Loom(of, prompt) for prompt in PROMPTS]
        return [loom.grow(max_tokens=24, temperature=0, show=False)[0].text for loom in looms]

    assert texts(lm) == texts(reference)


def test_figures_of_native_runs_are_the_raw_ones(lm: LM, reference: LM) -> None:
    loom = Loom(lm, PROMPT)
    made = loom.grow(
        n=3, max_tokens=12, seed=5, temperature=0.7, top_p=0.9, presence_penalty=0.5, show=False
    )
    for node in made:
        ids = node.get_prefix_tokens()
        twin = Loom(reference, ids[: len(loom.tokens)], template=False)
        want = twin.measure(ids[len(loom.tokens) :]).logprobs
        np.testing.assert_allclose(node.logprobs, want, atol=1e-4)
        assert node.entropies == []  # vLLM tells none


def test_the_same_seed_gives_the_same_texts_and_siblings_differ(lm: LM) -> None:
    def texts(seed: int) -> list[str]:
        made = Loom(lm, PROMPTS[40]).grow(n=6, max_tokens=16, seed=seed, show=False)
        return [node.text for node in made]

    assert texts(1) == texts(1)
    assert len({*texts(1), *texts(2)}) > 6


def test_a_stream_may_be_left_and_the_rest_is_not_generated(lm: LM) -> None:
    loom = Loom(lm, PROMPT)
    for number, _ in enumerate(loom.stream(n=2, max_tokens=900, seed=1, temperature=1.2)):
        if number == 5:
            break
    gc.collect()
    (node,) = loom.grow(max_tokens=4, temperature=0, show=False)
    assert len(node.tokens) == 4


# Rows -------------------------------------------------------------------------------------------


def test_a_branch_goes_on_in_one_open_request(lm: LM, reference: LM) -> None:
    reader = reader_of(lm)
    opened, extended = reader.n_opened, reader.n_extended
    ours, theirs = (Branch.create(each, temperature=0.0) for each in (lm, reference))
    for branch in (ours, theirs):
        branch.prefill(branch.lm.tokenize("Once upon a time a grey fox"))
    for _ in range(12):
        np.testing.assert_allclose(ours.logits, theirs.logits, atol=1e-4)
        token = ours.produce().token
        for branch in (ours, theirs):
            branch.commit(token)
    assert reader.n_opened - opened == 1
    assert reader.n_extended - extended >= 11


def test_tokens_that_the_host_chose_replace_the_drawn_ones(lm: LM, reference: LM) -> None:
    """An open request drops what vLLM drew: the row is that of the host's path, not of vLLM's."""
    rng = np.random.default_rng(3)
    ids = [int(each) for each in rng.integers(30, 2000, size=40)]
    before = reader_of(lm).n_extended
    for end in range(34, 41):
        np.testing.assert_allclose(
            rows_after(lm, ids[:end]), rows_after(reference, ids[:end]), atol=1e-4
        )
    assert reader_of(lm).n_extended - before == 6


def test_siblings_of_one_context_share_its_open_request_and_the_prefix(
    lm: LM, reference: LM
) -> None:
    ids = [*range(300, 340)]
    paths = [ids, *([*ids, token] for token in (500, 501, 502))]
    for path in paths:
        np.testing.assert_allclose(rows_after(lm, path), rows_after(reference, path), atol=1e-4)


def test_open_requests_stay_few_and_close_by_their_age(lm: LM) -> None:
    reader = reader_of(lm)
    assert reader.most == 16
    for first in range(400, 440):
        rows_after(lm, [first, 7, 8])
    assert len(reader._idle) == reader.most
    assert reader._idle_tokens == sum(len(ids) for _, ids in reader._idle)
    assert (None, (439, 7, 8)) in reader._idle
    assert (None, (400, 7, 8)) not in reader._idle


def test_rows_by_logprobs_are_those_of_the_board(lm: LM) -> None:
    engine = lm.engine
    slow = RowReader(engine._running.engine, lm.info.n_vocab, board=None, most=4, most_tokens=999)
    paths = [(None, (30, 40, 50)), (None, (30, 40, 50, 60))]
    found = engine._running.loop.call(slow.rows(paths, {None: None}))
    engine._running.loop.call(slow.close())
    for (_, ids), row in zip(paths, found, strict=True):
        want = log_softmax(rows_after(lm, list(ids)))
        np.testing.assert_allclose(log_softmax(row), want, atol=1e-4)


def test_scores_and_rows_within_one_row(lm: LM, reference: LM) -> None:
    ids = [*range(600, 640)]
    row = Row((), ids, 0, None, (3, 39), (ScoreSpan(5, tuple(ids[6:30]), 4),))
    ours, theirs = lm.engine.forward([row]), reference.engine.forward([row])
    for number in range(2):
        np.testing.assert_allclose(ours.logits(number), theirs.logits(number), atol=1e-4)
    (one,), (two,) = ours.scores()[0], theirs.scores()[0]
    for name in ("logprobs", "entropies", "top_logprobs"):
        np.testing.assert_allclose(getattr(one, name), getattr(two, name), atol=1e-4)
    assert np.abs(one.ranks - two.ranks).max() <= 3  # unlikely tokens lie close together
    assert one.top_ids.tolist() == two.top_ids.tolist()


def test_many_contexts_at_once_are_more_than_there_are_slots(lm: LM, reference: LM) -> None:
    contexts = [[30 + i, 200, 300 + i] for i in range(90)]

    async def ask(of: LM) -> np.ndarray:
        model = AsyncLM(of, as_torch=False)
        return np.asarray(await model.batch_next_token_logprobs(contexts))

    np.testing.assert_allclose(asyncio.run(ask(lm)), asyncio.run(ask(reference)), atol=1e-4)


def test_a_row_that_cannot_be_run_is_refused_before_anything_is_asked(lm: LM) -> None:
    forward = lm.engine.forward
    with pytest.raises(ForwardError, match="0 to 2047; got 5 to 2048"):
        forward([Row((), [5, 2048], 0, None, (1,))])
    with pytest.raises(ContextOverflow, match="2048 tokens is longer than the context of 2047"):
        forward([Row((), [5] * 2048, 0, None, (0,))])
    with pytest.raises(ForwardError, match="logits_at"):
        forward([Row((), [5], 0, None, (1,))])
    with pytest.raises(StaleHandle, match="'gone'"):
        forward([Row((), [5], 0, None, (0,), (), "gone#1")])


# What goes to vLLM, and what runs by steps ------------------------------------------------------

NATIVE: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "top_p": 0.9, "temperature_first": True},
    {"top_p": 0.9, "top_k": 40},
    {"min_p": 0.1, "top_k": 40},
    {"temperature": 0, "min_p": 0.1, "top_p": 0.9, "temperature_first": True},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"logit_bias": {5: -float("inf"), 9: 2.5}},
    {"penalty_last_n": 64},
    {"constraint": Regex("[0-9]+ apples")},
    {"constraint": Choice(["yes", "no"])},
    {"constraint": {"type": "object", "properties": {"a": {"type": "integer"}}}},
    {"constraint": Lark('start: "a" /[0-9]{2}/')},
    {"constraint": GBNF('root ::= "a" [0-9] [0-9]')},
    {"constraint": {30, 31, 32}},
]
STEPPED: dict[str, dict[str, Any]] = {
    "typical_p": {"typical_p": 0.9},
    "temperature=0.7 after": {
        "temperature": 0.7,
        "top_p": 0.9,
        "temperature_first": False,
    },
    "temperature=0.005": {"temperature": 0.005},
    "temperature=3": {"temperature": 3.0},
    "min_p": {"min_p": 0.1, "top_p": 0.9},
    "presence_penalty": {"presence_penalty": 2.5},
    "penalty_last_n": {"penalty_last_n": 64, "presence_penalty": 0.5},
    "logit_bias": {"logit_bias": {9: float("inf")}},
    "Lazy": {"constraint": Lazy(Regex("[0-9]+x"), ["1"])},
}


@pytest.mark.parametrize("params", NATIVE, ids=str)
def test_what_vllm_honours_exactly_goes_there(lm: LM, params: dict[str, Any]) -> None:
    assert lm.engine.native is not None
    assert lm.engine.native.refusal(SamplingParams(**params)) is None
    steps = lm.stats().steps
    made = Loom(lm, PROMPT).grow(n=2, max_tokens=12, seed=1, show=False, **params)
    assert made
    assert lm.stats().steps == steps


@pytest.mark.parametrize("why", STEPPED)
def test_what_vllm_does_otherwise_runs_by_steps(lm: LM, why: str) -> None:
    assert lm.engine.native is not None
    refusal = lm.engine.native.refusal(SamplingParams(**STEPPED[why]))
    assert refusal is not None
    assert why in refusal
    steps = lm.stats().steps
    (node, *_) = Loom(lm, PROMPT).grow(max_tokens=4, seed=1, show=False, **STEPPED[why])
    assert lm.stats().steps > steps
    assert len(node.logprobs) == len(node.tokens)


def test_texts_of_native_constraints_fit_them(lm: LM) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["fox", "owl"]}, "old": {"type": "boolean"}},
        "required": ["name", "old"],
        "additionalProperties": False,
    }
    for node in Loom(lm, PROMPT).grow(n=5, max_tokens=40, seed=2, constraint=schema, show=False):
        assert node.finish_reason == "stop"
        assert json.dumps(json.loads(node.text)) == node.text  # no spaces but those of Weft
        assert node.logprobs == []  # vLLM tells those of what the grammar left
    for node in Loom(lm, PROMPT).grow(
        n=5, max_tokens=9, seed=2, constraint=Allow({30, 31}), show=False
    ):
        assert set(node.tokens) <= {30, 31}


# Adapters ---------------------------------------------------------------------------------------


def adapter_folder(folder: Path, *, rank: int = 4, seed: int = 0) -> tuple[Path, Path]:
    """Write an adapter, and the embedded model with it merged in."""
    rng = np.random.default_rng(seed)
    adapter, merged = folder / "adapter", folder / "merged"
    adapter.mkdir()
    merged.mkdir()
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank,
        "target_modules": ["q_proj", "down_proj"], "bias": "none",
    }  # fmt: skip
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    from weft.engines.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(TINY)
    weights = {name: checkpoint.read(name) for name in checkpoint.tensors}
    halves = {}
    for name in [each for each in weights if "q_proj" in each or "down_proj" in each]:
        n_out, n_in = weights[name].shape
        down = rng.normal(0, 0.05, (rank, n_in)).astype(np.float32)
        up = rng.normal(0, 0.05, (n_out, rank)).astype(np.float32)
        module = f"base_model.model.{name.removesuffix('.weight')}"
        halves[f"{module}.lora_A.weight"], halves[f"{module}.lora_B.weight"] = down, up
        weights[name] = weights[name] + 2 * up @ down
    save_file(halves, adapter / "adapter_model.safetensors")
    save_file(weights, merged / "model.safetensors")
    told = json.loads((TINY / "config.json").read_text()) | {"dtype": "float32"}
    (merged / "config.json").write_text(json.dumps(told))
    for each in TINY.iterdir():
        if not (merged / each.name).exists():
            (merged / each.name).write_bytes(each.read_bytes())
    return adapter, merged


def test_an_adapter_a_request_is_the_merged_model(lm: LM, tmp_path: Path) -> None:
    adapter, merged = adapter_folder(tmp_path)
    with weft.load(merged, engine="numpy") as whole:
        lm.add_adapter("extra", adapter)
        text = Loom(lm, PROMPT).grow(max_tokens=12, temperature=0, show=False)[0].text
        node = Loom(lm, PROMPT, adapter="extra").grow(max_tokens=12, temperature=0, show=False)[0]
        want = Loom(whole, PROMPT).grow(max_tokens=12, temperature=0, show=False)[0]
        assert node.text == want.text
        np.testing.assert_allclose(node.logprobs, want.logprobs, atol=1e-3)
        ids = lm.tokenize(PROMPT)
        asked = AsyncLM(lm, as_torch=False).next_token_logprobs_sync(ids, lora_name="extra")
        theirs = AsyncLM(whole, as_torch=False).next_token_logprobs_sync(ids)
        np.testing.assert_allclose(asked, theirs, atol=1e-3)
        assert Loom(lm, PROMPT).grow(max_tokens=12, temperature=0, show=False)[0].text == text
    lm.remove_adapter("extra")
    with pytest.raises(ModelLoadError, match="adapter_config"):
        lm.add_adapter("none", tmp_path)


def test_an_adapter_of_too_high_a_rank_is_refused(lm: LM, tmp_path: Path) -> None:
    adapter, _ = adapter_folder(tmp_path, rank=16)
    with pytest.raises(ConfigError, match="16"):
        lm.add_adapter("large", adapter)
    assert rows_after(lm, [5, 6]).shape == (2048,)


# What it cannot do ------------------------------------------------------------------------------


def test_what_needs_kv_is_refused_by_name(lm: LM, tmp_path: Path) -> None:
    loom = Loom(lm, PROMPT)
    with pytest.raises(Unsupported, match="vllm"):
        lm.embed(["a"])
    with pytest.raises(Unsupported, match="vllm"):
        loom.get_prefix_cache()
    with pytest.raises(Unsupported, match="vllm"):
        _ = loom.frag
    with pytest.raises(Unsupported, match="vllm"):
        lm.kv.save(loom.tokens, tmp_path / "a.kv")


MISTAKES: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"engine_options": {"tensor_paralel_size": 2}}, ConfigError, "near it: tensor_parallel_size"),
    ({"n_ctx": 99, "engine_options": {"max_model_len": 99}}, ConfigError, "two limits"),
    ({"engine_options": {"logprobs_mode": "raw_logits"}}, ConfigError, "Weft sets"),
    ({"engine_options": {"rows": "smoke"}}, ConfigError, '"board" and "logprobs"'),
    ({"engine_options": {"tensor_parallel_size": "two"}}, ConfigError, "refuses its arguments"),
    ({"device": "cuda"}, ConfigError, "runs on 'cpu'"),
    ({"dtype": "int3"}, (ConfigError, Unsupported), "int3"),
    ({"n_seq_max": 4}, Unsupported, "max_num_seqs"),
    ({"kv_budget": "1GiB"}, Unsupported, "kv_cache_memory_bytes"),
]


@pytest.mark.parametrize(("given", "error", "told"), MISTAKES, ids=lambda value: str(value)[:40])
def test_mistakes_are_told_before_a_process_is_started(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], error: Any, told: str
) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    def started(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(AsyncLLM, "__init__", started)
    with pytest.raises(error, match=told):
        weft.load("tiny", engine="vllm", **given)


def test_broken_folders_are_told_with_the_file(tmp_path: Path) -> None:
    for each in TINY.iterdir():
        (tmp_path / each.name).write_bytes(each.read_bytes())
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors.*truncated"):
        weft.load(tmp_path, engine="vllm")
    weights.write_bytes(whole)
    told = json.loads((TINY / "config.json").read_text())
    told |= {"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}
    (tmp_path / "config.json").write_text(json.dumps(told))
    with pytest.raises((Unsupported, ModelLoadError, ConfigError)):
        weft.load(tmp_path, engine="vllm")


def test_an_engine_that_is_no_async_one_is_refused() -> None:
    from vllm.engine.arg_utils import AsyncEngineArgs

    with pytest.raises(ConfigError, match="hand over an AsyncLLM"):
        weft.load(AsyncEngineArgs(model=str(TINY)))
