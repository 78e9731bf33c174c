"""Constraints over the nodes of a path: where one began, and spaces that a prompt left to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..constraints.lines import after, can_begin_after
from ..errors import ConfigError

if TYPE_CHECKING:
    from ..constraints.base import Constraint
    from ..tokens.tokenizer import Tokenizer
    from .node import HeddleState

# In a node's meta: the end of its text that was moved into the constrained text after it.
HEAL = "heal"


def constrained(node: HeddleState | None, constraint: Any) -> list[HeddleState]:
    """Return the nodes from where a constraint began down to `node`, all grown with an equal one.

    A node that a call cut short is gone on with by an equal constraint: it does not begin anew.
    """
    found: list[HeddleState] = []
    while node is not None and node.params is not None and node.params.constraint == constraint:
        found.append(node)
        node = node.parent
    return found[::-1]


def constrained_so_far(node: HeddleState, constraint: Any) -> list[int]:
    """Return the tokens that a constraint has seen before a branch of `node`."""
    return [token for each in constrained(node, constraint) for token in each.tokens]


def parsed_text(node: HeddleState) -> Any:
    """Return the object that a constrained text stands for; see `Heddle.parsed`."""
    constraint = node.params.constraint if node.params is not None else None
    if constraint is None:
        raise ConfigError("this node was grown without a constraint; its text is all there is")
    text = "".join(each.text for each in constrained(node, constraint))
    return constraint.parse(text.removeprefix(_prefix(node, constraint)))


def healed(node: HeddleState, constraint: Constraint) -> Constraint:
    """Return a constraint of a node's branches as it is compiled: after what its prompt left."""
    prefix = _prefix(node, constraint)
    return after(prefix, constraint) if prefix else constraint


def _prefix(node: HeddleState, constraint: Constraint) -> str:
    """Return what the prompt before a constrained text has left to it; "" for nothing."""
    nodes = constrained(node, constraint)
    prompt = nodes[0].parent if nodes else node
    prefix = "" if prompt is None else prompt.meta.get(HEAL)
    return prefix if isinstance(prefix, str) and can_begin_after(constraint) else ""


def warn_of_prompt_before(node: HeddleState, constraint: Constraint) -> None:
    """Warn if a constraint begins after a text that somebody gave, and that ends in a space."""
    is_given = node.params is None and not getattr(node, "chat_template_used", False)
    if is_given and can_begin_after(constraint) and node.lm is not None:
        node.lm.text.warn_of_end_space(node.tokens)


def healed_ids(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[list[int], str]:
    """Return a prompt's tokens without the spaces at its end, and these spaces."""
    n = len(ids)
    while n > 1 and tokenizer.is_spaces(ids[n - 1]):
        n -= 1
    return list(ids[:n]), tokenizer.decode(ids[n:])
