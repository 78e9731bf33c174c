"""Sampling of calls that give none: the same in looms, branches and over HTTP."""

from __future__ import annotations

import asyncio
import inspect
import json
import shutil
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import weft
from serving import serving
from shallow import shallow
from weft import Branch, Heddle, Loom, SamplingParams, search
from weft._core.sampling.params import ModelDefaults
from weft.service.server import ServerConfig

LLAMA_CPP = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}
MESSAGES = [{"role": "user", "content": "Tell me a story about a fox."}]
N_TOKENS, SEED = 12, 5


def drawn_by(params: SamplingParams | None) -> dict[str, Any]:
    assert params is not None
    return {name: getattr(params, name) for name in LLAMA_CPP}


def folder_with(path: Path, **generation_config: Any) -> Path:
    """Write the small model with this generation_config.json."""
    shutil.copytree(shallow(), path)
    file = path / "generation_config.json"
    file.write_text(json.dumps({"eos_token_id": 5, **generation_config}))
    return path


@pytest.fixture(scope="module")
def unnamed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A chat model whose files name no sampling."""
    return folder_with(tmp_path_factory.mktemp("models") / "unnamed")


@pytest.fixture(scope="module")
def lm(unnamed: Path) -> weft.LM:
    return weft.load(unnamed, engine="numpy")


def test_chat_loom_of_model_without_named_sampling_takes_llama_cpps(lm: weft.LM) -> None:
    (child,) = Loom(lm, MESSAGES).grow(max_tokens=2)
    assert drawn_by(child.params) == LLAMA_CPP
    for prompt in (MESSAGES[0]["content"], lm.format_chat(MESSAGES)):
        assert drawn_by(Loom(lm, prompt).grow(max_tokens=2)[0].params) == LLAMA_CPP


def test_parameters_of_the_call_replace_single_defaults(lm: weft.LM) -> None:
    (child,) = Loom(lm, MESSAGES).grow(max_tokens=2, temperature=1.0, top_k=0)
    assert drawn_by(child.params) == {**LLAMA_CPP, "temperature": 1.0, "top_k": 0}


def test_sampling_params_object_replaces_all_defaults(lm: weft.LM) -> None:
    loom, params = Loom(lm, MESSAGES), SamplingParams(n=2, max_tokens=2, top_p=0.9, seed=1)
    children = loom.grow(params)
    assert [child.params for child in children] == [params, params]
    assert len(loom.grow(3, params)) == 3
    assert loom.grow(params, max_tokens=1)[0].params == SamplingParams(
        n=2, max_tokens=1, top_p=0.9, seed=1
    )
    streamed = [delta.node for delta in loom.stream(params) if delta.finish_reason]
    awaited = asyncio.run(loom.agrow(params=params))
    assert sorted(node.text for node in streamed) == sorted(node.text for node in awaited)
    with pytest.raises(weft.WeftError, match="params is given twice"):
        loom.grow(params, params)
    with pytest.raises(weft.WeftError, match="as keywords"):
        loom.grow(1, {"top_p": 0.9})  # type: ignore[arg-type]


def test_n_may_follow_sampling_params_as_keyword(lm: weft.LM) -> None:
    loom, params = Loom(lm, MESSAGES), SamplingParams(max_tokens=2, seed=1)
    node: Any = loom
    model: Any = lm

    async def awaited() -> list[Any]:
        streamed = [delta async for delta in node.astream(params, n=2)]
        results = [await node.agrow(params, n=2), await model.agenerate(MESSAGES, params, n=2)]
        return [*results, [delta.node for delta in streamed if delta.finish_reason]]

    calls = [
        node.grow(params, n=2),
        [delta.node for delta in node.stream(params, n=2) if delta.finish_reason],
        model.generate(MESSAGES, params, n=2),
        *asyncio.run(awaited()),
    ]
    for results in calls:
        assert [child.params for child in results] == [
            SamplingParams(n=2, max_tokens=2, seed=1)
        ] * 2
    assert inspect.iscoroutinefunction(loom.agrow)
    assert inspect.iscoroutinefunction(lm.agenerate)
    assert not inspect.iscoroutinefunction(loom.grow)
    with pytest.raises(TypeError, match="multiple values for argument 'n'"):
        node.grow(2, n=2)


def test_grow_of_mapping_names_params(lm: weft.LM) -> None:
    given: Any = {"max_tokens": 1}
    for call in (Loom(lm, MESSAGES).grow, lambda n: lm.generate(MESSAGES, n)):
        with pytest.raises(weft.WeftError, match=r"n is \{'max_tokens': 1\}.* params=SamplingPar"):
            call(given)


def test_raw_prompt_stays_at_the_models_distribution(lm: weft.LM) -> None:
    ids = list(lm.format_chat(MESSAGES).ids)
    for loom in (Loom(lm, "Once upon", template=False), Loom(lm, ids)):
        (child,) = loom.grow(max_tokens=2, seed=1)
        assert child.params == SamplingParams(max_tokens=2, seed=1)


def test_searches_stay_at_the_models_distribution_in_chat_looms(lm: weft.LM) -> None:
    loom = Loom(lm, MESSAGES)
    search.best_of_n(lm, loom, n=2, max_tokens=2, seed=1, temperature=1.0)
    search.smc(lm, loom, n=2, depth=1, max_tokens=2, seed=1, potential=lambda nodes: [0.0] * 2)
    grown = [node for node in loom.walk() if node.params is not None]
    assert len(grown) >= 4
    filters = [drawn_by(node.params) for node in grown]
    assert {(each["top_k"], each["top_p"], each["min_p"]) for each in filters} == {(0, 1.0, 0.0)}


def test_opened_chat_loom_and_its_copies_keep_the_defaults(lm: weft.LM, tmp_path: Path) -> None:
    Loom(lm, MESSAGES).save(tmp_path / "a.loom.json")
    loom = Loom.open(tmp_path / "a.loom.json", lm)
    child: Heddle = loom.add("A fox")
    assert drawn_by(child.grow(max_tokens=2)[0].params) == LLAMA_CPP
    raw = Loom(lm, "Once", template=False)
    raw.add_child(child)
    assert drawn_by(child.grow(max_tokens=2)[0].params) == drawn_by(SamplingParams())


@pytest.mark.parametrize("named", [{"do_sample": True}, {"do_sample": True, "top_p": 0.9}])
def test_files_that_name_a_sampling_are_followed_alone(named: dict[str, Any]) -> None:
    defaults = ModelDefaults.from_generation_config(named)
    assert defaults.chat == defaults.raw == SamplingParams.from_generation_config(named)


def test_model_without_stored_parameters_draws_like_one_with_empty_files() -> None:
    defaults = ModelDefaults.from_sampling(None)
    assert defaults == ModelDefaults.from_generation_config({})
    assert defaults.raw == SamplingParams()


def test_gguf_file_keeps_the_named_sampling(tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="gguf is not installed")
    from recipe.export_gguf import export_gguf
    from weft.engines.gguf import read_gguf

    named = {"do_sample": True, "top_p": 0.5, "top_k": 3}
    export_gguf(folder_with(tmp_path / "named", **named), tmp_path / "a.gguf")
    export_gguf(folder_with(tmp_path / "unnamed"), tmp_path / "b.gguf")
    values = read_gguf(tmp_path / "a.gguf").values
    assert [values[f"general.sampling.{name}"] for name in ("temp", "top_p", "top_k")] == [
        1,
        0.5,
        3,
    ]
    assert not any("sampling" in key for key in read_gguf(tmp_path / "b.gguf").values)


def test_repetition_penalty_of_greedy_files_is_kept_with_llama_cpps_defaults() -> None:
    defaults = ModelDefaults.from_generation_config({"temperature": 0.1, "repetition_penalty": 1.2})
    assert defaults.raw == SamplingParams(repetition_penalty=1.2)
    assert defaults.chat == SamplingParams(repetition_penalty=1.2, **LLAMA_CPP)


def test_branch_of_model_without_chat_template_draws_like_its_loom(tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "base", repetition_penalty=1.2)
    (folder / "chat_template.jinja").unlink()
    lm = weft.load(folder, engine="numpy")
    (node,) = Loom(lm, "The fox").grow(max_tokens=N_TOKENS, seed=SEED, repetition_penalty=1)
    branch = Branch.create(lm, seed=SEED, repetition_penalty=1)
    assert lm.chat_defaults == lm.defaults == SamplingParams(repetition_penalty=1.2)
    assert branch.params == SamplingParams(seed=SEED)
    branch.prefill(Loom(lm, "The fox").get_prefix_tokens())
    assert [piece.token for piece in islice(branch, N_TOKENS)] == node.tokens


def test_embedded_model_names_temperature_1() -> None:
    lm = weft.load("tiny")
    assert lm.chat_defaults == lm.defaults == SamplingParams()
    assert Branch.create(lm, seed=1).params == SamplingParams(seed=1)


@pytest.mark.parametrize("named", [{}, {"do_sample": True, "top_k": 1}])
def test_loom_branch_and_server_draw_the_same_text(named: dict[str, Any], tmp_path: Path) -> None:
    folder = folder_with(tmp_path / "model", **named)
    lm = weft.load(folder, engine="numpy")
    prompt = lm.format_chat(MESSAGES)
    (grown,) = Loom(lm, MESSAGES).grow(max_tokens=N_TOKENS, seed=SEED)
    branch = Branch.create(lm, seed=SEED)
    branch.prefill(prompt.ids)
    for _, _ in zip(range(N_TOKENS), branch, strict=False):
        pass
    assert branch.text == grown.text
    config = ServerConfig(models=(str(folder),), engine="numpy", port=0)
    with serving(config) as server:
        options = {"max_tokens": N_TOKENS, "seed": SEED}
        chat = server.client.post("/v1/chat/completions", json={"messages": MESSAGES, **options})
        response = server.client.post(
            "/v1/responses",
            json={"input": MESSAGES, "max_output_tokens": N_TOKENS},
        )
        (model,) = server.client.get("/api/v1/models").json()["data"]
    assert chat.json()["choices"][0]["message"]["content"] == grown.text
    answer = response.json()["output"][0]["content"][0]["text"]
    assert answer == grown.text or not named  # only top_k=1 repeats itself without a seed
    assert drawn_by(SamplingParams.from_dict(model["chat_defaults"])) == drawn_by(grown.params)


PROMPT_PENALTIES: list[dict[str, Any]] = [
    {"repetition_penalty": 1e6},
    {"dry_multiplier": 1e6, "dry_allowed_length": 1, "dry_sequence_breakers": []},
]


@pytest.mark.parametrize("penalty", PROMPT_PENALTIES, ids=lambda penalty: next(iter(penalty)))
def test_penalties_count_prompt_in_looms_and_accepted_tokens_in_branches(
    lm: weft.LM, penalty: dict[str, Any]
) -> None:
    (answer,) = Loom(lm, MESSAGES).grow(max_tokens=N_TOKENS, temperature=0)
    repeated = [*lm.format_chat(MESSAGES).ids, *answer.tokens, *answer.tokens[:2]]
    (node,) = Loom(lm, repeated).grow(max_tokens=N_TOKENS, temperature=0, **penalty)

    def tokens_of_branch(*, accepts_prompt: bool) -> list[int]:
        branch = Branch.create(lm, temperature=0, **penalty)
        for token in repeated if accepts_prompt else []:
            branch.accept(token)
        branch.prefill(repeated)
        return [piece.token for piece in islice(branch, N_TOKENS)]

    assert tokens_of_branch(accepts_prompt=True) == node.tokens
    assert tokens_of_branch(accepts_prompt=False) != node.tokens
