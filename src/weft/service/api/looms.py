"""Looms: what is told of them, and what is asked for."""

from __future__ import annotations

from pydantic import Field, model_validator

from .base import Json, RequestModel, ResponseModel


class LoomObject(ResponseModel):
    """A loom: a tree that is kept under a name."""

    id: str
    name: str
    model: str = Field(description="The model it was made with.")
    engine: str = ""
    prompt: str = Field(description="What was asked first, or its beginning.")
    n_nodes: int
    created: str = Field(default="", description="ISO 8601.")
    changed: str = Field(default="", description="ISO 8601.")
    rev: int = Field(description="Rises with every change.")
    chat_template_used: bool | None = Field(
        default=None, description="Whether the prompt is a chat; told of one loom, not in lists."
    )
    growing: int = Field(default=0, description="Branches that grow now.")
    meta: Json | None = Field(default=None, description="Notes; told of one loom, not in lists.")
    bookmarks: dict[str, str] | None = Field(
        default=None, description="Labels by node number; told of one loom, not in lists."
    )


class LoomPage(ResponseModel):
    """Looms, the one changed last first."""

    data: list[LoomObject]
    next: str | None = Field(default=None, description="Give it as `after` for the next page.")


class CreateLoom(RequestModel):
    """What a new loom begins with."""

    model: str | None = Field(default=None, description="A loaded model; null: the default one.")
    prompt: str | None = None
    messages: list[Json] | None = Field(
        default=None, min_length=1, description="A chat, OpenAI's form."
    )
    token_ids: list[int] | None = Field(default=None, min_length=1)
    template: bool = Field(
        default=True, description="False: the prompt as it is, without a template."
    )
    special: bool = Field(
        default=False, description="Read special tokens in such a prompt as such."
    )
    system: str | None = Field(default=None, description="A system message before the prompt.")
    name: str | None = Field(default=None, description="Null: made from the prompt.")
    meta: Json = Field(default_factory=dict, description="Notes of yours.")

    @model_validator(mode="after")
    def _one(self) -> CreateLoom:
        given = [
            name for name in ("prompt", "messages", "token_ids") if getattr(self, name) is not None
        ]
        if len(given) != 1:
            raise ValueError("give one of prompt, messages and token_ids")
        return self


class EditLoom(RequestModel):
    """What to change of a loom."""

    name: str | None = Field(default=None, description="Its new name.")
    meta: Json | None = Field(default=None, description="Its notes, whole.")


class LoomTree(ResponseModel):
    """A loom's tree, nested."""

    loom: str
    rev: int
    tree: Json = Field(description="The root; each node has its children in `nodes`.")


class OperationObject(ResponseModel):
    """One line of a loom's log."""

    kind: str
    actor: str
    at: str = Field(description="ISO 8601.")
    rev: int
    state: str = Field(description="done, undone, or dropped: it cannot be done again.")
    n_added: int
    n_removed: int
    n_changed: int
    model: str | None = Field(default=None, description="That grew what was added.")


class OperationList(ResponseModel):
    """The operations of a loom, the last one first."""

    data: list[OperationObject]


class HitObject(ResponseModel):
    """A node whose text has the words."""

    loom: str
    name: str
    node: int
    text: str = Field(description="The node's text; of a search over all looms what stands around.")
    spans: list[tuple[int, int]] = Field(
        default_factory=list, description="Where the words stand in the text, in characters."
    )


class HitList(ResponseModel):
    """What a search over texts found."""

    data: list[HitObject]
    more: bool = Field(default=False, description="There are more than were asked for.")


class Imported(ResponseModel):
    """What came of a file."""

    looms: list[LoomObject]
    recognised_as: str
    nodes: int
    dropped: list[str] = Field(description="What the file had and a loom has not, in words.")


class RestoredLooms(ResponseModel):
    """The looms that came back, or whose nodes did."""

    data: list[LoomObject]
    names: list[str] = Field(description="The names that they had before.")
