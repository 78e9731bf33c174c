"""The known names' streaming items and defaults."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..results import Delta
from ..sampling.params import SamplingParams
from .grow import Branches, Growth, delta

if TYPE_CHECKING:
    from ..lm import LM

_NEUTRAL = SamplingParams()


def params(
    *, temp: float = 0.8, stop_strings: str | Sequence[str] = (), **own: Any
) -> SamplingParams:
    """Return the known parameters as ours: neutral defaults, temperature before the filters.

    own: our own names; `temperature` and `stop` among them replace `temp` and `stop_strings`.
    """
    known = {"temperature": temp, "stop": stop_strings or None, "temperature_first": True}
    return SamplingParams.resolve({**known, **own}, _NEUTRAL)


class StreamItem(Mapping[str, Any]):
    """One item of a known stream, read like a dict; lists and texts are built when read."""

    def __init__(self, fields: Mapping[str, Any], lazy: Mapping[str, Callable[[], Any]]) -> None:
        self._fields = dict(fields)
        self._lazy = dict(lazy)

    def __getitem__(self, key: str) -> Any:
        if key in self._lazy:
            self._fields[key] = self._lazy.pop(key)()
        return self._fields[key]

    def __iter__(self) -> Iterator[str]:
        return iter([*self._fields, *self._lazy])

    def __len__(self) -> int:
        return len(self._fields) + len(self._lazy)

    def but(self, **fields: Any) -> StreamItem:
        """Return the item with other values for some fields."""
        return StreamItem({**self._fields, **fields}, self._lazy)

    def __repr__(self) -> str:
        return f"StreamItem({self._fields.get('type')!r}: {', '.join(self)})"


def items(growth: Growth) -> Generator[StreamItem, None, Branches]:
    """Yield the known items: an "update" a step, then "final"; return the children."""
    tokens: list[list[int]] = [[] for _ in growth.shoots]
    ended = [False] * len(tokens)
    n_prompt = growth.shoots[0].origin.depth if growth.shoots else 0
    with closing(growth.news()) as steps:
        try:
            for news in steps:
                deltas = [delta(shoot, events) for shoot, events in news]
                for new in deltas:
                    tokens[new.branch].extend(new.token_ids)
                    ended[new.branch] = ended[new.branch] or new.finish_reason == "stop"
                if deltas:
                    yield _update(growth.lm, tokens, list(ended), deltas)
        except KeyboardInterrupt:
            growth.abandon("interrupted")
            raise
    yield _final(growth, tokens, n_prompt)
    return growth.children


def _update(lm: LM, tokens: list[list[int]], ended: list[bool], deltas: list[Delta]) -> StreamItem:
    # The lists go on growing: an item remembers how far they were.
    lengths = [len(each) for each in tokens]

    def so_far() -> list[list[int]]:
        return [each[:length] for each, length in zip(tokens, lengths, strict=True)]

    return StreamItem(
        {"type": "update", "ended": ended, "deltas": deltas},
        {"tokens": so_far, "decoded_texts": lambda: [lm.text.decode(ids) for ids in so_far()]},
    )


def _final(growth: Growth, tokens: list[list[int]], n_prompt: int) -> StreamItem:
    lm = growth.lm
    fields = {
        "type": "final",
        "tokens": tokens,
        "generated_lengths": [len(each) for each in tokens],
        "total_prompt_len": n_prompt,
        "ended": [shoot.child.terminal for shoot in growth.shoots],
        "prompt_cache": None,
        "children": growth.children,
        "deltas": [],
    }
    return StreamItem(fields, {"decoded_texts": lambda: [lm.text.decode(ids) for ids in tokens]})


def ramify_texts(arg: object) -> list[str] | None:
    """Return the texts that `ramify` is to add; None when it is to generate."""
    if arg is None:
        return None
    if isinstance(arg, list) and all(isinstance(each, str) for each in arg):
        return arg
    raise ConfigError(
        f"ramify takes a text, a list of texts or nothing (to generate), not {type(arg).__name__}"
    )
