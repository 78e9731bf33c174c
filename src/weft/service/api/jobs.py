"""Jobs, and the events that tell of them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from .base import ErrorDetail, Json, RequestModel, ResponseModel
from .nodes import Figure, NodeObject
from .sampling import SamplingFields

Status = Literal["running", "ok", "cancelled", "interrupted", "failed"]


class BranchObject(ResponseModel):
    """One branch of a job: the node that it becomes, which is there from its first token."""

    branch: int = Field(description="Its index in the job.")
    node: int
    id: str
    parent: int
    n_tokens: int = 0
    finish_reason: str | None = Field(default=None, description="Null while it grows.")


class TokenUsage(ResponseModel):
    """What a job read and wrote, in tokens."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = Field(
        default=None,
        description="Of the prompts, those whose KV was there; null where nobody knows.",
    )


class CandidateObject(ResponseModel):
    """A node that a round of a search made."""

    node: int
    score: Figure = Field(description="What the search thinks of it; null: nothing.")
    by: str | None = Field(default=None, description="Which of several sources wrote it.")


class RoundObject(ResponseModel):
    """A round of a search: what it made, and what it goes on with."""

    round: int = Field(description="From 1.")
    candidates: list[CandidateObject]
    kept: list[int] = Field(description="Nodes that the search goes on with, the best first.")
    cost: Json = Field(description="What all rounds so far have cost.")


class JobObject(ResponseModel):
    """A piece of work that goes on without anybody waiting for it."""

    id: str
    kind: Literal["grow", "run", "load"]
    status: Status
    created: str = Field(description="ISO 8601.")
    ended: str | None = None
    loom: str | None = None
    model: str | None = None
    seed: int | None = Field(default=None, description="Grows the same branches again.")
    branches: list[BranchObject] = Field(default_factory=list)
    progress: Json = Field(default_factory=dict, description="Of a load or a run: how far it is.")
    usage: TokenUsage | None = None
    result: Json | None = Field(default=None, description="Of a run: its answer, path and cost.")
    asked: Json | None = Field(default=None, description="Of a run: how it was asked for.")
    rounds: list[RoundObject] | None = Field(
        default=None, description="Of a run: its rounds so far; not in the list of all jobs."
    )
    error: ErrorDetail | None = None
    last_event: int = Field(default=0, description="The id of its last event.")


class JobList(ResponseModel):
    """Jobs, the newest first."""

    data: list[JobObject]


class JobReply(ResponseModel):
    """A job that has begun; with `wait`, one that has ended, and its nodes."""

    job: str
    status: Status
    loom: str | None = None
    seed: int | None = None
    branches: list[BranchObject] = Field(default_factory=list)
    skipped: list[int] = Field(default_factory=list, description="Nodes that had ended.")
    nodes: list[NodeObject] = Field(default_factory=list)
    usage: TokenUsage | None = None
    result: Json | None = None
    error: ErrorDetail | None = None


class CancelJob(RequestModel):
    """What to end; it keeps what it has."""

    branches: list[int] | None = Field(default=None, description="By index; null: all.")


class StartRun(SamplingFields):
    """A search for an answer below a node."""

    strategy: str = Field(default="tot", description="By name; GET /api/v1/strategies lists them.")
    node: int | str = Field(default=0, description="Where it begins.")
    breadth: int | None = Field(
        default=None, ge=1, description="What it counts depends on the strategy."
    )
    n: int | None = Field(default=None, ge=1, description="What it counts depends on the strategy.")
    answer_tokens: int | None = Field(default=None, ge=0, description="Of a completion; 256.")
    budget_tokens: int | None = Field(default=None, ge=1, description="Generate at most so many.")
    budget_s: float | None = Field(default=None, gt=0, description="Search at most so long.")
    budget_kv_bytes: int | None = Field(default=None, ge=1, description="Of the whole tree's KV.")
    stream: bool = Field(default=False, description="Answer with the job's events.")
    wait: bool = Field(default=False, description="Answer when it has ended, with the result.")
    on_disconnect: Literal["keep", "cancel"] = "keep"
    model: str | None = Field(default=None, description="Null: the loom's own.")


class StrategyObject(ResponseModel):
    """A way to search."""

    name: str
    title: str
    says: str
    breadth: str | None = Field(description="What `breadth` counts; null: it takes none.")
    n: str | None = Field(description="What `n` counts; null: it takes none.")
    breadth_default: int | None = Field(
        default=None, description="Null: it takes none, or what suits the prompt."
    )
    n_default: int | None = Field(
        default=None, description="Null: it takes none, or what suits the prompt."
    )
    refused: list[str] = Field(
        default_factory=list, description="Sampling parameters that it has no use for."
    )


class StrategyList(ResponseModel):
    """All strategies."""

    data: list[StrategyObject]
