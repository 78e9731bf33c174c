"""The keywords that all searches share, read and checked once."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError
from ..sampling.params import BranchOptions, SamplingParams
from .core import Budget, whole
from .result import Level
from .task import Task

Progress = Callable[[Level], object]


class SearchOptions(BranchOptions, total=False):
    """What every search takes beside its own numbers; the other keywords are SamplingParams.

    task: words the questions and checks the answer. None recognises a Game of 24 prompt.
    budget_tokens, budget_s, budget_kv_bytes: what may be spent; `cost.stopped` says which one
    ended the search. The last is what the KV of the whole tree may take.
    seed: the same seed gives the same tree, unless `budget_s` cuts it.
    progress: called after each round with a `Level`.
    resume: a file. The search is written to it after each round; where it is there already, the
    search goes on from it, and ends as it would have without the break.
    """

    task: Task | None
    budget_tokens: int | None
    budget_s: float | None
    budget_kv_bytes: int | None
    progress: Progress | None
    resume: str | os.PathLike[str] | None


@dataclass(frozen=True, slots=True)
class Settings:
    """SearchOptions as they were read. sampling: of whatever the search grows, but the seed."""

    task: Task | None
    budget: Budget
    seed: int | None
    progress: Progress | None
    resume: str | None
    sampling: dict[str, Any]

    @classmethod
    def read(cls, options: Mapping[str, Any], **defaults: Any) -> Settings:
        """Take the options apart; `defaults` are the search's own sampling parameters."""
        rest = {**defaults, **options}
        task = rest.pop("task", None)
        budget = Budget(
            rest.pop("budget_tokens", None),
            rest.pop("budget_s", None),
            rest.pop("budget_kv_bytes", None),
        )
        seed, progress = rest.pop("seed", None), rest.pop("progress", None)
        resume = rest.pop("resume", None)
        whole("max_tokens", rest["max_tokens"])
        if "n" in rest:
            raise ConfigError("n has no meaning for this search; leave it out")
        SamplingParams.resolve(rest, SamplingParams())
        path = None if resume is None else os.fspath(resume)
        return cls(task, budget, seed, progress, path, rest)
