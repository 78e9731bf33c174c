"""Requests and responses about models, texts, memory and the server."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from .base import ErrorDetail, Json, RequestModel, ResponseModel


class ModelObject(ResponseModel):
    """A model that the server has registered."""

    id: str = Field(description="The name for requests.")
    source: str = Field(description="The path, Hub id or URL it is loaded from.")
    state: str = Field(
        description="loading, ready, evicted (reloaded by the next call that names it) or failed."
    )
    is_default: bool = Field(description="Requests without a model use it.")
    created: str
    engine: str | None = None
    device: str | None = None
    dtype: str | None = None
    n_ctx: int | None = None
    n_vocab: int | None = None
    has_chat_template: bool | None = None
    tool_form: Literal["template", "generic"] | None = Field(
        default=None,
        description="Format of tool calls: the chat template's, or Weft's generic one.",
    )
    adapters: list[str] = Field(default_factory=list)
    bytes: int = Field(default=0, description="Size of its weights and its KV budget.")
    users: int = Field(default=0, description="Number of jobs using it.")
    progress: Json | None = Field(
        default=None, description="phase, done and total while it is loading."
    )
    abilities: dict[str, Any] = Field(
        default_factory=dict, description="Capabilities of its engine."
    )
    defaults: Json = Field(
        default_factory=dict, description="Default sampling parameters of plain text."
    )
    chat_defaults: Json = Field(
        default_factory=dict, description="Default sampling parameters of chat answers."
    )
    error: ErrorDetail | None = None


class ModelList(ResponseModel):
    """The registered models."""

    data: list[ModelObject]


class LoadModel(RequestModel):
    """A model to load. Settings that are left out follow the server's configuration."""

    source: str = Field(
        min_length=1, max_length=4096, description="A model source, as for `weft run -m`."
    )
    id: str | None = Field(
        default=None,
        min_length=1,
        max_length=200,
        description="The name for requests; null: derived from the source.",
    )
    engine: str | None = Field(default=None, description="Null: the server's default.")
    n_ctx: int | None = Field(default=None, ge=1, description="Context length in tokens.")
    kv_budget: str | int | None = Field(default=None, description='Memory for KV, such as "4GiB".')
    offload: str | int | None = Field(
        default=None, description="Host memory for KV; null: the server's default."
    )
    device: str = "auto"
    dtype: str = "auto"
    wait: bool = Field(default=False, description="Respond when it is loaded.")


class ServerObject(ResponseModel):
    """The server's version, models, limits and formats."""

    version: str
    models: list[ModelObject]
    default_model: str | None
    engines: dict[str, Json] = Field(description="Engines by name.")
    limits: dict[str, int]
    formats: dict[str, list[str]] = Field(description="Names of the import and export formats.")
    jobs: int = Field(description="Number of running jobs.")
    is_public: bool
    token_accepted: bool = Field(
        default=False,
        description="Whether the request carried the token from the server's runtime file.",
    )


class TokenizeText(RequestModel):
    """A text to tokenize."""

    text: str
    model: str | None = None
    special: bool = Field(default=False, description="Recognize special tokens in the text.")
    add_bos: bool | None = Field(
        default=None, description="Add a begin token; null: as the model does."
    )


class TokenPiece(ResponseModel):
    """A token's bytes, and its text if they are complete characters."""

    id: int
    text: str | None = None
    bytes: list[int]


class TokenizeReply(ResponseModel):
    """The tokens of a text: their ids, and the text of each."""

    token_ids: list[int]
    tokens: list[TokenPiece]


class DetokenizeIds(RequestModel):
    """Tokens to decode."""

    token_ids: list[int]
    model: str | None = None


class DetokenizeReply(ResponseModel):
    """The text of tokens."""

    text: str


class ApplyTemplate(RequestModel):
    """A chat to render with the model's template."""

    messages: list[Json] = Field(min_length=1)
    model: str | None = None
    add_generation_prompt: bool = True
    tools: list[Json] | None = None
    template_kwargs: Json | None = Field(
        default=None, description="Additional variables of the template."
    )


class ApplyTemplateReply(ResponseModel):
    """The prompt that the chat template renders from messages: its text and its tokens."""

    prompt: str
    token_ids: list[int]


class KvObject(ResponseModel):
    """The size of a model's KV and the savings from sharing it, since the model was loaded."""

    model: str
    prefilled: int  # prompt tokens that the model has run
    reused: int  # tokens with KV that was cached when work started
    decoded: int  # generated tokens
    recomputed: int  # tokens run once more, because their KV or logits were evicted
    kv_tokens: int  # tokens with KV on the device
    kv_bytes: int  # size of the KV on the device
    kv_bytes_unshared: int = Field(description="Size if every branch had a cache of its own.")
    kv_budget_bytes: int | None  # maximum KV on the device; None: no limit
    offloaded_bytes: int = Field(description="KV in host memory.")
    offload_budget_bytes: int = Field(description="Maximum KV in host memory.")
    pinned_tokens: int  # tokens with KV that cannot be evicted now
    evicted: int  # evictions of nodes of the token tree
    tokens_per_s: float  # generated tokens per second of steps, prefill included
    saved_s: float | None = Field(
        description="Time for the reused tokens at the measured speed; null if unknown."
    )


class PinnedNode(ResponseModel):
    """A node whose path has its KV pinned."""

    node: int
    tokens: int = Field(description="Tokens of its path; paths may share some.")
    bytes: int


class LoomKv(ResponseModel):
    """The KV of one loom's nodes."""

    loom: str
    name: str
    title: str = Field(default="", description='Title of the loom; "": none.')
    model: str | None = Field(description="The model that grows it; null: not loaded.")
    rev: int
    hot: int = Field(description="Nodes whose full path has KV.")
    cold: int
    hot_tokens: int = Field(description="Tokens with KV on the device.")
    tokens: int
    bytes: int = Field(description="Size of its KV on the device.")
    offloaded_tokens: int = Field(
        default=0, description="Tokens whose KV is on the host; it is copied back when used."
    )
    pinned: list[PinnedNode] = Field(
        default_factory=list, description="The pinned nodes, in the tree's order."
    )


class KvList(ResponseModel):
    """The KV of all models."""

    data: list[KvObject]
    looms: list[LoomKv] | None = Field(
        default=None, description="The KV of the open looms, if requested."
    )
