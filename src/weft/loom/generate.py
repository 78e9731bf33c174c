"""`LM.generate`: answers to a prompt, as nodes of a new loom."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from .grow import Branches
from .heddle import Heddle
from .loom import Loom, Messages

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .._core.sampling.params import SamplingParams
    from ..lm.lm import LM

    Prompt = str | Messages | Sequence[int]


class GeneratedNode(Heddle):
    """A node returned by `LM.generate`: its `str` is its text, not a drawing of the tree."""

    def __str__(self) -> str:
        return self.text


def generate(
    lm: LM,
    prompt: Prompt,
    n: int | SamplingParams | None,
    params: SamplingParams | None,
    *,
    system: str | None,
    template: bool,
    **sampling: Any,
) -> Branches:
    """Generate `n` answers to a prompt in a new loom; the implementation of `LM.generate`."""
    loom = _create_loom(lm, prompt, system=system, template=template)
    return loom.grow(n, params, show=False, **sampling)


async def agenerate(
    lm: LM,
    prompt: Prompt,
    n: int | SamplingParams | None,
    params: SamplingParams | None,
    *,
    system: str | None,
    template: bool,
    **sampling: Any,
) -> Branches:
    """Async version of `generate`; the implementation of `LM.agenerate`."""
    loom = _create_loom(lm, prompt, system=system, template=template)
    return await loom.agrow(n, params, **sampling)


def _create_loom(lm: LM, prompt: Prompt, *, system: str | None, template: bool) -> Loom:
    """Create the loom of a prompt; raise ConfigError for a list of prompts."""
    if isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], str):
        raise ConfigError(
            f"generate takes one prompt, not a list of {len(prompt)} texts. Write"
            " [lm.generate(prompt) for prompt in prompts], or in one batch"
            " asyncio.gather(*map(lm.agenerate, prompts))"
        )
    return Loom(lm, prompt, system=system, template=template, heddle_class=GeneratedNode)
