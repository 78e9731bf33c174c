"""What is kept of a loom besides its nodes: whose tokens they are, what was asked, what to load."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, NamedTuple

from ..._core.atomic_files import PARSE_ERRORS
from ...errors import StoreError
from ...loom import Heddle, Loom
from ...loom.loom import Prompt
from .file import ModelMark, bare_loom, check_model, mark_of
from .rows import plain
from .words import PROMPT_MOST

if TYPE_CHECKING:
    from ...lm.lm import LM


class LoomHead(NamedTuple):
    """The head of a loom, as the head of a file has it. load, engine: what grew it last."""

    mark: ModelMark
    created: str
    user_prompt: str
    chat_template_used: bool
    adapter: str | None
    load: str
    engine: str

    @classmethod
    def of(cls, loom: Loom) -> LoomHead:
        """Return the head of a live loom."""
        mark = mark_of(loom)
        return cls(
            mark,
            loom.created,
            loom.user_prompt,
            loom.chat_template_used,
            loom.adapter,
            str(loom.meta.get("model") or mark.name),
            str(loom.meta.get("engine") or ""),
        )

    @classmethod
    def loaded(cls, data: str) -> LoomHead:
        """Read what `dumped` made."""
        try:
            mark, *more = json.loads(data)
            return cls(ModelMark(*mark), *more)
        except PARSE_ERRORS as error:
            raise StoreError(f"the head of the loom is broken: {error}") from error

    def dumped(self) -> str:
        """Return it as its column has it."""
        mark = self.mark if self.mark.adapter else self.mark[:3]  # as before there were four
        return json.dumps([mark, *self[1:]])

    def columns(self) -> dict[str, Any]:
        """Return the columns of the loom's row that say it."""
        return {
            "head": self.dumped(),
            "model": plain(self.load),
            "engine": plain(self.engine),
            "prompt": plain(self.user_prompt[:PROMPT_MOST]),
        }

    def loom(self, lm: LM | None, heddle_class: type[Heddle], *, force: bool) -> Loom:
        """Return the root of the loom, without its tokens. Raises: ModelMismatch."""
        if lm is not None:
            check_model(lm, self.mark, self.adapter, force=force)
        made = Prompt([], self.user_prompt, self.chat_template_used)
        return bare_loom(self.mark, made, self.created, self.adapter, lm, Loom, heddle_class)
