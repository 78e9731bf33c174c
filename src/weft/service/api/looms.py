"""Requests and responses about looms."""

from __future__ import annotations

from pydantic import Field, model_validator

from .base import Json, RequestModel, ResponseModel


class LoomObject(ResponseModel):
    """A loom: a stored tree with a name."""

    id: str
    name: str
    title: str = Field(default="", description='As typed; "": the name serves as the title.')
    model: str = Field(description="The model that it was created with.")
    engine: str = ""
    prompt: str = Field(description="The prompt, or its beginning.")
    n_nodes: int
    created: str = Field(default="", description="ISO 8601.")
    changed: str = Field(default="", description="ISO 8601.")
    rev: int = Field(description="The revision; rises with every change.")
    chat_template_used: bool | None = Field(
        default=None, description="Whether the prompt is a chat; not in lists."
    )
    growing: int = Field(default=0, description="Number of branches growing now.")
    default_strategy: str | None = Field(
        default=None,
        description="The search strategy that `weft solve` uses for the prompt; not in lists.",
    )
    meta: Json | None = Field(default=None, description="Notes as JSON; not in lists.")
    bookmarks: dict[str, str] | None = Field(
        default=None, description="Labels by node number; not in lists."
    )


class LoomPage(ResponseModel):
    """Looms, last changed first."""

    data: list[LoomObject]
    next: str | None = Field(default=None, description="Send it as `after` for the next page.")


class CreateLoom(RequestModel):
    """The prompt of a new loom, and its options."""

    model: str | None = Field(default=None, description="A loaded model; null: the default one.")
    prompt: str | None = None
    messages: list[Json] | None = Field(
        default=None, min_length=1, description="A chat in OpenAI's format."
    )
    token_ids: list[int] | None = Field(default=None, min_length=1)
    template: bool = Field(
        default=True, description="false: use the prompt without the chat template."
    )
    special: bool = Field(
        default=False, description="With template false: recognize special tokens in the prompt."
    )
    system: str | None = Field(default=None, description="A system message before the prompt.")
    name: str | None = Field(
        default=None, description="Null: derived from the title, or from the prompt."
    )
    title: str | None = Field(
        default=None,
        description="Any text on one line. Null: the name if one is given, else the first words of"
        " the prompt.",
    )
    meta: Json = Field(default_factory=dict, description="Notes as JSON.")

    @model_validator(mode="after")
    def _check_exclusive_fields(self) -> CreateLoom:
        """Reject requests with several kinds of prompts."""
        given = [
            name for name in ("prompt", "messages", "token_ids") if getattr(self, name) is not None
        ]
        if len(given) != 1:
            raise ValueError("give one of prompt, messages and token_ids")
        return self


class EditLoom(RequestModel):
    """Changes of a loom's name, title or notes; fields that are left out stay."""

    name: str | None = Field(
        default=None, description="The new name. Null: derived from the new title, if there is one."
    )
    title: str | None = Field(
        default=None,
        description='The new title; "" removes it. A new name alone removes a title that was'
        " derived from the prompt.",
    )
    meta: Json | None = Field(
        default=None,
        description='The notes; replaces all of them. {"author_note": {"text": …, "depth": 4}} is'
        " inserted into the context of growth.",
    )


class LoomTree(ResponseModel):
    """A loom's nodes as nested objects, from the root."""

    loom: str
    rev: int
    tree: Json = Field(description="The root; each node has its children in `nodes`.")


class OperationObject(ResponseModel):
    """One operation in a loom's log: what was done, when and by whom."""

    kind: str
    actor: str
    at: str = Field(description="ISO 8601.")
    rev: int
    state: str = Field(description="done, undone, or dropped (can no longer be redone).")
    n_added: int
    n_removed: int
    n_changed: int
    model: str | None = Field(default=None, description="The model that generated the added nodes.")


class OperationList(ResponseModel):
    """The operations of a loom, latest first."""

    data: list[OperationObject]


class HitObject(ResponseModel):
    """A node whose text matches a search, with the places of the matches."""

    loom: str
    name: str
    title: str = Field(default="", description='Title of the loom; "": none.')
    node: int
    text: str = Field(description="The node's text; in a search over all looms an excerpt.")
    spans: list[tuple[int, int]] = Field(
        default_factory=list, description="Ranges of the matches in the text, in characters."
    )


class HitList(ResponseModel):
    """The results of a text search."""

    data: list[HitObject]
    more: bool = Field(default=False, description="There are more results than the limit.")


class Imported(ResponseModel):
    """The result of an import: the new looms, the file's format, and what was left out."""

    looms: list[LoomObject]
    at: list[int] = Field(
        description="Of each loom, the number of the node that was selected in the program."
    )
    recognised_as: str
    nodes: int
    dropped: list[str] = Field(
        description="Descriptions of the file's content that looms cannot represent."
    )


class RestoredLooms(ResponseModel):
    """The looms that were restored, or whose nodes were."""

    data: list[LoomObject]
    names: list[str] = Field(description="Their names before the removal.")
