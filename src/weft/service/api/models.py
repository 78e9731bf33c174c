"""Models and the server itself: what is told of them, and what is asked for."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from .base import ErrorDetail, Json, RequestModel, ResponseModel


class ModelObject(ResponseModel):
    """A model on the server's shelf."""

    id: str = Field(description="By this name requests mean it.")
    source: str = Field(description="What was loaded.")
    state: str = Field(
        description="loading, ready, evicted (a call that names it loads it again) or failed."
    )
    is_default: bool = Field(description="Requests that name none mean it.")
    created: str
    engine: str | None = None
    device: str | None = None
    dtype: str | None = None
    n_ctx: int | None = None
    n_vocab: int | None = None
    has_chat_template: bool | None = None
    tool_form: Literal["template", "generic"] | None = Field(
        default=None,
        description="Tool calls are written as the chat template says, or in Weft's generic form.",
    )
    adapters: list[str] = Field(default_factory=list)
    bytes: int = Field(default=0, description="Of its weights, and of the KV that it may take.")
    users: int = Field(default=0, description="Jobs that use it now.")
    progress: Json | None = Field(
        default=None, description="phase, done and total while it is loaded."
    )
    abilities: dict[str, Any] = Field(default_factory=dict, description="What its engine can do.")
    defaults: Json = Field(
        default_factory=dict, description="Sampling parameters of text that is continued as it is."
    )
    chat_defaults: Json = Field(
        default_factory=dict, description="Sampling parameters of answers in a chat."
    )
    error: ErrorDetail | None = None


class ModelList(ResponseModel):
    """The models on the shelf."""

    data: list[ModelObject]


class LoadModel(RequestModel):
    """A model to load."""

    source: str = Field(min_length=1, max_length=4096, description="As weft run -m takes it.")
    id: str | None = Field(
        default=None,
        min_length=1,
        max_length=200,
        description="Its name here; null: as it is called.",
    )
    engine: str | None = Field(default=None, description="Null: the server's choice.")
    n_ctx: int | None = Field(default=None, ge=1, description="Tokens a path may have.")
    kv_budget: str | int | None = Field(default=None, description='Memory for KV, as "4GiB".')
    offload: str | int | None = Field(
        default=None, description="Of the host, for KV that finds no room; null: the server's."
    )
    device: str = "auto"
    dtype: str = "auto"
    wait: bool = Field(default=False, description="Answer when it is loaded.")


class ServerObject(ResponseModel):
    """The server: what it is, what it can do, and what one may ask of it."""

    version: str
    models: list[ModelObject]
    default_model: str | None
    engines: dict[str, Json] = Field(description="By name: whether it is installed.")
    limits: dict[str, int]
    formats: dict[str, list[str]] = Field(description="import and export: by name.")
    jobs: int = Field(description="That run now.")
    is_public: bool
    token_accepted: bool = Field(
        default=False,
        description="Whether the request carried the token from the server's runtime file.",
    )


class TokenizeText(RequestModel):
    """A text to tokenise."""

    text: str
    model: str | None = None
    special: bool = Field(default=False, description="Read special tokens in it as such.")
    add_bos: bool | None = Field(default=None, description="Null: as the model does.")


class TokenPiece(ResponseModel):
    """A token: its bytes, and its text where they are whole characters."""

    id: int
    text: str | None = None
    bytes: list[int]


class TokenizeReply(ResponseModel):
    """The tokens of a text."""

    token_ids: list[int]
    tokens: list[TokenPiece]


class DetokenizeIds(RequestModel):
    """Tokens whose text is asked for."""

    token_ids: list[int]
    model: str | None = None


class DetokenizeReply(ResponseModel):
    """The text of tokens."""

    text: str


class ApplyTemplate(RequestModel):
    """A chat to render by the model's template."""

    messages: list[Json] = Field(min_length=1)
    model: str | None = None
    add_generation_prompt: bool = True
    tools: list[Json] | None = None
    template_kwargs: Json | None = Field(
        default=None, description="Further variables of the template."
    )


class ApplyTemplateReply(ResponseModel):
    """The prompt of a chat."""

    prompt: str
    token_ids: list[int]


class KvObject(ResponseModel):
    """What a model's KV takes, and what sharing it has saved; figures since it was loaded."""

    model: str
    prefilled: int
    reused: int
    decoded: int
    recomputed: int
    kv_tokens: int
    kv_bytes: int
    kv_bytes_unshared: int = Field(description="What a cache for each branch would take.")
    kv_budget_bytes: int | None
    offloaded_bytes: int = Field(description="KV that the host keeps.")
    offload_budget_bytes: int = Field(description="What the host may keep at most.")
    pinned_tokens: int
    evicted: int
    tokens_per_s: float
    saved_s: float | None = Field(
        description="reused tokens at the measured rate of prefill; null before there is one."
    )


class PinnedNode(ResponseModel):
    """A node whose path has its KV pinned."""

    node: int
    tokens: int = Field(description="Of its path; paths may share some.")
    bytes: int


class LoomKv(ResponseModel):
    """The KV of one loom's nodes."""

    loom: str
    name: str
    model: str | None = Field(description="That grows it; null: none that is loaded.")
    rev: int
    hot: int = Field(description="Nodes whose whole path has KV.")
    cold: int
    hot_tokens: int = Field(description="Tokens that have KV.")
    tokens: int
    bytes: int = Field(description="That its KV takes.")
    offloaded_tokens: int = Field(
        default=0, description="Tokens whose KV is on the host; it is copied back when used."
    )
    pinned: list[PinnedNode] = Field(
        default_factory=list, description="The nodes that are pinned, in their order."
    )


class KvList(ResponseModel):
    """The KV of all models."""

    data: list[KvObject]
    looms: list[LoomKv] | None = Field(
        default=None, description="Of the looms that are open, where they were asked for."
    )
