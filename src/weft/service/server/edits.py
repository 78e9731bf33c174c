"""Edits of a tree that the nodes themselves do not have: forks, moves and copies."""

from __future__ import annotations

from ...errors import ConfigError
from ...loom import Heddle, Loom
from ...loom.loom import Prompt, read_prompt
from ...loom.node import (
    add_text,
    add_tokens,
    child_list,
    lm_of,
    new_child,
    preorder,
    rebind,
    set_text,
)
from ..store.file import mark_of


def fork(node: Heddle, at: int, instead: int | str | None) -> Heddle:
    """Add a sibling with a node's first `at` tokens, and then what comes instead of the next one.

    What was recorded of the shared tokens is known of the sibling, too, where it has no others.
    Raises: ConfigError for a root, or where nothing is shared, or all, and nothing comes instead.
    """
    parent = node.parent
    if parent is None:
        raise ConfigError("the root has no siblings: fork one of its children, or make a loom")
    tokens = node.tokens
    # All of them with nothing instead are the node itself.
    most = len(tokens) - (instead is None)
    if at > max(most, 0):
        allowed = f"allowed are {int(instead is None)} to {most}" if most else "nothing to share"
        raise ConfigError(f"at_token is {at}; of the node's {len(tokens)} tokens {allowed}")
    shared = tokens[:at]
    if instead is None:
        if not shared:
            raise ConfigError("at_token is 0 and nothing comes instead: that is the parent")
        made = add_tokens(parent, shared)
        made.logprobs, made.entropies = node.logprobs[:at], node.entropies[:at]
        made.legal_logmass = node.legal_logmass[:at]
        made.params, made.lineage = node.params, node.lineage
        return made
    if isinstance(instead, int):
        return add_tokens(parent, [*shared, instead])
    made = add_tokens(parent, shared)
    made.tokens = [*shared, *made.add(instead).tokens]
    for child in list(made.children):
        made.remove_child(child)
    return made


def add_message(parent: Heddle, message: str) -> Heddle:
    """Add what the user says next, in the form of the model's chat template."""
    ids = lm_of(parent).turn_delta([{"role": "user", "content": message}])
    made = parent.add(ids)
    made.meta["said"] = message
    return made


def edit_message(node: Heddle, message: str, *, in_place: bool) -> Heddle:
    """Let the user have said something else: beside a node, or in its place; return what says it.

    Of the root it is the prompt, in its place, and in the form that it was made with.
    Raises: ConfigError for a node that nobody said, and a prompt of more than one message.
    """
    if isinstance(node, Loom):
        if not in_place:
            raise ConfigError("the root has no siblings; give in_place to change the prompt")
        _replace_prompt(node, message)
        return node
    if "said" not in node.meta:
        raise ConfigError("the node is no message of a chat; give text")
    if not in_place:
        assert node.parent is not None
        return add_message(node.parent, message)
    node.tokens = lm_of(node).turn_delta([{"role": "user", "content": message}])
    node.meta = {**node.meta, "said": message}
    return node


def _replace_prompt(loom: Loom, message: str) -> None:
    template, lm = loom.chat_template_used, lm_of(loom)
    text = lm.text
    if read_prompt(text, loom.user_prompt or " ", template=template).ids != loom.tokens:
        raise ConfigError("the prompt is more than one message; give its whole text")
    made = read_prompt(text, message, template=template, check=lm.check_length)
    loom.tokens, loom.user_prompt = made.ids, made.user_prompt


def token_before_char(node: Heddle, at_char: int) -> int:
    """Return how many of a node's tokens end at, or the nearest before, a character of its text.

    Raises: ConfigError where no cut lies there.
    """
    if not node.tokens:
        raise ConfigError("the node has no tokens to cut between")
    text_of = lm_of(node).text.decode
    n = 0
    for count in range(1, len(node.tokens)):
        if len(text_of(node.tokens[:count])) > at_char:
            break
        n = count
    if n == 0:
        raise ConfigError(f"at_char is {at_char}; the node's first token is longer than that")
    return n


def move(node: Heddle, parent: Heddle, index: int | None) -> None:
    """Put a node and all below it below another one, at a place among its children.

    Raises: TreeError below itself, or for a root.
    """
    parent.add_child(node)
    if index is not None:
        children = child_list(parent)
        children.remove(node)
        children.insert(index, node)


def copy_below(parent: Heddle, top: Heddle, *, whole: bool = True) -> Heddle:
    """Copy a node and all below it to below another one; return the copy.

    whole: with tokens and logprobs, as between looms of one model, which need not be loaded; else
    by their texts. Cost: O(nodes).
    """
    copies: dict[int, Heddle] = {}
    first: Heddle | None = None
    for node in preorder(top):
        above = parent if node is top else copies[id(node.parent)]
        if whole:
            made = _add_copy(above, node)
            made.logprobs, made.entropies = list(node.logprobs), list(node.entropies)
            made.legal_logmass = list(node.legal_logmass)
            made.params, made.lineage = node.params, node.lineage
            made.finish_reason, made.stop_string = node.finish_reason, node.stop_string
            made.terminal = node.terminal
        else:
            made = add_text(above, node.text)
        made.score, made.meta = node.score, dict(node.meta)
        copies[id(node)] = made
        first = first or made
    assert first is not None
    return first


def _add_copy(parent: Heddle, node: Heddle) -> Heddle:
    """Append a child with a node's tokens; check that they fit if the model is loaded."""
    if parent.lm is not None and not parent.lm.closed:
        return add_tokens(parent, node.tokens)
    made = new_child(parent, node.tokens)
    set_text(made, node.text)
    child_list(parent).append(made)
    return made


def loom_below(node: Heddle) -> Loom:
    """Return a new loom whose prompt is the path to a node, with all that stands below it.

    Its model need not be loaded.
    """
    root = node.path[0]
    assert isinstance(root, Loom)
    prompt = Prompt(node.get_prefix_tokens(), root.user_prompt, root.chat_template_used)
    loom = Loom.restored(rebind(root), prompt, None)
    loom.saved_by = mark_of(root)
    if root.lm is None:
        set_text(loom, node.get_prefix_text())
    for child in node.children:
        copy_below(loom, child)
    return loom
