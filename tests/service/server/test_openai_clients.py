"""Requests of other programs succeed: recorded bodies in `requests/`, and two real programs."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import weft
from shallow import TINY

pytestmark = pytest.mark.fluent

if TYPE_CHECKING:
    from serving import Served

HERE = Path(__file__).parent
REQUESTS = [
    pytest.param(each["path"], each["body"], id=f"{file.stem}-{number}")
    for file in sorted((HERE / "requests").glob("*.json"))
    for number, each in enumerate(json.loads(file.read_text())["requests"])
]


def events_of(text: str) -> list[dict[str, Any]]:
    """The chunks of a stream."""
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_recorded_client_requests_succeed(served: Served, path: str, body: dict[str, Any]) -> None:
    answer = served.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        assert {"choices", "data", "output"} & set(answer.json())
        return
    events = events_of(answer.text)
    assert not any("error" in each and each["error"] for each in events)
    if path == "/v1/responses":
        assert events[-1]["type"] in ("response.completed", "response.incomplete")
        return
    assert answer.text.endswith("data: [DONE]\n\n")
    choices = [choice for each in events for choice in each["choices"]]
    ended = {choice["index"] for choice in choices if choice["finish_reason"]}
    assert ended == set(range(max(body.get("n") or 1, len(ended))))


def harness_reads(answer: dict[str, Any], n_given: list[int]) -> list[tuple[float, bool]]:
    """Return the sum and the greedy flag that lm-evaluation-harness reads from each choice."""
    scores = []
    for choice, given in zip(answer["choices"], n_given, strict=True):
        logprobs = choice["logprobs"]["token_logprobs"][given:-1]
        tops = choice["logprobs"]["top_logprobs"][given:-1]
        pairs = zip(logprobs, tops, strict=True)
        scores.append((sum(logprobs), all(one == max(top.values()) for one, top in pairs)))
    return scores


def in_process(lm: weft.LM, ids: list[int], given: int) -> tuple[float, bool]:
    """The same, without a server."""
    loom = weft.Loom(lm, ids[:given])
    greedy = loom.grow(max_tokens=len(ids) - given, temperature=0)[0]
    return loom.measure(ids[given:]).total, greedy.tokens == ids[given:]


def test_recorded_requests_of_lm_eval_score_as_in_process(served: Served) -> None:
    """`requests/lm_eval.json` has recorded bodies; each prompt has seven context tokens or more."""
    lm = served.service.models.lm()
    for request in json.loads((HERE / "requests" / "lm_eval.json").read_text())["requests"]:
        prompts = request["body"]["prompt"]
        n_given = [len(ids) - 2 for ids in prompts]
        scores = harness_reads(
            served.client.post(request["path"], json=request["body"]).json(), n_given
        )
        for (total, is_greedy), ids, given in zip(scores, prompts, n_given, strict=True):
            wanted, same = in_process(lm, ids, given)
            assert total == pytest.approx(wanted, abs=1e-4)
            assert is_greedy == same


def test_echoed_logprobs_include_the_generated_end_token(served: Served) -> None:
    """The harness ignores the last token, so an end token must be among the logprobs."""
    lm = served.service.models.lm()
    chat = lm.format_chat([{"role": "user", "content": weft.samples.sum}])
    ids = [*chat.ids, *weft.Loom(lm, chat).grow(temperature=0)[0].tokens]
    body = {"prompt": ids, "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0}
    logprobs = served.client.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert len(logprobs["token_logprobs"]) == len(ids) + 1
    assert logprobs["tokens"][-1] == "<|end|>"


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small task for lm-evaluation-harness."""
    folder = tmp_path_factory.mktemp("task")
    data = shutil.copy(HERE / "sums" / "sums.jsonl", folder)
    (folder / "weft_sums.yaml").write_text(
        f"""
task: weft_sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
    )
    return folder


@pytest.mark.slow
def test_lm_eval_scores_as_in_process(served: Served, task: Path) -> None:
    """Scores of all choices agree to 1e-4: the harness adds floats that JSON has rounded."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    code = f"""
import json, lm_eval
from lm_eval.tasks import TaskManager
result = lm_eval.simple_evaluate(
    model="local-completions",
    model_args="model=tiny,base_url={served.url}/v1/completions,tokenizer={TINY},max_length=512",
    tasks=["weft_sums"], task_manager=TaskManager(include_path={str(task)!r}), batch_size=4,
)
samples = result["samples"]["weft_sums"]
print("SCORES" + json.dumps([[s["arguments"], s["resps"]] for s in samples]))
"""
    env = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(task), "PATH": "/bin"}
    run = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    lm = served.service.models.lm()
    line = next(line for line in run.stdout.splitlines() if line.startswith("SCORES"))
    samples = json.loads(line[6:])
    assert len(samples) == 4
    for arguments, answers in samples:
        for (before, after), [(total, is_greedy)] in zip(arguments, answers, strict=True):
            ids = lm.tokenize(before + after, add_bos=False)
            given = len(lm.tokenize(before, add_bos=False))
            wanted, same = in_process(lm, ids, given)
            assert float(total) == pytest.approx(wanted, abs=1e-4)
            assert bool(is_greedy) == same


@pytest.mark.slow
def test_llm_answers_as_in_process(served: Served, tmp_path: Path) -> None:
    pytest.importorskip("llm", reason="llm is not installed")
    (tmp_path / "extra-openai-models.yaml").write_text(
        f"""
- {{model_id: chat, model_name: tiny, api_base: "{served.url}/v1", supports_schema: true}}
- {{model_id: text, model_name: tiny, api_base: "{served.url}/v1", completion: true}}
"""
    )

    def ask(*words: str) -> str:
        command = [sys.executable, "-m", "llm", *words]
        env = {"LLM_USER_PATH": str(tmp_path), "PATH": "/bin"}
        run = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        return run.stdout.rstrip("\n")

    lm = served.service.models.lm()
    answer = weft.Loom(lm, weft.samples.sum).grow(temperature=0)[0].text
    assert ask("-m", "chat", weft.samples.sum, "-o", "temperature", "0") == answer
    unstreamed = ask("-m", "chat", "--no-stream", weft.samples.sum, "-o", "temperature", "0")
    assert unstreamed == answer
    text = weft.Loom(lm, weft.samples.opening, template=False)
    wanted = text.grow(temperature=0, max_tokens=8)[0].text
    completion = ask(
        "-m", "text", weft.samples.opening, "-o", "temperature", "0", "-o", "max_tokens", "8"
    )
    assert completion == wanted
