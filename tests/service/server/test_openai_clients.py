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
    """What lm-evaluation-harness makes of an answer: the sum, and whether greedy says the same."""
    made = []
    for choice, given in zip(answer["choices"], n_given, strict=True):
        logprobs = choice["logprobs"]["token_logprobs"][given:-1]
        tops = choice["logprobs"]["top_logprobs"][given:-1]
        pairs = zip(logprobs, tops, strict=True)
        made.append((sum(logprobs), all(one == max(top.values()) for one, top in pairs)))
    return made


def in_process(lm: weft.LM, ids: list[int], given: int) -> tuple[float, bool]:
    """The same, without a server."""
    loom = weft.Loom(lm, ids[:given])
    greedy = loom.grow(max_tokens=len(ids) - given, temperature=0)[0]
    return loom.measure(ids[given:]).total, greedy.tokens == ids[given:]


def test_a_harness_scores_as_in_process(served: Served) -> None:
    """`requests/lm_eval.json` are its real bodies; its prompts have seven tokens or more given."""
    lm = served.service.models.lm()
    for each in json.loads((HERE / "requests" / "lm_eval.json").read_text())["requests"]:
        prompts = each["body"]["prompt"]
        n_given = [len(ids) - 2 for ids in prompts]
        found = harness_reads(served.client.post(each["path"], json=each["body"]).json(), n_given)
        for (total, is_greedy), ids, given in zip(found, prompts, n_given, strict=True):
            wanted, same = in_process(lm, ids, given)
            assert total == pytest.approx(wanted, abs=1e-4)
            assert is_greedy == same


def test_the_last_token_counts_where_the_text_would_end(served: Served) -> None:
    """A harness leaves the one new token out; where that is the end token it is there, too."""
    lm = served.service.models.lm()
    chat = lm.format_chat([{"role": "user", "content": weft.samples.sum}])
    ids = [*chat.ids, *weft.Loom(lm, chat).grow(temperature=0)[0].tokens]
    body = {"prompt": ids, "max_tokens": 1, "logprobs": 1, "echo": True, "temperature": 0}
    figures = served.client.post("/v1/completions", json=body).json()["choices"][0]["logprobs"]
    assert len(figures["token_logprobs"]) == len(ids) + 1
    assert figures["tokens"][-1] == "<|end|>"


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
def test_the_real_harness_scores_as_in_process(served: Served, task: Path) -> None:
    """Every choice of every question, to 1e-4: its sums are of floats that JSON has carried."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    code = f"""
import json, lm_eval
from lm_eval.tasks import TaskManager
made = lm_eval.simple_evaluate(
    model="local-completions",
    model_args="model=tiny,base_url={served.url}/v1/completions,tokenizer={TINY},max_length=512",
    tasks=["weft_sums"], task_manager=TaskManager(include_path={str(task)!r}), batch_size=4,
)
samples = made["samples"]["weft_sums"]
print("FOUND" + json.dumps([[s["arguments"], s["resps"]] for s in samples]))
"""
    env = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(task), "PATH": "/bin"}
    run = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    lm = served.service.models.lm()
    line = next(line for line in run.stdout.splitlines() if line.startswith("FOUND"))
    found = json.loads(line[5:])
    assert len(found) == 4
    for arguments, answers in found:
        for (before, after), [(total, is_greedy)] in zip(arguments, answers, strict=True):
            whole = lm.tokenize(before + after, add_bos=False)
            given = len(lm.tokenize(before, add_bos=False))
            wanted, same = in_process(lm, whole, given)
            assert float(total) == pytest.approx(wanted, abs=1e-4)
            assert bool(is_greedy) == same


@pytest.mark.slow
def test_the_real_llm_answers(served: Served, tmp_path: Path) -> None:
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
    whole = ask("-m", "chat", "--no-stream", weft.samples.sum, "-o", "temperature", "0")
    assert whole == answer
    text = weft.Loom(lm, weft.samples.opening, template=False)
    wanted = text.grow(temperature=0, max_tokens=8)[0].text
    found = ask(
        "-m", "text", weft.samples.opening, "-o", "temperature", "0", "-o", "max_tokens", "8"
    )
    assert found == wanted
