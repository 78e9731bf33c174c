"""Requests and responses about nodes of a loom."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from .base import Json, RequestModel, ResponseModel
from .sampling import SamplingFields

Figure = float | str | None  # numbers that JSON lacks are strings: "inf", "-inf", "nan"
FIELDS = ("tokens", "meta", "params", "kv")


class NodeOrigin(ResponseModel):
    """The operation that created a node: its kind, author, time and model."""

    kind: str = Field(description="grow, run, add, fork, …")
    actor: str = Field(description="The author, from X-Weft-Actor.")
    at: str = Field(description="ISO 8601.")
    rev: int
    model: str | None = Field(
        default=None, description="The model that generated it; null: written, or unknown."
    )


class NodeKv(ResponseModel):
    """State of the KV of a node's path: on the device, on the host, or missing."""

    state: Literal["hot", "host", "partly", "cold"] = Field(
        description="hot: all on the device. host: the rest on the host. partly: some is missing."
        " cold: none."
    )
    bytes: int = Field(description="Size of its own tokens' KV on the device.")
    pinned: bool = Field(description="The KV of its path is not evicted.")


class NodeObject(ResponseModel):
    """A node. Requests name it by number or id; numbers are never reused."""

    node: int = Field(description="The node's number in its loom; 0 is the root.")
    id: str
    parent: int | None = Field(description="The parent's number; null for the root.")
    children: list[int] = Field(description="The children's numbers, in order.")
    n_below: int = Field(description="Number of descendants.")
    text: str = Field(description="The node's own text.")
    n_tokens: int
    mean_p: float | None = Field(description="Mean probability of the sampled tokens.")
    mean_logprob: Figure = Field(description="Mean log-probability of the sampled tokens.")
    mean_entropy: Figure = Field(
        default=None, description="Mean entropy before the sampled tokens, in nats."
    )
    finish_reason: str | None = Field(
        description="stop, length, cancelled, error, …; null: not generated, or growing."
    )
    error: str | None = Field(default=None, description="Why its generation failed.")
    stop_string: str | None = Field(default=None, description="The stop string that ended it.")
    ended: bool = Field(description="An end token followed its last token.")
    growing: bool = Field(default=False, description="A job is adding tokens.")
    model: str | None = Field(
        default=None,
        description="The model that generated it, if not the loom's. If that model has another"
        " vocabulary, the node has the text in tokens of the loom's model; the values per token and"
        " their means are absent.",
    )
    score: Figure = Field(default=None, description="The score of a search or a user.")
    rating: float | None = Field(default=None, description="A person's rating; higher is better.")
    said: str | None = Field(default=None, description="The user's message, if it is one.")
    author: str | None = Field(
        default=None,
        description="The name, else the role, that an import or a chat gave the message's author.",
    )
    bookmark: str | None = Field(default=None, description="The bookmark's label.")
    params: Json | None = Field(
        default=None, description="Sampling parameters; with fields=params."
    )
    branch: int | None = Field(
        default=None,
        description="Its number in the call that grew it; with fields=params. `first_branch` and"
        " the seed repeat it (exceptions: docs/models.md).",
    )
    made: NodeOrigin | None = Field(
        default=None, description="The operation that created it, if known; with fields=`made`."
    )
    meta: Json | None = Field(default=None, description="Notes as JSON; with fields=meta.")
    token_ids: list[int] | None = Field(default=None, description="With fields=tokens.")
    logprobs: list[Figure] | None = Field(default=None, description="With fields=tokens.")
    entropies: list[Figure] | None = Field(default=None, description="With fields=tokens; in nats.")
    legal_logmass: list[Figure] | None = Field(
        default=None,
        description="With fields=tokens: log of the probability that the constraint allows.",
    )
    kv: NodeKv | None = Field(default=None, description="With fields=kv; null if unknown.")


class NodePage(ResponseModel):
    """A page of a loom's nodes, parents first."""

    rev: int = Field(description="The loom's revision.")
    data: list[NodeObject]
    removed: list[int] = Field(
        default_factory=list,
        description="With since: numbers of removed nodes, all on the first page.",
    )
    whole: bool = Field(
        default=True, description="true: all requested nodes; false: only nodes changed since."
    )
    next: str | None = Field(default=None, description="Send it as `after` for the next page.")


class TreeNode(NodeObject):
    """A node with its descendants."""

    nodes: list[TreeNode] = Field(default_factory=list, description="The children, nested.")


class AddNode(RequestModel):
    """One child or several with given texts."""

    parent: int | str = Field(default=0, description="The parent's number or id.")
    text: str | None = Field(default=None, description="One child's text.")
    texts: list[str] | None = Field(
        default=None, description="Several children's texts.", min_length=1
    )
    token_ids: list[int] | None = Field(
        default=None, description="One child's tokens.", min_length=1
    )
    message: str | None = Field(
        default=None,
        description="A user message, formatted by the model's chat template.",
    )
    special: bool = Field(default=False, description="Recognize special tokens in the text.")

    @model_validator(mode="after")
    def _check_exclusive_fields(self) -> AddNode:
        """Reject requests with several kinds of content, or none."""
        given = [
            name
            for name in ("text", "texts", "token_ids", "message")
            if getattr(self, name) is not None
        ]
        if len(given) != 1:
            raise ValueError("give one of text, texts, token_ids and message")
        return self


class EditNode(RequestModel):
    """Changes of a node. A new text creates a sibling, unless `in_place` is true."""

    text: str | None = Field(default=None, description="The new text.")
    message: str | None = Field(
        default=None,
        description="The new user message, formatted by the chat template; the root's prompt.",
    )
    in_place: bool = Field(default=False, description="Change this node and keep its descendants.")
    bookmark: str | None = Field(default=None, description="A label; null removes the bookmark.")
    score: float | None = Field(default=None, description="A score; null removes it.")
    rating: float | None = Field(
        default=None, allow_inf_nan=False, description="A person's rating; null removes it."
    )
    meta: Json | None = Field(default=None, description="Notes as JSON; replaces all of them.")

    @model_validator(mode="after")
    def _check_exclusive_fields(self) -> EditNode:
        """Reject requests with contradicting changes."""
        if self.text is not None and self.message is not None:
            raise ValueError("text and message exclude each other")
        return self


class GrowFields(SamplingFields):
    """Sampling parameters and options of a call that grows nodes."""

    n: int = Field(default=1, ge=1, description="Number of branches per node.")
    first_branch: int = Field(
        default=0,
        ge=0,
        lt=2**53,
        description="The number of the first branch; with an earlier call's seed it repeats"
        " that call's branches from this one on (exceptions: docs/models.md).",
    )
    force: bool = Field(default=False, description="Also grow nodes that have ended.")
    min_tokens: int = Field(
        default=0,
        ge=0,
        description="End tokens are forbidden before this many tokens; with force, 1 continues an"
        " ended node.",
    )
    bad_words: list[str] = Field(
        default_factory=list,
        description="Texts that a branch does not contain, as the tokenizer splits them. The"
        " same text can appear in other tokens.",
    )
    allowed_token_ids: list[int] | None = Field(
        default=None,
        min_length=1,
        description="The only token ids that are allowed. Include an end token if a branch may end"
        " by itself.",
    )
    stop_token_ids: list[int] = Field(
        default_factory=list,
        description="Token ids that end a branch, in addition to the model's end tokens.",
    )
    stream: bool = Field(default=False, description="Return the job's events as a stream.")
    wait: bool = Field(
        default=False, description="Respond at the end of all branches, with the nodes."
    )
    on_disconnect: Literal["keep", "cancel"] = Field(
        default="keep", description="What to do with the job if the client disconnects."
    )
    model: str | None = Field(
        default=None,
        description="A loaded model; null: the loom's own. Another model continues the text of the"
        " path, or the messages of a chat in its own template. logit_bias has its token ids.",
    )
    models: list[str] | None = Field(
        default=None,
        min_length=1,
        max_length=16,
        description="Instead of `model`: several loaded models, which grow at the same time, `n`"
        " branches each.",
    )

    @model_validator(mode="after")
    def _check_models(self) -> GrowFields:
        """Reject requests with both `model` and `models`, or with a model twice."""
        if self.models is not None and self.model is not None:
            raise ValueError("model and models exclude each other")
        if len(set(self.models or ())) < len(self.models or ()):
            raise ValueError("models has a model twice; n sets the branches of each")
        return self

    @model_validator(mode="after")
    def _check_delivery(self) -> GrowFields:
        """Reject requests with both `stream` and `wait`."""
        if self.stream and self.wait:
            raise ValueError("stream and wait exclude each other")
        return self

    @model_validator(mode="after")
    def _check_min_tokens(self) -> GrowFields:
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens is {self.min_tokens}; max_tokens allows {self.max_tokens}"
            )
        if self.min_tokens and super().constraint() is not None:
            raise ValueError("min_tokens and a constraint exclude each other; leave one out")
        return self

    def constraint(self) -> Json | None:
        limits = {
            "allowed": self.allowed_token_ids,
            "bad_words": self.bad_words,
            "min_tokens": self.min_tokens,
            "stop_ids": self.stop_token_ids,
        }
        given = {name: value for name, value in limits.items() if value}
        inner = super().constraint()
        return {"token_limits": given, "inner": inner} if given else inner


class GrowNode(GrowFields):
    """Grow one node."""


class GrowNodes(GrowFields):
    """Grow several nodes in one batch and one job."""

    nodes: list[int | str] | None = Field(
        default=None,
        min_length=1,
        description="Numbers or ids; null: all leaves that have not ended.",
    )


class NextTokens(RequestModel):
    """Options of a query for next tokens."""

    top: int = Field(default=10, ge=1, description="Number of likeliest tokens.")
    candidates: list[int | str] = Field(
        default_factory=list,
        description="Token ids, or texts of one token each, to include in any case.",
    )
    temperature: float | None = Field(
        default=None, ge=0, description="With any of these parameters, p_sampled is returned."
    )
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    min_p: float | None = Field(default=None, ge=0, le=1)
    typical_p: float | None = Field(default=None, gt=0, le=1)
    top_n_sigma: float | None = Field(default=None, ge=0)
    xtc_probability: float | None = Field(default=None, ge=0, le=1)
    xtc_threshold: float | None = Field(default=None, ge=0, le=1)
    temperature_first: bool | None = Field(
        default=None, description="Apply temperature before the filters, not after them."
    )
    ahead: int = Field(
        default=0,
        ge=0,
        le=64,
        description="Number of greedy tokens to return after each candidate; each takes a step of"
        " the model.",
    )


class TokenCandidate(ResponseModel):
    """A possible next token and its probability."""

    id: int
    text: str = Field(description="U+FFFD for a part of a character.")
    bytes: list[int]
    logprob: Figure = Field(description="From the model's raw logits.")
    p: float = Field(description="exp(logprob).")
    rank: int = Field(description="0 is the likeliest.")
    p_sampled: float | None = Field(
        default=None, description="Probability after the given temperature and filters."
    )
    ahead: str | None = Field(
        default=None, description="For candidates, with ahead: the greedy continuation."
    )


class NextReply(ResponseModel):
    """The likeliest next tokens, and the candidates."""

    node: int
    next: list[TokenCandidate]
    candidates: list[TokenCandidate] = Field(default_factory=list)
    rest: float = Field(description="Total probability of tokens not in `next`.")
    entropy: float | None = Field(
        default=None, description="Entropy of the full distribution, in nats."
    )


class MeasureText(RequestModel):
    """A text to score after a node; by default the node's own."""

    text: str | None = None
    token_ids: list[int] | None = Field(default=None, min_length=1)
    special: bool = Field(default=False, description="Recognize special tokens in the text.")

    @model_validator(mode="after")
    def _check_exclusive_fields(self) -> MeasureText:
        """Reject requests with both a text and token ids."""
        if self.text is not None and self.token_ids is not None:
            raise ValueError("text and token_ids exclude each other")
        return self


class MeasureReply(ResponseModel):
    """The model's log-probability of each token of a text."""

    node: int
    token_ids: list[int]
    texts: list[str]
    logprobs: list[Figure]
    total: Figure  # sum of the log-probabilities
    mean: Figure  # log-probability per token
    perplexity: Figure


class TokenObject(ResponseModel):
    """One token of a node."""

    index: int
    id: int
    text: str
    bytes: list[int]
    logprob: Figure = Field(default=None, description="Raw log-probability; null if not recorded.")
    entropy: Figure = Field(default=None, description="Entropy in nats.")
    rank: int | None = Field(default=None, description="With top: number of likelier tokens.")
    p_sampled: float | None = Field(
        default=None,
        description="With sampled: probability after the node's temperature and filters, without"
        " penalties and constraints. Null if it was not sampled.",
    )
    top: list[TokenCandidate] | None = Field(
        default=None, description="With top: the likeliest tokens."
    )


class TokenList(ResponseModel):
    """The tokens of a node, with their recorded statistics."""

    node: int
    measured: bool = Field(description="true: computed by the model; false: recorded values.")
    data: list[TokenObject]


class PathReply(ResponseModel):
    """The path from the root to a node, as text, tokens, messages or nodes."""

    node: int
    path: list[int] = Field(description="Node numbers, the root first.")
    n_tokens: int
    text: str | None = None
    token_ids: list[int] | None = None
    messages: list[Json] | None = None
    nodes: list[NodeObject] | None = None


class ForkNode(RequestModel):
    """A sibling to add that shares a node's first tokens, then has another token or text.

    Without `token_id` and `text`, it ends after the shared tokens.
    """

    at_token: int = Field(ge=0, description="Number of shared tokens.")
    token_id: int | None = Field(default=None, description="The token that replaces the next one.")
    text: str | None = Field(default=None, description="The text that replaces the rest.")

    @model_validator(mode="after")
    def _check_exclusive_fields(self) -> ForkNode:
        """Reject requests with both a token and a text."""
        if self.token_id is not None and self.text is not None:
            raise ValueError("token_id and text exclude each other")
        return self


class SplitNode(RequestModel):
    """The position at which a node is split in two: a number of tokens, or of characters.

    The upper node keeps the tokens before it. The lower node gets the rest and the children.
    """

    at_token: int | None = Field(
        default=None, description="Tokens of the upper part; negative: from the end."
    )
    at_char: int | None = Field(
        default=None, ge=1, description="Characters of the upper part's text."
    )

    @model_validator(mode="after")
    def _check_exclusive_fields(self) -> SplitNode:
        """Require exactly one of `at_token` and `at_char`."""
        if (self.at_token is None) == (self.at_char is None):
            raise ValueError("give one of at_token and at_char")
        return self


class ClipNode(RequestModel):
    """The number of a node's tokens to keep; the others become a child, or are dropped."""

    keep: int | None = Field(default=None, ge=0, description="Number of tokens to keep.")
    drop: int | None = Field(
        default=None, ge=1, description="Number of tokens to drop from the end."
    )
    children: Literal["keep", "drop"] = Field(
        default="keep",
        description="keep: the cut tokens become a child with the children; drop: remove all.",
    )

    @model_validator(mode="after")
    def _check_exclusive_fields(self) -> ClipNode:
        """Require exactly one of `keep` and `drop`."""
        if (self.keep is None) == (self.drop is None):
            raise ValueError("give one of keep and drop")
        return self


class MoveNode(RequestModel):
    """The new position of a node."""

    parent: int | str
    index: int | None = Field(
        default=None, ge=0, description="Index among the children; null: last."
    )


class CopyNode(RequestModel):
    """The place for a copy of a node and its descendants: in this loom, another, or a new one."""

    to_loom: str | None = Field(default=None, description="A loom's name or id; null: this one.")
    parent: int | str = Field(default=0, description="The parent of the copy.")
    new_loom: str | None = Field(
        default=None,
        description="Instead: the name of a new loom, whose prompt is the path to the node.",
    )
    title: str | None = Field(
        default=None,
        description="The title of a new loom. Without new_loom, its name is derived from the"
        " title.",
    )
    model: str | None = Field(
        default=None,
        description="With new_loom or title: a loaded model for the new loom. It tokenizes all"
        " texts, and renders messages by its chat template; values per token are left out.",
    )

    @model_validator(mode="after")
    def _check_model(self) -> CopyNode:
        """Reject a model without a new loom."""
        if self.model is not None and self.new_loom is None and self.title is None:
            raise ValueError("model needs new_loom or title: a loom has one model")
        return self


class KvRequest(RequestModel):
    """An operation on the KV of a node's path."""

    op: Literal["warm", "pin", "unpin", "offload", "evict"] = Field(
        description="warm: compute the path's KV. pin: compute it, and do not evict it until it is"
        " unpinned, the node is removed or the server stops. offload: move the KV of the node's own"
        " tokens to the host. evict: free the KV of the node's own tokens; it is recomputed when"
        " needed."
    )


class ForgetKv(RequestModel):
    """The KV of a loom to evict: all, or all but the path to one node."""

    keep: int | str | None = Field(
        default=None, description="A node whose path keeps its KV; null: none."
    )


class Changed(ResponseModel):
    """The effect of an edit: added and changed nodes, and the numbers of removed ones."""

    rev: int
    kind: str
    added: list[NodeObject] = Field(default_factory=list)
    changed: list[NodeObject] = Field(default_factory=list)
    removed: list[int] = Field(default_factory=list)
