"""N8Loom's names on a `Heddle`: sampling parameters and stream items."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import closing
from typing import Any

from .._core.sampling.params import SamplingParams
from ..errors import ConfigError
from ..lm.results import Delta
from .grow import Branches, Growth, delta

_NEUTRAL = SamplingParams()


def params(
    *, temp: float = 0.8, stop_strings: str | Sequence[str] = (), **more: Any
) -> SamplingParams:
    """Convert N8Loom's sampling parameters to SamplingParams.

    Filters are off unless a keyword sets them, and the temperature is applied before them.

    Args:
        temp: the temperature.
        stop_strings: the stop strings.
        more: parameters by Weft's names; `temperature` and `stop` override `temp` and
            `stop_strings`.
    """
    known = {"temperature": temp, "stop": stop_strings or None, "temperature_first": True}
    return SamplingParams.resolve({**known, **more}, _NEUTRAL)


StreamItem = dict[str, Any]
"""One item of `make_child_stream`: JSON data, except for the nodes in "children" of the last."""


def stream_items(growth: Growth) -> Generator[StreamItem, None, Branches]:
    """Run a growth and yield N8Loom's stream items; return the children.

    An item is a dict of type "update" for each step. The last one has the type "final".
    """
    tokens: list[list[int]] = [[] for _ in growth.branches]
    texts = [""] * len(tokens)
    ended = [False] * len(tokens)
    n_prompt = growth.branches[0].origin.depth if growth.branches else 0
    with closing(growth.updates()) as steps:
        try:
            for step in steps:
                deltas = [delta(pending, events) for pending, events in step]
                for new in deltas:
                    branch = new.branch
                    tokens[branch].extend(new.token_ids)
                    texts[branch] = growth.lm.text.decode(tokens[branch])
                    ended[branch] = ended[branch] or new.finish_reason == "stop"
                if deltas:
                    yield {
                        "type": "update",
                        "tokens": [list(ids) for ids in tokens],
                        "decoded_texts": list(texts),
                        "ended": list(ended),
                        "deltas": [_delta_as_dict(new) for new in deltas],
                    }
        except KeyboardInterrupt:
            growth.abandon("interrupted")
            raise
    yield {
        "type": "final",
        "tokens": tokens,
        "decoded_texts": texts,
        "generated_lengths": [len(ids) for ids in tokens],
        "total_prompt_len": n_prompt,
        "ended": [pending.child.terminal for pending in growth.branches],
        "prompt_cache": None,
        "children": growth.children,
        "deltas": [],
    }
    return growth.children


def _delta_as_dict(new: Delta) -> dict[str, Any]:
    """Return a branch's new tokens as a dict, an entry of "deltas"."""
    return {
        "branch": new.branch,
        "node_id": new.node.id,
        "token_ids": list(new.token_ids),
        "text": new.text,
        "texts": list(new.texts),
        "logprobs": list(new.logprobs),
        "entropies": list(new.entropies),
        "finish_reason": new.finish_reason,
    }


def ramify_texts(arg: object) -> list[str] | None:
    """Return the texts that a call of `ramify` adds; None if the call generates.

    arg: the argument of `ramify`.

    Raises: ConfigError unless it is None, a text or a list of texts.
    """
    if arg is None:
        return None
    if isinstance(arg, list) and all(isinstance(each, str) for each in arg):
        return arg
    raise ConfigError(
        f"ramify takes a text, a list of texts or nothing (to generate), not {type(arg).__name__}"
    )
