"""lm-evaluation-harness through the server scores as the library does in-process."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import weft
from weft.engines.hub import resolve

if TYPE_CHECKING:
    from serving import Served

pytest.importorskip("lm_eval", reason="lm-eval is not installed; make test-plugins")
pytest.importorskip("transformers", reason="transformers is not installed")
pytestmark = pytest.mark.filterwarnings("ignore")  # of other packages' code
TASKS = Path(__file__).parents[3] / "benchmarks" / "lm_eval"


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def evaluated(served: Served, **more: Any) -> dict[str, Any]:
    """Return the results of the harness, which gets only the address and the tokenizer."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    results = simple_evaluate(
        model="local-completions",
        model_args={
            "model": "tiny",
            "base_url": f"{served.url}/v1/completions",
            "tokenizer": str(resolve("tiny")),
            "tokenizer_backend": "huggingface",
            "max_length": 2048,
            **more,
        },
        tasks=["weft_small_choice"],
        batch_size=4,
        task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
        bootstrap_iters=0,
    )
    assert results is not None
    return dict(results)


def scored(lm: weft.LM, question: str, choice: str) -> tuple[float, bool]:
    """Return the log-probability of a continuation, and whether greedy decoding gives it."""
    context = lm.tokenize(question, add_bos=False)
    ids = lm.tokenize(question + choice, add_bos=False)
    loom, rest = weft.Loom(lm, context), ids[len(context) :]
    at, is_greedy = loom, True
    for token in rest:
        is_greedy = is_greedy and at.next(1)[0].id == token
        at = at.add([token])
    return math.fsum(loom.measure(rest).logprobs), is_greedy


@pytest.mark.parametrize("num_concurrent", [1, 4])
def test_lm_eval_scores_equal_those_of_the_library(served: Served, num_concurrent: int) -> None:
    results = evaluated(served, num_concurrent=num_concurrent)
    samples = results["samples"]["weft_small_choice"]
    assert len(samples) == 16
    n_right = 0
    with weft.load("tiny") as lm:
        for sample in samples:
            doc = sample["doc"]
            expected = [scored(lm, doc["question"], choice) for choice in doc["choices"]]
            scores = [response[0] for response in sample["resps"]]
            for (logprob, greedy), (ours, is_greedy) in zip(scores, expected, strict=True):
                assert float(logprob) == pytest.approx(ours, abs=2e-4)
                assert str(greedy) == str(is_greedy)
            best = max(range(3), key=lambda at: expected[at][0])
            n_right += best == doc["answer"]
    assert results["results"]["weft_small_choice"]["acc,none"] == n_right / 16
    assert n_right >= 8  # chance is 5; the model knows a little
