"""Rollouts of a training step: trees of `weft.rollouts`, and `generate` as TRL's GRPOTrainer calls
it.

Both sides run one Transformers model object in float32, in turn in one run. Threads and temperature
are the same, and there are no filters. `generate` gets each prompt once per rollout in one
left-padded batch, and reports no log-probabilities. Weft starts without KV.

Usable tokens are those of the completions, with the end token and without padding. Computed tokens
are all that the model ran: prompts, completions and padding.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, NamedTuple

from common import reach_recipe, report

from weft import rollouts


class Rollouts(NamedTuple):
    """Completions by prompt, and the number of tokens that the model computed for them."""

    completions: list[list[list[int]]]
    n_computed: int


def prompts(n: int, seed: int = 3) -> list[list[dict[str, Any]]]:
    """Return word problems of the embedded model's kind, as chats."""
    reach_recipe()
    from recipe.corpus.word_problems import word_problem

    rng = Random(seed)
    return [[{"role": "user", "content": word_problem(rng).user}] for _ in range(n)]


def by_generate(model: Any, tokenizer: Any, chats: Sequence[Any], args: Any) -> Rollouts:
    """Sample with Transformers' `generate`, as GRPOTrainer does without vLLM."""
    import torch

    ids = [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        for chat in chats
        for _ in range(args.rollouts)
    ]
    longest = max(map(len, ids))
    ends = {model.generation_config.eos_token_id, tokenizer.eos_token_id} - {None}
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else min(ends)
    padded = torch.tensor([[pad] * (longest - len(row)) + row for row in ids])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in ids])
    with torch.no_grad():
        out = model.generate(
            input_ids=padded,
            attention_mask=mask,
            max_new_tokens=args.max_tokens,
            do_sample=True,
            temperature=args.temperature,
            top_p=1.0,
            top_k=0,
            pad_token_id=pad,
            eos_token_id=sorted(ends),
        )
    rows = out[:, longest:].tolist()
    for row in rows:
        end = next((at for at, token in enumerate(row) if token in ends), len(row))
        del row[end + 1 :]
    groups = [rows[at : at + args.rollouts] for at in range(0, len(rows), args.rollouts)]
    return Rollouts(groups, out.numel())


def by_tree(lm: Any, chats: Sequence[Any], args: Any, branch_at: Any, seed: int) -> Rollouts:
    """Sample trees; the LM starts without KV."""
    lm.clear_cache()
    before = lm.stats()
    trees = rollouts.grow(
        lm,
        chats,
        args.rollouts,
        branch_at=branch_at,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        seed=seed,
    )
    after = lm.stats()
    counts = ("prefilled", "recomputed", "decoded")
    n_computed = sum(getattr(after, name) - getattr(before, name) for name in counts)
    return Rollouts([tree.completions for tree in trees], n_computed)


def measure(sides: dict[str, Callable[[int], Rollouts]], n_rounds: int) -> list[dict[str, object]]:
    """Run the sides in turn; return a row per side, with the totals of all rounds."""
    seconds, results = {name: 0.0 for name in sides}, {name: list[Rollouts]() for name in sides}
    for number in range(n_rounds):
        for name, side in sides.items():
            start = time.process_time()
            results[name].append(side(number))
            seconds[name] += time.process_time() - start
    rows: list[dict[str, object]] = []
    for name, rounds in results.items():
        groups = [group for one in rounds for group in one.completions]
        n_usable = sum(len(completion) for group in groups for completion in group)
        n_computed = sum(one.n_computed for one in rounds)
        distinct = sum(len({tuple(completion) for completion in group}) for group in groups)
        rows.append(
            {
                "side": name,
                "CPU s": seconds[name] / n_rounds,
                "usable": n_usable / n_rounds,
                "computed": n_computed / n_rounds,
                "computed / usable": n_computed / n_usable,
                "CPU ms / usable": 1000 * seconds[name] / n_usable,
                "distinct of a group": distinct / len(groups),
                "CPU ms / distinct": 1000 * seconds[name] / distinct,
            }
        )
    first = rows[-1]["CPU ms / usable"]
    assert isinstance(first, float)
    return [{**row, "x": first / float(str(row["CPU ms / usable"]))} for row in rows]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="tiny", help="a folder; tiny")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--rollouts", type=int, default=16)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--rounds", type=int, default=1, help="the totals of all rounds count; 1")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import weft
    from weft.engines.hub import resolve

    torch.set_num_threads(args.threads)
    folder = str(resolve(args.model))
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    chats = prompts(args.prompts)
    quarter = args.max_tokens // 4
    shapes = {
        "independent": [0],
        "entropy": "entropy",
        "steps": "steps",
        f"depths 0, {quarter // 2}, {quarter}": [0, quarter // 2, quarter],
    }
    with weft.load(model, tokenizer) as lm:
        sides: dict[str, Callable[[int], Rollouts]] = {
            f"weft, {name}": (lambda seed, at=at: by_tree(lm, chats, args, at, seed))  # type: ignore[misc]
            for name, at in shapes.items()
        }
        sides["generate"] = lambda _: by_generate(model, tokenizer, chats, args)
        rows = measure(sides, args.rounds)
    report(
        "rollouts",
        rows,
        model=args.model,
        threads=args.threads,
        temperature=args.temperature,
    )


if __name__ == "__main__":
    main()
