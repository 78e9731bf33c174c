"""Edits of a tree that `Heddle` itself does not offer: forks, messages, moves and copies."""

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
from ..store.file import identity_of


def fork(node: Heddle, at: int, instead: int | str | None) -> Heddle:
    """Add a sibling with a node's first `at` tokens, followed by a different token or text.

    instead: id of the token, or the text. None adds nothing after the shared tokens; their
        logprobs are then copied, too.

    Returns: the sibling.
    Raises: ConfigError for the root, or if `at` is out of range.
    """
    parent = node.parent
    if parent is None:
        raise ConfigError("the root has no siblings: fork one of its children, or create a loom")
    tokens = node.tokens
    # All tokens without a replacement would be the node itself.
    maximum = len(tokens) - (instead is None)
    if at > max(maximum, 0):
        allowed = (
            f"allowed are {int(instead is None)} to {maximum}" if maximum else "nothing to share"
        )
        raise ConfigError(f"at_token is {at}; of the node's {len(tokens)} tokens {allowed}")
    shared = tokens[:at]
    if instead is None:
        if not shared:
            raise ConfigError("at_token is 0 without a replacement: that is the parent")
        sibling = add_tokens(parent, shared)
        sibling.logprobs, sibling.entropies = node.logprobs[:at], node.entropies[:at]
        sibling.legal_logmass = node.legal_logmass[:at]
        sibling.params, sibling.lineage = node.params, node.lineage
        return sibling
    if isinstance(instead, int):
        return add_tokens(parent, [*shared, instead])
    sibling = add_tokens(parent, shared)
    sibling.tokens = [*shared, *sibling.add(instead).tokens]
    for child in list(sibling.children):
        sibling.remove_child(child)
    return sibling


def add_message(parent: Heddle, message: str) -> Heddle:
    """Add a user message, formatted by the model's chat template."""
    ids = lm_of(parent).turn_delta([{"role": "user", "content": message}])
    child = parent.add(ids)
    child.meta["said"] = message
    return child


def edit_message(node: Heddle, message: str, *, in_place: bool) -> Heddle:
    """Change a user message.

    in_place: replace the text of the node; otherwise a sibling with the new message is added.

    The message of the root is the prompt, which can only be replaced.
    Raises: ConfigError for nodes that are no message, and for prompts of several messages.
    """
    if isinstance(node, Loom):
        if not in_place:
            raise ConfigError("the root has no siblings; give in_place to change the prompt")
        _replace_prompt(node, message)
        return node
    if "said" not in node.meta:
        raise ConfigError("the node is not a chat message; give text")
    if not in_place:
        assert node.parent is not None
        return add_message(node.parent, message)
    node.tokens = lm_of(node).turn_delta([{"role": "user", "content": message}])
    node.meta = {**node.meta, "said": message}
    return node


def _replace_prompt(loom: Loom, message: str) -> None:
    """Replace the prompt of a loom that has one user message."""
    template, lm = loom.chat_template_used, lm_of(loom)
    text = lm.text
    if read_prompt(text, loom.user_prompt or " ", template=template).ids != loom.tokens:
        raise ConfigError("the prompt is more than one message; give its full text")
    prompt = read_prompt(text, message, template=template, check=lm.check_length)
    loom.tokens, loom.user_prompt = prompt.ids, prompt.user_prompt


def token_before_char(node: Heddle, at_char: int) -> int:
    """Return the number of a node's tokens whose text ends at or before a character.

    at_char: index of the character in the node's text.
    Raises: ConfigError if no token boundary is possible there.
    """
    if not node.tokens:
        raise ConfigError("the node has no tokens to cut between")
    text_of = lm_of(node).text.decode
    n_before = 0
    for count in range(1, len(node.tokens)):
        if len(text_of(node.tokens[:count])) > at_char:
            break
        n_before = count
    if n_before == 0:
        raise ConfigError(f"at_char is {at_char}; the node's first token is longer than that")
    return n_before


def move(node: Heddle, parent: Heddle, index: int | None) -> None:
    """Move a node and its descendants below another node.

    index: index among the new siblings; None puts the node last.
    Raises: TreeError if `parent` is the node or below it, or for the root.
    """
    parent.add_child(node)
    if index is not None:
        children = child_list(parent)
        children.remove(node)
        children.insert(index, node)


def copy_below(parent: Heddle, top: Heddle, *, exact: bool = True) -> Heddle:
    """Copy a node and its descendants below another node; return the copy. Cost: O(nodes).

    exact: copy tokens and logprobs. Both looms must have the same model, which need not be loaded.
        Otherwise only texts are copied, and tokenized by the model of `parent`.
    """
    copies: dict[int, Heddle] = {}
    first: Heddle | None = None
    for node in preorder(top):
        parent_copy = parent if node is top else copies[id(node.parent)]
        if exact:
            copy = _add_copy(parent_copy, node)
            copy.logprobs, copy.entropies = list(node.logprobs), list(node.entropies)
            copy.legal_logmass = list(node.legal_logmass)
            copy.params, copy.lineage = node.params, node.lineage
            copy.finish_reason, copy.stop_string = node.finish_reason, node.stop_string
            copy.terminal = node.terminal
        else:
            copy = add_text(parent_copy, node.text)
        copy.score, copy.meta = node.score, dict(node.meta)
        copies[id(node)] = copy
        first = first or copy
    assert first is not None
    return first


def _add_copy(parent: Heddle, node: Heddle) -> Heddle:
    """Append a child with a node's tokens; check that they fit if the model is loaded."""
    if parent.lm is not None and not parent.lm.closed:
        return add_tokens(parent, node.tokens)
    child = new_child(parent, node.tokens)
    set_text(child, node.text)
    child_list(parent).append(child)
    return child


def loom_below(node: Heddle) -> Loom:
    """Return a new loom with the path to a node as its prompt and copies of its descendants.

    The model need not be loaded.
    """
    root = node.path[0]
    assert isinstance(root, Loom)
    prompt = Prompt(node.get_prefix_tokens(), root.user_prompt, root.chat_template_used)
    loom = Loom.restored(rebind(root), prompt, None)
    loom.saved_by = identity_of(root)
    if root.lm is None:
        set_text(loom, node.get_prefix_text())
    for child in node.children:
        copy_below(loom, child)
    return loom
