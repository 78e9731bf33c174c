"""Metadata of a loom in the database: model, prompt, engine."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from ..._core.atomic_files import PARSE_ERRORS
from ...errors import StoreError
from ...loom import Heddle, Loom
from ...loom.loom import Prompt
from .file import ModelIdentity, bare_loom, check_model, identity_of
from .rows import db_text, escape_like
from .text_normalization import MAX_PROMPT_CHARS

if TYPE_CHECKING:
    from ...lm.lm import LM


class LoomMetadata(NamedTuple):
    """The data of a loom apart from its nodes, like the header of a .loom.json file."""

    identity: ModelIdentity  # the model of the tokens
    created: str  # ISO 8601
    user_prompt: str
    chat_template_used: bool
    adapter: str | None  # name of the LoRA adapter
    load: str  # source of the model that grew the loom last
    engine: str  # engine that grew it last; "" means automatic
    title: str = ""  # as typed; "" means none, so that the name is shown

    @classmethod
    def from_loom(cls, loom: Loom, *, title: str = "") -> LoomMetadata:
        """Return the metadata of an open loom. title: its title, which the tree does not have."""
        identity = identity_of(loom)
        return cls(
            identity,
            loom.created,
            loom.user_prompt,
            loom.chat_template_used,
            loom.adapter,
            str(loom.meta.get("model") or identity.name),
            str(loom.meta.get("engine") or ""),
            title,
        )

    @classmethod
    def from_json(cls, data: str) -> LoomMetadata:
        """Parse the metadata from its column. Raises: StoreError for invalid data."""
        try:
            identity, *more = json.loads(data)
            title = more.pop() if isinstance(more[-1], dict) else {}
            return cls(ModelIdentity(*identity), *more, **title)
        except PARSE_ERRORS as error:
            raise StoreError(f"the metadata of the loom is broken: {error}") from error

    def to_json(self) -> str:
        """Serialize the metadata for its column."""
        identity = (
            self.identity if self.identity.adapter else self.identity[:3]
        )  # without an adapter, three fields
        title = [{"title": self.title}] if self.title else []
        return json.dumps([identity, *self[1:-1], *title])

    @staticmethod
    def title_pattern(text: str) -> str:
        """Return the LIKE pattern of `to_json` of looms whose title contains this text.

        The title is the only object in that JSON, and its end.
        """
        return f'%{{"title": "%{escape_like(json.dumps(text)[1:-1])}%"}}]'

    def columns(self) -> dict[str, Any]:
        """Return the columns of the loom's row that store the metadata."""
        return {
            "head": self.to_json(),
            "model": db_text(self.load),
            "engine": db_text(self.engine),
            "prompt": db_text(self.user_prompt[:MAX_PROMPT_CHARS]),
        }

    def loom(self, lm: LM | None, heddle_class: type[Heddle], *, force: bool) -> Loom:
        """Create the root of the loom, without its tokens, which are read later.

        lm: the model; None opens the loom for reading only.
        force: accept another model with the same vocabulary size. Raises: ModelMismatch.
        """
        if lm is not None:
            check_model(lm, self.identity, self.adapter, force=force)
        prompt = Prompt([], self.user_prompt, self.chat_template_used)
        return bare_loom(self.identity, prompt, self.created, self.adapter, lm, Loom, heddle_class)
