"""Multiple-choice questions in lm-evaluation-harness: `--model weft` and `--model hf`.

Questions are generated in the shape of HellaSwag (4 endings, 0 and 10 shots) and of MMLU (4
options, 5 shots). Shots are the same for all questions, as `sampler: first_n` takes them. Both
models answer the harness's `loglikelihood` requests, in turn in one run. Weights are float32, and
both have the same number of threads. CPU time includes tokenizing.

`hf` runs at the fastest of several batch sizes. It shares nothing between questions, so the first
--hf-questions of them give its time per question.

Rounding: both sums of log-probabilities are compared with those of the same weights in float64, for
the first --exact requests. `weft error` and `hf error` are the largest differences.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Sequence
from typing import Any

from common import report

MUST = {"HellaSwag 0-shot": 2.0, "HellaSwag 10-shot": 6.0, "MMLU 5-shot": 6.0}

_PEOPLE = "A woman|A man|The older boy|A young girl|The coach|Two friends|The cook|A tall guard"
_DOING = (
    "is standing in front of a wooden table|walks slowly across the empty gym|is kneeling next to a"
    " small boat|holds up a bottle of cleaning spray|starts to sort the cards by color|pours warm"
    " water into a shallow bowl|is explaining the rules to a small group|opens the gate and waves"
)
_DETAIL = (
    "while people in the background watch and talk|and shows the label to the camera|before the"
    " music in the hall starts again|because the first attempt did not work|as the light outside"
    " turns orange and then gray|with a towel folded over one arm|and checks each part for cracks"
)
_SUBJECTS = (
    "the pressure of a gas|the price of grain|a cell membrane|an early treaty|a falling body"
)
_CHANGES = (
    "doubles while the temperature stays constant|is measured twice under equal conditions|falls"
    " below the level of the previous year|is separated from its surroundings by a thin wall"
)
_OPTIONS = (
    "It increases by a factor of two|It stays the same in both cases|It depends on the mass of the"
    " sample only|It falls until the two sides are equal|It cannot be known from these data|The"
    " second effect cancels the first one"
)


def sentence(rng: random.Random) -> str:
    """Return a sentence of about 20 tokens."""
    return " ".join(rng.choice(part.split("|")) for part in (_PEOPLE, _DOING, _DETAIL)) + "."


def endings_question(rng: random.Random) -> tuple[str, list[str]]:
    """Return a context of about 70 tokens and four endings of about 30."""
    context = "Sports and hobbies: " + " ".join(sentence(rng) for _ in range(3))
    people = rng.choice(_PEOPLE.split("|"))
    endings = [f" Then {sentence(rng)[0].lower()}{sentence(rng)[1:]}" for _ in range(4)]
    return f"{context} {people}", [f"{ending} The others laugh." for ending in endings]


def options_question(rng: random.Random) -> tuple[str, list[str]]:
    """Return a question with four options, about 100 tokens, and the answers A to D."""
    subject, change = rng.choice(_SUBJECTS.split("|")), rng.choice(_CHANGES.split("|"))
    stem = (
        f"In a careful study {subject} {change}. Number {rng.randrange(1000)} of the series was"
        " repeated by another group."
    )
    question = f"{stem} What happens to the result when all other conditions are equal?"
    options = rng.sample(_OPTIONS.split("|"), 4)
    lines = [f"{name}. {option}" for name, option in zip("ABCD", options, strict=True)]
    return "\n".join([question, *lines, "Answer:"]), [f" {name}" for name in "ABCD"]


def task(name: str, n: int, seed: int = 7) -> list[tuple[str, list[str]]]:
    """Return n questions of a task as (context with its shots, continuations)."""
    rng = random.Random(seed)
    make = options_question if name.startswith("MMLU") else endings_question
    n_shots = int(name.split()[1].partition("-")[0])
    head = ""
    if name.startswith("MMLU"):
        head = "The following are multiple choice questions (with answers) about physics.\n\n"
    for _ in range(n_shots):
        context, choices = make(rng)
        head += context + rng.choice(choices) + "\n\n"
    return [(head + context, choices) for context, choices in (make(rng) for _ in range(n))]


def instances(questions: Sequence[tuple[str, list[str]]]) -> list[Any]:
    """Return the harness's requests of questions."""
    from lm_eval.api.instance import Instance

    pairs = [(context, choice) for context, choices in questions for choice in choices]
    return [
        Instance(request_type="loglikelihood", doc={}, arguments=pair, idx=i)
        for i, pair in enumerate(pairs)
    ]


def timed(model: Any, questions: Sequence[tuple[str, list[str]]]) -> tuple[float, list[Any]]:
    """Return the CPU seconds per question, and the answers."""
    requests = instances(questions)
    start = time.process_time()
    answers = model.loglikelihood(requests, disable_tqdm=True)
    return (time.process_time() - start) / len(questions), answers


def fastest_batch(hf: Any, questions: Sequence[tuple[str, list[str]]], sizes: Sequence[int]) -> int:
    """Return the batch size with the lowest CPU time on some questions."""
    seconds = {}
    for size in sizes:
        hf.batch_size_per_gpu = size
        seconds[size] = timed(hf, questions)[0]
    return min(seconds, key=seconds.__getitem__)


def exact_sums(folder: str, requests: Sequence[tuple[list[int], list[int]]]) -> list[float]:
    """Return the log-probability of each continuation with all weights and steps in float64.

    requests: pairs of token ids: context and continuation.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    sums = []
    for context, continuation in requests:
        ids = torch.tensor([[*context, *continuation][:-1]])
        with torch.no_grad():
            logits = model(input_ids=ids, logits_to_keep=len(continuation)).logits[0]
        logprobs = logits.log_softmax(-1).gather(1, torch.tensor(continuation)[:, None])
        sums.append(float(logprobs.sum()))
    return sums


def largest_error(answers: Sequence[Any], exact: Sequence[float]) -> str:
    """Return the largest difference of the first answers from the exact sums, as a text."""
    pairs = zip(answers, exact, strict=False)
    return f"{max((abs(one[0] - other) for one, other in pairs), default=0.0):.1e}"


def run(args: argparse.Namespace) -> list[dict[str, object]]:
    """Return a row per task."""
    import torch
    from lm_eval.models.huggingface import HFLM
    from lm_eval_weft import WeftLM

    import weft
    from weft.engines.hub import resolve

    torch.set_num_threads(args.threads)
    folder = str(resolve(args.model))
    hf = HFLM(pretrained=folder, dtype="float32", device="cpu")
    rows: list[dict[str, object]] = []
    for name in args.tasks.split(","):
        questions = task(name, args.questions)
        few = questions[: args.hf_questions]
        sizes = args.few_shot_sizes if not name.endswith(" 0-shot") else args.sizes
        hf.batch_size_per_gpu = fastest_batch(
            hf, few[: max(len(few) // 4, 1)], [int(size) for size in sizes.split(",")]
        )
        ours, theirs = [], []
        for _ in range(args.rounds):
            model = WeftLM(folder, engine=args.engine, dtype="float32")
            seconds, answers = timed(model, questions)
            ours.append(seconds)
            engine = model.lm.info.name
            n_tokens = len(model.tok_encode(questions[0][0]))
            model.lm.close()
            seconds, expected = timed(hf, few)
            theirs.append(seconds)
        difference = max(
            abs(one[0] - other[0]) for one, other in zip(answers, expected, strict=False)
        )
        pairs = [(context, choice) for context, choices in few for choice in choices]
        exact = exact_sums(folder, [hf._encode_pair(*pair) for pair in pairs[: args.exact]])
        row: dict[str, object] = {
            "task": name,
            "prompt tokens": n_tokens,
            "weft ms": 1000 * min(ours),
            "hf ms": 1000 * min(theirs),
            "hf batch": hf.batch_size_per_gpu,
            "x": min(theirs) / min(ours),
            "must": MUST[name],
            "max difference": f"{difference:.1e}",
            "largest sum": f"{max(abs(one[0]) for one in expected):.0f}",
            "weft error": largest_error(answers, exact),
            "hf error": largest_error(expected, exact),
        }
        rows.append(row)
        print(row, engine, weft.__version__, flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny", help="a folder; tiny")
    parser.add_argument("--engine", default="auto", help="the engine of weft; auto")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--hf-questions", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=1, help="the fastest round counts; 1")
    parser.add_argument("--exact", type=int, default=12, help="requests to repeat in float64; 12")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sizes", default="1,4,16,64", help="batch sizes of hf without shots")
    parser.add_argument("--few-shot-sizes", default="1,4", help="batch sizes of hf with shots")
    parser.add_argument("--tasks", default=",".join(MUST))
    args = parser.parse_args()
    rows = run(args)
    report("score_choices", rows, model=args.model, threads=args.threads)


if __name__ == "__main__":
    main()
