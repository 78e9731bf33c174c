"""Jobs and their events."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from typing_extensions import TypedDict  # pydantic rejects typing's before Python 3.12

from .base import ErrorDetail, Json, RequestModel, ResponseModel
from .nodes import Figure, NodeObject
from .sampling import SamplingFields

Status = Literal["running", "ok", "cancelled", "interrupted", "failed"]


class BranchObject(ResponseModel):
    """One branch of a job, and its node, which exists from the first token."""

    branch: int = Field(description="The branch's index in the job.")
    node: int
    id: str
    parent: int
    n_tokens: int = 0
    finish_reason: str | None = Field(default=None, description="Null while the branch is growing.")
    model: str | None = Field(
        default=None, description="The model that grows it, if not the loom's."
    )


class TokenUsage(ResponseModel):
    """Token counts of a job."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int | None = Field(
        default=None,
        description="Prompt tokens whose KV was cached; null if unknown.",
    )


class SearchCost(TypedDict):
    """Tokens, time and candidates that a search has used."""

    tokens: Annotated[
        int, Field(description="Generated tokens, including end tokens and all proposals.")
    ]
    seconds: Annotated[float, Field(description="Wall-clock time.")]
    candidates: Annotated[int, Field(description="Number of proposed lines and answers.")]
    valued: Annotated[int, Field(description="Number of candidates that got a score.")]
    prompt_tokens: Annotated[
        int, Field(description="Tokens of value questions, which are read but not generated.")
    ]
    stopped: Annotated[
        Literal["tokens", "seconds", "kv", "constraint"] | None,
        Field(description="The budget that ended the search early, or constraint; null: none."),
    ]


class ScoredText(TypedDict):
    """The text of a node and its score."""

    text: str
    score: Annotated[Figure, Field(description="Null: not scored.")]


class AnswerVotes(TypedDict):
    """An answer of a search and the number of texts that have it."""

    answer: str | int | float | None
    count: int


class AnswerGroupObject(TypedDict):
    """The texts of a search that have the same answer."""

    answer: Annotated[
        str | int | float | None, Field(description="Null: no answer could be read in these texts.")
    ]
    count: Annotated[int, Field(description="Number of texts.")]
    share: Annotated[float, Field(description="Share of all answers, 0 to 1.")]
    score: Annotated[Figure, Field(description="Highest score of a node; null: not scored.")]
    mean_logprob: Annotated[
        float | None, Field(description="Highest mean log-probability of a text; null: unknown.")
    ]
    solved: Annotated[bool | None, Field(description="Result of the check; null: not checked.")]
    nodes: Annotated[list[int], Field(description="Numbers of the nodes where these texts end.")]


class RunResult(TypedDict):
    """The result of a search."""

    loom: Annotated[str | None, Field(description="The loom's name.")]
    strategy: str
    model: str
    engine: str
    prompt: str
    solved: Annotated[
        bool | None, Field(description="The answer passes the check; null: not checked.")
    ]
    answer: Annotated[str, Field(description='The best answer; "": none could be read.')]
    text: Annotated[str, Field(description="The text of the best node's path below the prompt.")]
    path: Annotated[list[ScoredText], Field(description="The nodes on the path to the best node.")]
    votes: list[AnswerVotes]
    measure: Annotated[str, Field(description="Name of the measure that ranked the candidates.")]
    reason: Annotated[
        str,
        Field(description='Why the answer was chosen: a clause after "chosen because".'),
    ]
    answers: Annotated[
        list[AnswerGroupObject], Field(description="All answers: the best one, then by count.")
    ]
    nodes: Annotated[int, Field(description="Number of nodes of the loom.")]
    cost: SearchCost
    stats: Annotated[Json, Field(description="Statistics of the model.")]
    best: Annotated[int, Field(description="Number of the best node.")]


class CandidateObject(ResponseModel):
    """A node that a round of a search has generated or scored."""

    node: int
    score: Figure = Field(description="The search's score of the node; null: not scored.")
    by: str | None = Field(
        default=None, description="The source that proposed it, if there are several."
    )


class RoundObject(ResponseModel):
    """A round of a search: the candidates that were scored, and those that it continues with."""

    round: int = Field(description="The number of the round, from 1.")
    candidates: list[CandidateObject]
    kept: list[int] = Field(description="Nodes that the search continues with, best first.")
    cost: SearchCost = Field(description="The cost of all rounds so far.")


class JobObject(ResponseModel):
    """A job: a growth, a search or the load of a model, which runs in the background."""

    id: str
    kind: Literal["grow", "run", "load"]
    status: Status
    created: str = Field(description="ISO 8601.")
    ended: str | None = None
    loom: str | None = None
    model: str | None = Field(default=None, description="Its model; null: none, or several.")
    seed: int | None = Field(
        default=None,
        description="The seed that repeats the branches (exceptions: docs/models.md).",
    )
    branches: list[BranchObject] = Field(default_factory=list)
    progress: Json = Field(default_factory=dict, description="Progress of a load or a run.")
    usage: TokenUsage | None = None
    result: RunResult | None = Field(
        default=None, description="The answer, path and cost of a run."
    )
    asked: Json | None = Field(default=None, description="The request of a run.")
    rounds: list[RoundObject] | None = Field(
        default=None, description="The rounds of a run so far; not in the list of all jobs."
    )
    error: ErrorDetail | None = None
    last_event: int = Field(default=0, description="The id of the job's last event.")


class JobList(ResponseModel):
    """Jobs, newest first."""

    data: list[JobObject]


class JobReply(ResponseModel):
    """A started job; with `wait`, the ended job and its nodes."""

    job: str
    status: Status
    loom: str | None = None
    seed: int | None = None
    branches: list[BranchObject] = Field(default_factory=list)
    skipped: list[int] = Field(
        default_factory=list, description="Nodes that were skipped, as they had ended."
    )
    nodes: list[NodeObject] = Field(default_factory=list)
    usage: TokenUsage | None = None
    result: RunResult | None = None
    error: ErrorDetail | None = None


class CancelJob(RequestModel):
    """The branches of a job to cancel; null cancels the job. Generated tokens are kept."""

    branches: list[int] | None = Field(default=None, description="Indices of branches; null: all.")


class StartRun(SamplingFields):
    """A search for an answer below a node."""

    strategy: str = Field(
        default="tot", description="The strategy's name; GET /api/v1/strategies lists them."
    )
    node: int | str = Field(default=0, description="The node to start from, by number or id.")
    breadth: int | None = Field(
        default=None, ge=1, description="Meaning depends on the strategy; see its `breadth`."
    )
    n: int | None = Field(
        default=None, ge=1, description="Meaning depends on the strategy; see its `n`."
    )
    answer: str | None = Field(
        default=None,
        max_length=1000,
        description="How to read the answer in a text: auto, last_number, last_line, or a regular"
        " expression.",
    )
    judge: str | None = Field(
        default=None,
        max_length=20_000,
        description="A question that the model answers with yes or no, to score answers. {text},"
        " {answer} and {prompt} stand for a text, its answer and the prompt.",
    )
    check: str | None = Field(
        default=None,
        max_length=1000,
        description="A regular expression that a correct answer matches fully.",
    )
    answer_tokens: int | None = Field(
        default=None, ge=0, description="Tokens of an answer; default 256."
    )
    budget_tokens: int | None = Field(
        default=None, ge=1, description="Maximum of generated tokens."
    )
    budget_s: float | None = Field(default=None, gt=0, description="Maximum duration in seconds.")
    budget_kv_bytes: int | None = Field(
        default=None, ge=1, description="Maximum KV size of the tree."
    )
    stream: bool = Field(default=False, description="Return the job's events as a stream.")
    wait: bool = Field(default=False, description="Respond at the end, with the result.")
    on_disconnect: Literal["keep", "cancel"] = "keep"
    model: str | None = Field(default=None, description="A loaded model; null: the loom's own.")


class StrategyObject(ResponseModel):
    """A search strategy, such as best-of-n or beam search, and the numbers that it accepts."""

    name: str
    title: str
    says: str
    breadth: str | None = Field(description="What `breadth` counts; null: not supported.")
    n: str | None = Field(description="What `n` counts; null: not supported.")
    breadth_default: int | None = Field(
        default=None, description="Null: not supported, or chosen by the prompt."
    )
    n_default: int | None = Field(
        default=None, description="Null: not supported, or chosen by the prompt."
    )
    refused: list[str] = Field(
        default_factory=list, description="Sampling parameters that it does not support."
    )


class StrategyList(ResponseModel):
    """All search strategies."""

    data: list[StrategyObject]
