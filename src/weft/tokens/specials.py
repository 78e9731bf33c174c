"""Special tokens' strings in what people write are text, also inside a chat template."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

# What templates look at and write themselves; a role is checked by name.
_NAMES = frozenset({"role", "type"})


def mark_specials(
    messages: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    options: Mapping[str, Any] | None = None,
) -> tuple[
    Sequence[Mapping[str, Any]], dict[str, Any], Callable[[str], Iterator[tuple[str, bool]]]
]:
    """Hide special tokens' strings in a chat, so that they stay text in a template.

    In all that messages hold (content and its parts, tool calls, reasoning) and in the template's
    other variables (tools, documents), but not in those that are tokens, such as bos_token.

    Returns: the messages and the options, each such string replaced by a mark; and a function that
    cuts the rendered text at the marks into (piece, whether it is the hidden string).
    """
    given = dict(options or {})
    said = {name: value for name, value in given.items() if not name.endswith("_token")}
    texts = list(_texts([*messages, said]))
    found = [name for name in sorted(names, key=len, reverse=True) if name]
    found = [name for name in found if any(name in text for text in texts)]
    if not found:
        return messages, given, lambda rendered: iter([(rendered, False)])
    # NOTE: letters and figures alone, which nothing escapes or trims.
    nonce = f"weft{secrets.token_hex(8)}n"
    pattern = re.compile("|".join(map(re.escape, found)))

    def hidden(value: Any) -> Any:
        if isinstance(value, str):
            return pattern.sub(lambda match: f"{nonce}{found.index(match[0])}w", value)
        if isinstance(value, Mapping):
            return {
                hidden(key): each if key in _NAMES and isinstance(each, str) else hidden(each)
                for key, each in value.items()
            }
        return [hidden(each) for each in value] if isinstance(value, list | tuple) else value

    def restore(rendered: str) -> Iterator[tuple[str, bool]]:
        for i, piece in enumerate(re.split(f"{nonce}(\\d+)w", rendered)):
            if i % 2:
                yield found[int(piece)], True
            elif piece:
                yield piece, False

    marked = [hidden(message) for message in messages]
    return marked, {**given, **hidden(said)}, restore


def _texts(value: Any) -> Iterator[str]:
    """Yield the texts in messages and options that people may have written."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            yield from _texts(key)
            if not (key in _NAMES and isinstance(each, str)):
                yield from _texts(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _texts(each)
