"""Loom: the root of a reasoning tree."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Self, overload

from ..errors import ConfigError
from . import edit
from . import prompt as prompts
from .heddle import Heddle
from .home import Home

if TYPE_CHECKING:
    from ..lm import LM
    from ..store.format import ModelMark


class Loom(Heddle):
    """The root heddle: its tokens are the prompt. A context manager."""

    heddle_class: type[Heddle] = Heddle  # of the nodes below
    _is_root = True
    # Whose tokens an opened loom holds, and what of its file was left out; set by the store.
    saved_by: ModelMark
    dropped: tuple[str, ...] = ()

    @overload
    def __init__(
        self,
        model: LM | None,
        tokenizer: str | prompts.Messages | Sequence[int],
        /,
        *,
        template: bool = True,
        special: bool | None = None,
        system: str | None = None,
        adapter: str | None = None,
        heddle_class: type[Heddle] | None = None,
    ) -> None: ...

    @overload
    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        prompt: str | prompts.Messages | Sequence[int] | None = None,
        *,
        template: bool = True,
        special: bool | None = None,
        system: str | None = None,
        adapter: str | None = None,
        heddle_class: type[Heddle] | None = None,
    ) -> None: ...

    def __init__(
        self,
        model: Any,
        tokenizer: Any = None,
        prompt: Any = None,
        *,
        template: bool = True,
        special: bool | None = None,
        system: str | None = None,
        adapter: str | None = None,
        heddle_class: type[Heddle] | None = None,
    ) -> None:
        """Make a loom: `Loom(lm, prompt)`, or `Loom(model, tokenizer, prompt)` with loaded objects.

        Args:
            model: an LM, or a loaded model with its `tokenizer`. None: a loom of texts alone, for a
                tree that no model writes; `add` takes texts, and nothing needs tokens.
            prompt: a text, chat messages, or token ids. A text goes through the model's chat
                template, if it has one.
            template: False takes a text as it is.
            special: how special tokens in a text that is taken as it is are read: True as such,
                False as plain text; None as the class does (`reads_special`, False here). What goes
                through a chat template is never read so.
            system: a system message before the prompt; needs a chat template.
            adapter: a LoRA adapter's name, see `LM.add_adapter`; all nodes run with it.
            heddle_class: the class of the nodes below; the loom class's own where it is left out.
        """
        if prompt is None:
            prompt, tokenizer = tokenizer, None
        if prompt is None:
            raise ConfigError("a loom needs a prompt: Loom(lm, prompt)")
        if model is None:
            given = {"special": special, "system": system, "adapter": adapter}
            for name, value in given.items():
                if value is not None:
                    raise ConfigError(f"{name} has no meaning for a loom without a model")
            self._begin_text(prompt, heddle_class)
            return
        home = Home.of(model, tokenizer)
        lm = home.text_lm()
        made = prompts.read(
            lm.text,
            prompt,
            template=template,
            special=special,
            reads_special=self.reads_special,
            system=system,
        )
        self._begin(home, made, heddle_class)
        home.adapter = adapter
        self._place = lm.place(made.ids, namespace=adapter)

    def _begin(self, home: Home, made: prompts.Prompt, heddle_class: type[Heddle] | None) -> None:
        super().__init__(home, None, made.ids)
        self.user_prompt = made.user_prompt
        self.chat_template_used = made.chat_template_used
        if heddle_class is not None:
            self.heddle_class = heddle_class
        self.created = datetime.now(UTC).isoformat(timespec="seconds")

    def _begin_text(self, prompt: object, heddle_class: type[Heddle] | None) -> None:
        from ..store.format import NO_MODEL

        if not isinstance(prompt, str):
            raise ConfigError(
                f"a loom without a model takes a text as its prompt, not {type(prompt).__name__}"
            )
        self._begin(Home(None, is_text=True), prompts.Prompt([], prompt, False), heddle_class)
        self._text, self.saved_by = prompt, NO_MODEL

    @classmethod
    def _restored(cls, home: Home, made: prompts.Prompt, heddle_class: type[Heddle] | None) -> Self:
        """Make a loom from a file's content: nothing is tokenised or templated again."""
        loom = cls.__new__(cls)
        loom._begin(home, made, heddle_class)
        return loom

    @property
    def _child_class(self) -> type[Heddle]:
        return self.heddle_class

    def _encode_own(self, text: str) -> list[int]:
        # A root is a whole text, in which special tokens are rendered: they are read back as such.
        return self._home.text_lm().text.encode(text, special=True, add_bos=False)

    @property
    def adapter(self) -> str | None:
        """The name of the LoRA adapter that its nodes run with; None: the model alone."""
        return self._home.adapter

    def display_text(self) -> str:
        """Return the prompt to show: what the user asked when a chat template was used."""
        if not self.chat_template_used:
            return self.text
        return f"Prompt: {self.user_prompt}\n\nResponse:\n\n"

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the whole loom to a file, atomically: it is the old one or the new one.

        Raises StoreError when it cannot be written, ConfigError for a `meta` that is not JSON.
        """
        from ..store import save

        save(self, path)

    @classmethod
    def open(
        cls,
        path: str | os.PathLike[str],
        lm: LM | None = None,
        *,
        force: bool = False,
        heddle_class: type[Heddle] | None = None,
    ) -> Self:
        """Read a saved loom. Without an LM it can be read, searched and saved, not grown.

        Where a node of the file has figures for some of its tokens only, the tokens are taken and
        the figures are not; `dropped` of the loom says of which, in words.

        Args:
            force: take the tokens as they are even if another model with the same vocabulary size
                saved them.

        Raises:
            FormatError: the file is no loom, broken, or of a newer version.
            StoreError: it cannot be read.
            ModelMismatch: another model saved it.
        """
        from ..store import load

        return load(
            path, lm, force=force, loom_class=cls, heddle_class=heddle_class or cls.heddle_class
        )

    def close(self) -> None:
        """Let go of all places in the token tree; idempotent. Reading and saving still work."""
        self._home.closed = True
        edit.forget_places(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
