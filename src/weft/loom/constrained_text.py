"""Constrained text that spans several nodes of a path: its nodes, tokens and parsed value."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..constraints.lines import after, can_begin_after, warn_of_end_space
from ..errors import ConfigError

if TYPE_CHECKING:
    from .._core.tokens.tokenizer import Tokenizer
    from ..constraints.base import Constraint
    from .node import HeddleState

# Key in a node's meta: the spaces moved from the end of its text into the constrained text.
HEAL = "heal"


def constrained_nodes(node: HeddleState | None, constraint: Any) -> list[HeddleState]:
    """Return the consecutive nodes with this constraint, from the first one down to `node`.

    They form one constrained text. If a call ended before the text was complete, growing the node
    with an equal constraint continues the text. Returns [] if `node` has another constraint.
    """
    nodes: list[HeddleState] = []
    while node is not None and node.params is not None and node.params.constraint == constraint:
        nodes.append(node)
        node = node.parent
    return nodes[::-1]


def constrained_tokens(node: HeddleState, constraint: Any) -> list[int]:
    """Return the tokens of the constrained text that a new branch of `node` continues.

    Returns [] if the branch starts a new text.
    """
    if not constraint.is_resumed:
        return []
    return [token for each in constrained_nodes(node, constraint) for token in each.tokens]


def parsed_text(node: HeddleState) -> Any:
    """Join the nodes of a node's constrained text and parse it; see `Heddle.parsed`."""
    constraint = node.params.constraint if node.params is not None else None
    if constraint is None:
        raise ConfigError("this node was grown without a constraint; its text is all there is")
    text = "".join(each.text for each in constrained_nodes(node, constraint))
    return constraint.parse(text.removeprefix(_moved_spaces(node, constraint)))


def allow_moved_spaces(node: HeddleState, constraint: Constraint) -> Constraint:
    """Return the constraint that a node's new branches must follow.

    In a loom with `heal=True`, spaces were moved from the prompt's end to the generated text. The
    returned constraint then allows these spaces first; otherwise it is `constraint` itself.
    """
    prefix = _moved_spaces(node, constraint)
    return after(prefix, constraint) if prefix else constraint


def _moved_spaces(node: HeddleState, constraint: Constraint) -> str:
    """Return the spaces that `heal` moved from the prompt into a constrained text, or ""."""
    nodes = constrained_nodes(node, constraint)
    prompt = nodes[0].parent if nodes else node
    prefix = "" if prompt is None else prompt.meta.get(HEAL)
    return prefix if isinstance(prefix, str) and can_begin_after(constraint) else ""


def warn_of_prompt_before(node: HeddleState, constraint: Constraint) -> None:
    """Log a warning if a constraint begins after a prompt or added text that ends in a space."""
    is_given = node.params is None and not getattr(node, "chat_template_used", False)
    if is_given and node.lm is not None:
        warn_of_end_space(node.tokens, constraint, node.lm.constraints)


def strip_end_spaces(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[list[int], str]:
    """Remove the spaces at a prompt's end; return (remaining token ids, the removed spaces)."""
    n = len(ids)
    while n > 1 and tokenizer.is_spaces(ids[n - 1]):
        n -= 1
    return list(ids[:n]), tokenizer.decode(ids[n:])
