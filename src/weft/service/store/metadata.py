"""What is kept of a loom besides its nodes: whose tokens they are, what was asked, what to load."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from ..._core.atomic_files import PARSE_ERRORS
from ...errors import StoreError
from ...loom import Heddle, Loom
from ...loom.loom import Prompt
from .file import ModelIdentity, bare_loom, check_model, identity_of
from .rows import db_text
from .text_normalization import MAX_PROMPT_CHARS

if TYPE_CHECKING:
    from ...lm.lm import LM


class LoomMetadata(NamedTuple):
    """The head of a loom, as the head of a file has it. load, engine: what grew it last."""

    identity: ModelIdentity
    created: str
    user_prompt: str
    chat_template_used: bool
    adapter: str | None
    load: str
    engine: str

    @classmethod
    def of(cls, loom: Loom) -> LoomMetadata:
        """Return the head of a live loom."""
        identity = identity_of(loom)
        return cls(
            identity,
            loom.created,
            loom.user_prompt,
            loom.chat_template_used,
            loom.adapter,
            str(loom.meta.get("model") or identity.name),
            str(loom.meta.get("engine") or ""),
        )

    @classmethod
    def loaded(cls, data: str) -> LoomMetadata:
        """Read what `dumped` made."""
        try:
            identity, *more = json.loads(data)
            return cls(ModelIdentity(*identity), *more)
        except PARSE_ERRORS as error:
            raise StoreError(f"the head of the loom is broken: {error}") from error

    def dumped(self) -> str:
        """Return it as its column has it."""
        identity = (
            self.identity if self.identity.adapter else self.identity[:3]
        )  # as before there were four
        return json.dumps([identity, *self[1:]])

    def columns(self) -> dict[str, Any]:
        """Return the columns of the loom's row that say it."""
        return {
            "head": self.dumped(),
            "model": db_text(self.load),
            "engine": db_text(self.engine),
            "prompt": db_text(self.user_prompt[:MAX_PROMPT_CHARS]),
        }

    def loom(self, lm: LM | None, heddle_class: type[Heddle], *, force: bool) -> Loom:
        """Return the root of the loom, without its tokens. Raises: ModelMismatch."""
        if lm is not None:
            check_model(lm, self.identity, self.adapter, force=force)
        made = Prompt([], self.user_prompt, self.chat_template_used)
        return bare_loom(self.identity, made, self.created, self.adapter, lm, Loom, heddle_class)
