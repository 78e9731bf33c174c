"""The LM behind a loom, as all of its nodes share it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, StaleHandle

if TYPE_CHECKING:
    from ..lm.lm import LM


def is_lm(model: object) -> bool:
    """Return True for an LM."""
    from ..lm.lm import LM

    return isinstance(model, LM)


class ModelBinding:
    """The LM behind a loom. `model` and `tokenizer` are the objects that the caller handed in.

    is_text: the loom was made without a model; its nodes are texts without token ids.
    is_chat: the prompt went through a chat template, so nodes use the model's chat defaults.
    adapter: the name of the LoRA adapter that its nodes run with; None: the model alone.
    """

    __slots__ = ("adapter", "closed", "is_chat", "is_text", "lm", "model", "tokenizer")

    def __init__(
        self, lm: LM | None, model: Any = None, tokenizer: Any = None, *, is_text: bool = False
    ) -> None:
        self.lm = lm
        self.is_text = is_text
        self.model = model
        self.tokenizer = tokenizer
        self.closed = False
        self.is_chat = False
        self.adapter: str | None = None

    @classmethod
    def of(cls, model: Any, tokenizer: Any = None) -> ModelBinding:
        """Return a home over an LM, or over the one LM of an already loaded model."""
        if isinstance(model, ModelBinding):
            return model
        from ..lm.lm import LM

        lm = LM.of(model, tokenizer)
        return cls(lm, model, lm.tokenizer if tokenizer is None else tokenizer)

    def text_lm(self) -> LM:
        """Return the LM for its tokenizer; works after close."""
        if self.is_text:
            raise ConfigError(
                "this loom was made without a model: texts can be added to it, read and saved. "
                "For all else make one with a model: Loom(lm, prompt)",
                hint="Loom(lm, prompt)",
            )
        if self.lm is None:
            raise ConfigError(
                "this loom was opened without a model: it can be read, searched and saved. "
                "Open it with one: Loom.open(path, lm)",
                hint="Loom.open(path, lm)",
            )
        return self.lm

    def live_lm(self) -> LM:
        """Return the LM to run it."""
        lm = self.text_lm()
        if self.closed:
            raise StaleHandle("this loom is closed: it can be read and saved, not grown")
        return lm
