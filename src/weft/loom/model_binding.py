"""The model that all nodes of a loom share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, StaleHandle

if TYPE_CHECKING:
    from ..lm.lm import LM


def is_lm(model: object) -> bool:
    """Return True for an LM. Does not import the LM's module before the first call."""
    from ..lm.lm import LM

    return isinstance(model, LM)


class ModelBinding:
    """The model of a loom, and whether the loom is closed; all nodes of a loom share one object."""

    __slots__ = ("adapter", "closed", "is_chat", "is_text", "lm", "model", "tokenizer")

    def __init__(
        self, lm: LM | None, model: Any = None, tokenizer: Any = None, *, is_text: bool = False
    ) -> None:
        self.lm = lm
        self.is_text = is_text  # no model: nodes are texts without token ids
        self.model = model  # as the caller passed it
        self.tokenizer = tokenizer  # as the caller passed it
        self.closed = False
        self.is_chat = False  # the prompt used a chat template: nodes use the chat defaults
        self.adapter: str | None = None  # name of a LoRA adapter; None: the base model

    @classmethod
    def from_model(cls, model: Any, tokenizer: Any = None) -> ModelBinding:
        """Bind an LM or a loaded model object. An existing binding is returned unchanged.

        Args:
            model: an LM, or a loaded model object, which always gets the same LM.
            tokenizer: the tokenizer of a model object; None for an LM.
        """
        if isinstance(model, ModelBinding):
            return model
        from ..lm.lm import LM

        lm = LM.from_model(model, tokenizer)
        return cls(lm, model, lm.tokenizer if tokenizer is None else tokenizer)

    def text_lm(self) -> LM:
        """Return the LM for tokenizing and decoding only; allowed after the loom is closed.

        Raises: ConfigError without a model.
        """
        if self.is_text:
            raise ConfigError(
                "this loom has no model: texts can be added to it, read and saved. "
                "For anything else create one with a model: Loom(lm, prompt)",
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
        """Return the LM for running the model.

        Raises: ConfigError without a model; StaleHandle if the loom is closed.
        """
        lm = self.text_lm()
        if self.closed:
            raise StaleHandle("this loom is closed: it can be read and saved, not grown")
        return lm
