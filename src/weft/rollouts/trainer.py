"""`trl`: rollouts for TRL's GRPOTrainer, over the model object that it trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import count, groupby
from typing import Any

from .._core.sampling.rng import stream_of
from ..errors import ConfigError
from ..lm.lm import LM
from .growth import BranchAt, grow_from_ids
from .tree import Tree

RolloutFunc = Callable[[list[Any], Any], dict[str, list[Any]]]


def trl(*, branch_at: BranchAt = "entropy", width: int | None = None) -> RolloutFunc:
    """Return a `rollout_func` for TRL's GRPOTrainer: `GRPOTrainer(…, rollout_func=trl())`.

    Weft runs the same model object that the trainer trains, so the weights exist once. KV of older
    weights is never used, and none is kept while the trainer computes gradients. Generations,
    completion length and sampling are those of the GRPOConfig.

    Args:
        branch_at, width: as for `grow`.

    The function raises ConfigError for settings of the GRPOConfig that rollouts cannot follow.
    """
    calls = count()
    lms: list[LM] = []  # keeps the LM alive between calls

    def rollout(prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        model = trainer.accelerator.unwrap_model(trainer.model)
        lm = LM.from_model(model, trainer.processing_class)
        lms[:] = [lm]
        # TRL repeats each prompt once per generation.
        groups = [(prompt, len(list(same))) for prompt, same in groupby(prompts)]
        lineage = (next(calls), trainer.accelerator.process_index)
        trees = grow_from_ids(
            lm,
            [_prompt_ids(trainer, prompt) for prompt, _ in groups],
            [n for _, n in groups],
            branch_at,
            width=width,
            max_tokens=trainer.max_completion_length,
            seed=stream_of(trainer.args.seed, lineage),
            **_sampling(trainer),
        )
        lm.clear_cache()  # the trainer needs the memory, and its next step changes the weights
        return _columns(trees)

    return rollout


def _prompt_ids(trainer: Any, prompt: str | Sequence[dict[str, Any]]) -> list[int]:
    """Return the token ids of a prompt, as the trainer's own generation tokenizes it."""
    tokenizer = trainer.processing_class
    if isinstance(prompt, str):
        return list(tokenizer(prompt)["input_ids"])
    encoded = tokenizer.apply_chat_template(
        prompt,
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        **trainer.chat_template_kwargs,
    )
    return list(encoded["input_ids"])


def _sampling(trainer: Any) -> dict[str, Any]:
    """Return the sampling parameters of a trainer. Raises: ConfigError for unsupported ones."""
    if trainer.repetition_penalty not in (None, 1.0):
        raise ConfigError(
            f"repetition_penalty of the GRPOConfig is {trainer.repetition_penalty}; rollouts need 1"
        )
    for name in ("generation_kwargs", "use_vllm"):
        if getattr(trainer.args, name, None):
            raise ConfigError(f"{name} of the GRPOConfig has no effect on rollouts; leave it out")
    filters = {"top_p": trainer.top_p, "top_k": trainer.top_k, "min_p": trainer.min_p}
    given = {name: value for name, value in filters.items() if value is not None}
    # Transformers divides by the temperature before it filters.
    return {"temperature": trainer.temperature, "temperature_first": True, **given}


def _columns(trees: Sequence[Tree]) -> dict[str, list[Any]]:
    """Return the trees' rollouts as TRL's columns, in the order of the prompts."""
    columns: dict[str, list[Any]] = {"prompt_ids": [], "completion_ids": [], "logprobs": []}
    for tree in trees:
        for leaf, completion in zip(tree.leaves, tree.completions, strict=True):
            columns["prompt_ids"].append(list(tree.prompt_ids))
            columns["completion_ids"].append(completion)
            columns["logprobs"].append([one for part in leaf.path for one in part.policy_logprobs])
    return columns
