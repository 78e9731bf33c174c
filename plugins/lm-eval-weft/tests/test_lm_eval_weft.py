"""The harness's requests to `--model weft` and to `--model hf`, on the same float32 weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed; make test-plugins")
pytest.importorskip("lm_eval_weft", reason="lm-eval-weft is not installed; make test-plugins")
pytest.importorskip("torch", reason="torch is not installed")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval_weft import WeftLM

import weft
from weft.engines.hub import resolve

pytestmark = pytest.mark.filterwarnings("ignore")  # of other packages' code
TASKS = Path(weft.__path__[0]).parents[1] / "benchmarks" / "lm_eval"
SHOTS = "13 - 9 = 4 (left: 4 4 10)\n4 + 9 = 13 (left: 10 13 13)\n" * 3
PAIRS = [
    (SHOTS + "10 - 4 =", " 6"),
    (SHOTS + "10 - 4 =", " 14 (left: 14 1)"),
    (SHOTS + "10 - 4 = ", "6"),  # the space belongs to the continuation
    (SHOTS + "4 * 4 =\n", "16 (left: 16 1)"),
    ("Once upon", " a time there was a fox."),
    ("Once upon a t", "ime ago"),  # "time" is one token
    ("", "Once upon a time"),
    ("<|user|>\nhello<|end|>\n", "hello"),
    ("x " * 1500, " x" * 200),  # longer than the maximum length
]


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))


@pytest.fixture(scope="module", params=["numpy", "torch"])
def ours(request: pytest.FixtureRequest) -> Iterator[WeftLM]:
    model = WeftLM("tiny", engine=request.param, dtype="float32", max_length=512)
    yield model
    model.lm.close()


@pytest.fixture(scope="module")
def theirs() -> HFLM:
    return HFLM(
        pretrained=str(resolve("tiny")), dtype="float32", device="cpu", batch_size=4, max_length=512
    )


def requests(kind: str, arguments: list[Any]) -> list[Instance]:
    return [
        Instance(request_type=kind, doc={}, arguments=each, idx=i)  # type: ignore[arg-type]
        for i, each in enumerate(arguments)
    ]


def assert_equal_scores(ours: Any, theirs: Any) -> None:
    for (total, is_greedy), (expected, expected_greedy) in zip(ours, theirs, strict=True):
        assert total == pytest.approx(expected, abs=1e-4)
        assert is_greedy == expected_greedy


def test_loglikelihoods_equal_those_of_transformers(ours: WeftLM, theirs: HFLM) -> None:
    instances = requests("loglikelihood", PAIRS)
    assert_equal_scores(ours.loglikelihood(instances), theirs.loglikelihood(instances))


def test_token_ids_equal_those_of_transformers(ours: WeftLM, theirs: HFLM) -> None:
    for context, continuation in PAIRS:
        assert ours.tok_encode(context) == theirs.tok_encode(context)
        if context:
            expected = theirs._encode_pair(context, continuation)
            assert ours._encode_pair(context, continuation) == expected
    assert ours.prefix_token_id == theirs.prefix_token_id
    assert ours.eot_token_id == theirs.eot_token_id


def test_rolling_loglikelihoods_equal_those_of_transformers(ours: WeftLM, theirs: HFLM) -> None:
    instances = requests("loglikelihood_rolling", [("Once upon a time.",), (SHOTS * 20,)])
    assert len(ours.tok_encode(SHOTS * 20)) > 2 * ours.max_length
    expected = theirs.loglikelihood_rolling(instances)
    assert ours.loglikelihood_rolling(instances) == pytest.approx(expected, rel=1e-6)


def test_greedy_texts_equal_those_of_transformers(ours: WeftLM, theirs: HFLM) -> None:
    options = {"until": ["\n"], "max_gen_toks": 24, "do_sample": False}
    long = {"until": [], "max_gen_toks": 8}
    instances = requests(
        "generate_until", [(SHOTS, options), (SHOTS + "10 - 4", options), ("Once upon", long)]
    )
    texts = ours.generate_until(instances)
    assert texts == theirs.generate_until(instances)
    assert "\n" not in texts[0]
    assert all(texts)


def test_sampled_texts_repeat_with_their_seed(ours: WeftLM) -> None:
    options = {"until": ["\n"], "do_sample": True, "temperature": 1.0, "seed": 3, "max_tokens": 8}
    instances = requests("generate_until", [("Once upon", options)])
    assert ours.generate_until(instances) == ours.generate_until(instances)


@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_chats_equal_those_of_transformers(
    ours: WeftLM, theirs: HFLM, add_generation_prompt: bool
) -> None:
    chat = [{"role": "user", "content": "Hello"}]
    if not add_generation_prompt:
        chat.append({"role": "assistant", "content": "Once upon "})
    rendered = ours.apply_chat_template(chat, add_generation_prompt)
    assert rendered == theirs.apply_chat_template(chat, add_generation_prompt)
    assert ours.chat_template(True) == theirs.chat_template(True)
    assert ours.chat_template(False) is None


def test_tasks_have_equal_results(ours: WeftLM, theirs: HFLM) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    def evaluate(model: Any) -> dict[str, Any]:
        report = simple_evaluate(
            model=model,
            tasks=["weft_small_choice"],
            task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
            bootstrap_iters=0,
            apply_chat_template=False,
        )
        assert report is not None
        return dict(report)

    results, expected = evaluate(ours), evaluate(theirs)
    name = "weft_small_choice"
    assert results["results"][name] == expected["results"][name]
    for one, other in zip(results["samples"][name], expected["samples"][name], strict=True):
        mine, reference = [[each[0] for each in sample["resps"]] for sample in (one, other)]
        assert_equal_scores(mine, reference)


def test_entry_point_names_the_class() -> None:
    from importlib.metadata import entry_points

    (point,) = entry_points(group="lm_eval.models", name="weft")
    assert point.load() is WeftLM


def test_model_is_registered_by_its_name() -> None:
    from lm_eval.api.registry import get_model

    assert get_model("weft") is WeftLM


def test_command_evaluates_a_task(tmp_path: Path) -> None:
    import json
    import subprocess
    import sys

    arguments = [
        *("--model", "weft", "--model_args", "model=tiny,engine=numpy", "--limit", "4"),
        *("--tasks", "weft_small_choice", "--include_path", str(TASKS)),
        *("--output_path", str(tmp_path / "out")),
    ]
    subprocess.run(
        [sys.executable, "-m", "lm_eval_weft", *arguments], check=True, capture_output=True
    )
    (file,) = (tmp_path / "out").rglob("results_*.json")
    results = json.loads(file.read_text())
    assert 0 <= results["results"]["weft_small_choice"]["acc,none"] <= 1
    assert results["config"]["weft_engine"] == "numpy"


def test_maximum_above_the_context_raises(ours: WeftLM) -> None:
    from weft.errors import ConfigError

    with pytest.raises(ConfigError, match="max_gen_toks is 512"):
        ours.generate_until(requests("generate_until", [("x", {"max_gen_toks": 512})]))
