"""Looms and models with different vocabularies or templates: a path for another model, and copies.

The tokens of a loom belong to its model. For another model a path is its text, or its messages in
the chat template of that model.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...errors import ConfigError, ContextOverflow
from ...lm.lm import LM
from ...loom import Heddle, Loom
from ...loom.author_note import AuthorNote, note_of, tokens_with_note
from ...loom.grow import MODEL, has_vocab_of
from ...loom.loom import MESSAGES, Prompt
from ...loom.model_binding import ModelBinding
from ...loom.node import child_list, encode_after, is_chat, lm_of, new_child, preorder
from ..interchange.turns import ROLE, Message, messages_of
from ..interchange.user_text import user_text_of


def context_for(node: Heddle, lm: LM) -> list[int]:
    """Return the token ids of a node's path for another model, with the loom's author's note.

    Raises: ConfigError for a chat and a model without a chat template, or whose template rejects
        the messages; ContextOverflow.
    """
    return _path_ids(node, lm, note_of(node.path[0].meta))


def _path_ids(node: Heddle, lm: LM, note: AuthorNote | None) -> list[int]:
    """Return the token ids of a node's path for another model.

    note: inserted as the loom's author's note; None: none.
    """
    if is_chat(node):
        messages = messages_of(node.path)
        ids = _chat_ids(lm, messages if note is None else _with_note(messages, note))
    elif node.lm is None:  # a loom whose model is not loaded has texts
        ids = _text_ids(_stored_text(node), lm)
    else:
        ids = node.get_prefix_tokens() if note is None else tokens_with_note(node, note)
        if not has_vocab_of(node, lm):
            ids = _text_ids(_decoded(lm_of(node), ids), lm)
    lm.check_path(ids)
    return ids


def _decoded(lm: LM, ids: list[int]) -> str:
    """Return the text of a raw path without its BOS token."""
    begins = lm.text.bos_token_id is not None and ids[:1] == [lm.text.bos_token_id]
    return lm.text.decode(ids[1:] if begins else ids, first=True)


def _stored_text(node: Heddle) -> str:
    """Return the text of a path in a loom whose model is not loaded, without its BOS token."""
    root, text = node.path[0], node.get_prefix_text()
    prompt = getattr(root, "user_prompt", "")
    # The stored text of a root shows its BOS token.
    return prompt + text.removeprefix(root.text) if root.text.endswith(prompt) else text


def _text_ids(text: str, lm: LM) -> list[int]:
    """Return a raw text in the tokens of a model, with the BOS token that the model expects."""
    lm.check_length(text)
    return lm.text.encode(text)


def _chat_ids(lm: LM, messages: list[Message]) -> list[int]:
    """Return a chat in the tokens of a model, up to where the assistant's turn continues."""
    if lm.text.chat_template is None:
        raise ConfigError(
            f"{lm.info.model} has no chat template, and this loom is a chat; grow it with a chat"
            " model, or continue its text in a new loom without a template"
        )
    begun = messages[-1] if messages[-1]["role"] == "assistant" else None
    ids = list(lm.format_chat(messages[:-1] if begun else messages, fits=True).ids)
    return ids + lm.text.continuation((begun["content"] or "") if begun else "")


def _with_note(messages: list[Message], note: AuthorNote) -> list[Message]:
    """Return the messages with the note as a paragraph of the user message that it belongs to.

    `loom.author_note` describes the position.
    """
    by_user = [index for index, each in enumerate(messages) if each["role"] == "user"]
    if not by_user:
        return messages
    # A note that would precede the first user message is put into it, at its beginning.
    position = max(len(messages) - note.depth, by_user[0])
    is_before = position in by_user
    at = position if is_before else max(index for index in by_user if index < position)
    content = messages[at]["content"]
    joined = f"{note.text}\n\n{content}" if is_before else f"{content}\n\n{note.text}"
    return [*messages[:at], {**messages[at], "content": joined}, *messages[at + 1 :]]


def loom_for(
    node: Heddle, lm: LM, *, name: str, own_name: str, bookmarks: Mapping[str, str]
) -> Loom:
    """Return a new loom of another model, with a node's path as its prompt and its descendants.

    All texts are tokenized by the other model, and messages rendered by its template. Statistics of
    tokens are left out. Nodes that a model has generated have its name as `meta["model"]`.

    Args:
        node: the node to copy.
        lm: the other model.
        name: the name of the other model.
        own_name: the name of the loom's own model.
        bookmarks: the labels of bookmarked nodes by node id.

    Raises: as `context_for`; ContextOverflow if a path is longer than the model's context.
    """
    root = node.path[0]
    assert isinstance(root, Loom)
    messages = root.meta.get(MESSAGES, ()) if node is root else ()
    ids = _path_ids(node, lm, None)
    prompt = Prompt(ids, root.user_prompt, root.chat_template_used, messages)
    loom = Loom.restored(ModelBinding.from_model(lm), prompt, None)
    loom.meta = dict(root.meta)
    loom.score = node.score
    copies: dict[int, Heddle] = {id(node): loom}
    depths = {id(node): len(ids)}
    for original in list(preorder(node))[1:]:
        parent = copies[id(original.parent)]
        copy = copies[id(original)] = new_child(parent)
        copy.tokens = _own_ids(original, parent, lm)
        depths[id(original)] = depth = depths[id(original.parent)] + len(copy.tokens)
        if depth > lm.n_ctx:
            raise ContextOverflow(
                f"a path of {depth} tokens is longer than the context of {lm.info.model},"
                f" {lm.n_ctx}",
                n_tokens=depth,
                n_ctx=lm.n_ctx,
                hint="load the model with a larger n_ctx, or copy a part of the loom",
            )
        copy.params, copy.lineage = original.params, original.lineage
        copy.finish_reason, copy.stop_string = original.finish_reason, original.stop_string
        copy.terminal, copy.score, copy.meta = (
            original.terminal,
            original.score,
            dict(original.meta),
        )
        copy.meta.pop("bookmark", None)
        if (label := bookmarks.get(original.id)) is not None:
            copy.meta["bookmark"] = label  # the store makes it a bookmark
        if original.params is not None and copy.meta.setdefault(MODEL, own_name) == name:
            del copy.meta[MODEL]
        child_list(parent).append(copy)
    return loom


def _own_ids(node: Heddle, parent: Heddle, lm: LM) -> list[int]:
    """Return a node's own text in the tokens of a model.

    parent: the node's parent in the loom of that model.
    """
    text = user_text_of(node)
    if text is None or not is_chat(parent):
        return encode_after(parent, node.text, None)
    return lm.turn_delta([{"role": node.meta.get(ROLE) or "user", "content": text}])
