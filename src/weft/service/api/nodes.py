"""Nodes of a loom: what is told of them, and what is asked for."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from .base import Json, RequestModel, ResponseModel
from .sampling import SamplingFields

Figure = float | str | None  # a number that JSON does not have is a text: "inf", "-inf", "nan"
FIELDS = ("tokens", "meta", "params", "kv")


class NodeOrigin(ResponseModel):
    """The operation that brought a node."""

    kind: str = Field(description="grow, run, add, fork, …")
    actor: str = Field(description="Who did it, as X-Weft-Actor said.")
    at: str = Field(description="ISO 8601.")
    rev: int
    model: str | None = Field(
        default=None, description="That grew it; null: nobody grew it, or nobody knows."
    )


class NodeKv(ResponseModel):
    """What a node's path has of KV."""

    state: Literal["hot", "host", "partly", "cold"] = Field(
        description="hot: all is on the device. host: what is not is on the host. partly: some is"
        " there. cold: nothing is."
    )
    bytes: int = Field(description="That its own tokens take on the device.")
    pinned: bool = Field(description="It, and the path to it, is not evicted until it is unpinned.")


class NodeObject(ResponseModel):
    """A node. Nodes are named by their numbers, which are never given again, or by their ids."""

    node: int = Field(description="Its number in its loom; 0 is the root.")
    id: str
    parent: int | None = Field(description="The number of its parent; null for the root.")
    children: list[int] = Field(description="The numbers of its children, in their order.")
    n_below: int = Field(description="How many nodes stand below it.")
    text: str = Field(description="Its own text.")
    n_tokens: int
    mean_p: float | None = Field(description="Mean probability of its sampled tokens.")
    mean_logprob: Figure = Field(description="Mean log-probability of its sampled tokens.")
    finish_reason: str | None = Field(
        description="Why it ended: stop, length, cancelled, interrupted, …; null: it was written."
    )
    stop_string: str | None = Field(default=None, description="The stop text that ended it.")
    ended: bool = Field(description="Its last token was followed by an end token.")
    growing: bool = Field(default=False, description="A job adds tokens to it now.")
    score: Figure = Field(default=None, description="What a search thinks of it.")
    said: str | None = Field(default=None, description="Whose turn of a chat it is.")
    bookmark: str | None = Field(default=None, description="Its label, where it is bookmarked.")
    params: Json | None = Field(default=None, description="How it was sampled; with fields=params.")
    branch: int | None = Field(
        default=None,
        description="Its number in the call that grew it; with fields=params. With the seed,"
        " `first_branch` grows it again.",
    )
    made: NodeOrigin | None = Field(
        default=None, description="What brought it, where the log knows; with fields=made."
    )
    meta: Json | None = Field(default=None, description="What was noted on it; with fields=meta.")
    token_ids: list[int] | None = Field(default=None, description="With fields=tokens.")
    logprobs: list[Figure] | None = Field(default=None, description="With fields=tokens.")
    entropies: list[Figure] | None = Field(default=None, description="With fields=tokens; in nats.")
    legal_logmass: list[Figure] | None = Field(
        default=None,
        description="With fields=tokens: log of the probability that a constraint left at each.",
    )
    kv: NodeKv | None = Field(default=None, description="With fields=kv; null where nobody knows.")


class NodePage(ResponseModel):
    """Some nodes of a loom, parents first."""

    rev: int = Field(description="The loom's revision that this is of.")
    data: list[NodeObject]
    removed: list[int] = Field(
        default_factory=list,
        description="With since: nodes that are not there any more; all of them on the first page.",
    )
    whole: bool = Field(
        default=True, description="Every node asked for is here; false: only what changed since."
    )
    next: str | None = Field(default=None, description="Give it as `after` for the next page.")


class TreeNode(NodeObject):
    """A node with those below it."""

    nodes: list[TreeNode] = Field(default_factory=list, description="Its children, whole.")


class AddNode(RequestModel):
    """Text that somebody wrote: one child, or several."""

    parent: int | str = Field(default=0, description="A node's number or id.")
    text: str | None = Field(default=None, description="One child's text.")
    texts: list[str] | None = Field(
        default=None, description="Several children's texts.", min_length=1
    )
    token_ids: list[int] | None = Field(
        default=None, description="One child's tokens.", min_length=1
    )
    message: str | None = Field(
        default=None,
        description="What the user says next, in the form of the model's chat template.",
    )
    special: bool = Field(default=False, description="Read special tokens in the text as such.")

    @model_validator(mode="after")
    def _one(self) -> AddNode:
        given = [
            name
            for name in ("text", "texts", "token_ids", "message")
            if getattr(self, name) is not None
        ]
        if len(given) != 1:
            raise ValueError("give one of text, texts, token_ids and message")
        return self


class EditNode(RequestModel):
    """What to change of a node. A new text makes a sibling, unless it is to stand in its place."""

    text: str | None = Field(default=None, description="Its text from now on.")
    message: str | None = Field(
        default=None,
        description="What the user says instead, in the form of the chat; of the root the prompt.",
    )
    in_place: bool = Field(
        default=False, description="Change this node; what stands below it stays."
    )
    bookmark: str | None = Field(default=None, description="A label; null takes the bookmark away.")
    score: float | None = Field(default=None, description="What you think of it; null: nothing.")
    meta: Json | None = Field(default=None, description="Its notes, whole, as JSON.")

    @model_validator(mode="after")
    def _one(self) -> EditNode:
        if self.text is not None and self.message is not None:
            raise ValueError("text and message exclude each other")
        return self


class GrowFields(SamplingFields):
    """How a call grows, and how it is answered."""

    n: int = Field(default=1, ge=1, description="Branches of each node.")
    first_branch: int = Field(
        default=0,
        ge=0,
        lt=2**53,
        description="The number of the first branch: with the seed of an earlier call, its branches"
        " from that one on again.",
    )
    force: bool = Field(default=False, description="Grow what has ended, too.")
    stream: bool = Field(default=False, description="Answer with the job's events.")
    wait: bool = Field(
        default=False, description="Answer when all branches have ended, with the nodes."
    )
    on_disconnect: Literal["keep", "cancel"] = Field(
        default="keep", description="What becomes of the job when who waits or streams vanishes."
    )
    model: str | None = Field(
        default=None, description="Which loaded model grows it; null: the loom's own."
    )

    @model_validator(mode="after")
    def _one_answer(self) -> GrowFields:
        if self.stream and self.wait:
            raise ValueError("stream and wait exclude each other")
        return self


class GrowNode(GrowFields):
    """Grow one node."""


class GrowNodes(GrowFields):
    """Grow many nodes in one batch, one job."""

    nodes: list[int | str] | None = Field(
        default=None,
        min_length=1,
        description="Numbers or ids; null: all leaves that have not ended.",
    )


class NextTokens(RequestModel):
    """What may come next."""

    top: int = Field(default=10, ge=1, description="How many of the likeliest.")
    candidates: list[int | str] = Field(
        default_factory=list,
        description="Token ids, or texts that are one token each, to be told in any case.",
    )
    temperature: float | None = Field(
        default=None, ge=0, description="With any of these the sampled probability is told, too."
    )
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=0)
    min_p: float | None = Field(default=None, ge=0, le=1)
    typical_p: float | None = Field(default=None, gt=0, le=1)
    ahead: int = Field(
        default=0,
        ge=0,
        le=64,
        description="So many tokens that greedy decoding goes on with after each candidate are told"
        " too; each is a step of the model.",
    )


class TokenCandidate(ResponseModel):
    """A token that may stand at a place, and how likely the model finds it."""

    id: int
    text: str = Field(description="U+FFFD where it is a part of a character.")
    bytes: list[int]
    logprob: Figure = Field(description="Of the model's own logits: raw.")
    p: float = Field(description="exp(logprob).")
    rank: int = Field(description="0 is the likeliest.")
    p_sampled: float | None = Field(
        default=None, description="After temperature and filters, where they were given."
    )
    ahead: str | None = Field(
        default=None, description="Of a candidate, with ahead: how greedy decoding goes on."
    )


class NextReply(ResponseModel):
    """The likeliest next tokens, and the candidates."""

    node: int
    next: list[TokenCandidate]
    candidates: list[TokenCandidate] = Field(default_factory=list)
    rest: float = Field(description="The probability of all tokens that are not listed.")
    entropy: float | None = Field(default=None, description="Of the whole distribution, in nats.")


class MeasureText(RequestModel):
    """A text to measure after a node; without one the node's own."""

    text: str | None = None
    token_ids: list[int] | None = Field(default=None, min_length=1)
    special: bool = Field(default=False, description="Read special tokens in the text as such.")

    @model_validator(mode="after")
    def _one(self) -> MeasureText:
        if self.text is not None and self.token_ids is not None:
            raise ValueError("text and token_ids exclude each other")
        return self


class MeasureReply(ResponseModel):
    """How likely a model finds a text: a log-probability a token, raw."""

    node: int
    token_ids: list[int]
    texts: list[str]
    logprobs: list[Figure]
    total: Figure
    mean: Figure
    perplexity: Figure


class TokenObject(ResponseModel):
    """One token of a node."""

    index: int
    id: int
    text: str
    bytes: list[int]
    logprob: Figure = Field(
        default=None, description="Raw; null where it was not sampled nor measured."
    )
    entropy: Figure = Field(default=None, description="In nats.")
    rank: int | None = Field(default=None, description="With top: how many tokens were likelier.")
    p_sampled: float | None = Field(
        default=None,
        description="With sampled: after the node's own temperature and filters; penalties and"
        " constraints do not count. Null where it was not sampled.",
    )
    top: list[TokenCandidate] | None = Field(
        default=None, description="With top: the likeliest here."
    )


class TokenList(ResponseModel):
    """A node's tokens."""

    node: int
    measured: bool = Field(description="The model was asked; else it is what was recorded.")
    data: list[TokenObject]


class PathReply(ResponseModel):
    """What leads to a node."""

    node: int
    path: list[int] = Field(description="Numbers, the root first.")
    n_tokens: int
    text: str | None = None
    token_ids: list[int] | None = None
    messages: list[Json] | None = None
    nodes: list[NodeObject] | None = None


class ForkNode(RequestModel):
    """A sibling that shares a node's first tokens."""

    at_token: int = Field(ge=0, description="How many of the node's tokens are shared.")
    token_id: int | None = Field(default=None, description="What comes instead of the next one.")
    text: str | None = Field(default=None, description="Text that comes instead.")

    @model_validator(mode="after")
    def _one(self) -> ForkNode:
        if self.token_id is not None and self.text is not None:
            raise ValueError("token_id and text exclude each other")
        return self


class SplitNode(RequestModel):
    """Where to cut a node in two."""

    at_token: int | None = Field(
        default=None, description="Tokens that stay above; negative: from the end."
    )
    at_char: int | None = Field(
        default=None, ge=1, description="Characters of the upper part's text."
    )

    @model_validator(mode="after")
    def _one(self) -> SplitNode:
        if (self.at_token is None) == (self.at_char is None):
            raise ValueError("give one of at_token and at_char")
        return self


class ClipNode(RequestModel):
    """How much of a node to keep."""

    keep: int | None = Field(default=None, ge=0, description="Tokens to keep.")
    drop: int | None = Field(default=None, ge=1, description="Tokens to drop from its end.")
    children: Literal["keep", "drop"] = Field(
        default="keep",
        description="keep: what is cut off becomes a child that has them; drop: gone.",
    )

    @model_validator(mode="after")
    def _one(self) -> ClipNode:
        if (self.keep is None) == (self.drop is None):
            raise ValueError("give one of keep and drop")
        return self


class MoveNode(RequestModel):
    """Where a node and all below it shall stand."""

    parent: int | str
    index: int | None = Field(
        default=None, ge=0, description="Its place among the children; null: last."
    )


class CopyNode(RequestModel):
    """Where a copy of a node and all below it shall stand."""

    to_loom: str | None = Field(default=None, description="A loom's name or id; null: this one.")
    parent: int | str = Field(default=0, description="A node there.")
    new_loom: str | None = Field(
        default=None,
        description="The name of a new loom instead, whose prompt is the path to the node.",
    )


class KvRequest(RequestModel):
    """What to do with the KV of a node's path."""

    op: Literal["warm", "pin", "unpin", "offload", "evict"] = Field(
        description="warm: compute it now. pin: compute it, and keep it from being evicted until it"
        " is unpinned, the node is removed or the server stops. offload: move that of its own"
        " tokens to the host. evict: forget that; tokens stay, and it is recomputed."
    )


class ForgetKv(RequestModel):
    """What KV of a loom to forget."""

    keep: int | str | None = Field(
        default=None, description="A node whose path stays as it is; null: none."
    )


class Changed(ResponseModel):
    """What a change did: nodes that came or are different now, and numbers that went."""

    rev: int
    kind: str
    added: list[NodeObject] = Field(default_factory=list)
    changed: list[NodeObject] = Field(default_factory=list)
    removed: list[int] = Field(default_factory=list)
