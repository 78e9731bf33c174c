"""Special tokens' strings in what people write are text, also inside a chat template."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any


def mark_specials(
    messages: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> tuple[Sequence[Mapping[str, Any]], Callable[[str], Iterator[tuple[str, bool]]]]:
    """Hide special tokens' strings in what messages say, so that they stay text in a template.

    Returns: the messages, each such string replaced by a mark; and a function that cuts the
    rendered text at the marks into (piece, whether it is the hidden string).
    """
    found = [name for name in sorted(names, key=len, reverse=True) if name]
    said = [m.get("content") for m in messages if isinstance(m, Mapping)]
    found = [name for name in found if any(isinstance(text, str) and name in text for text in said)]
    if not found:
        return messages, lambda rendered: iter([(rendered, False)])
    nonce = secrets.token_hex(8)
    pattern = re.compile("|".join(map(re.escape, found)))

    def mark(match: re.Match[str]) -> str:
        return f"\ue000{nonce}.{found.index(match[0])}\ue001"

    def hide(message: Mapping[str, Any]) -> Mapping[str, Any]:
        content = message.get("content")
        return (
            {**message, "content": pattern.sub(mark, content)}
            if isinstance(content, str)
            else message
        )

    def restore(rendered: str) -> Iterator[tuple[str, bool]]:
        for i, piece in enumerate(re.split(f"\ue000{nonce}\\.(\\d+)\ue001", rendered)):
            if i % 2:
                yield found[int(piece)], True
            elif piece:
                yield piece, False

    return [hide(m) if isinstance(m, Mapping) else m for m in messages], restore
