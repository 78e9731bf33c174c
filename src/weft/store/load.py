"""Reading a loom. Tokens are taken as they are: nothing is tokenised or templated again."""

from __future__ import annotations

import logging
import os
from typing import TYPE_CHECKING, Any, TypeVar

from .. import files
from ..errors import FormatError, ModelMismatch, StoreError, WeftError
from ..files import field
from ..loom import Heddle, Loom
from ..loom.home import Home
from ..loom.prompt import Prompt
from ..sampling.params import SamplingParams
from .format import NO_MODEL, ModelMark, Record, read_header, read_records

if TYPE_CHECKING:
    from ..lm import LM

L = TypeVar("L", bound=Loom)
_log = logging.getLogger(__name__)


def load(
    path: str | os.PathLike[str],
    lm: LM | None,
    *,
    force: bool,
    loom_class: type[L],
    heddle_class: type[Heddle],
) -> L:
    """Return the saved loom; see `Loom.open`."""
    data = files.read_json(path, FormatError, "no saved loom, or is broken", unread=StoreError)
    with files.named(path):
        mark = read_header(data)
        records, dropped = read_records(data, mark.n_vocab)
        if lm is not None:
            _check_model(lm, mark, force=force)
        loom = _made(data, mark, records, lm, loom_class, heddle_class)
    loom.saved_by, loom.dropped = mark, tuple(dropped)
    for what in dropped:
        _log.warning("%s: %s", path, what)
    return loom


def _made(
    data: dict[str, Any],
    mark: ModelMark,
    records: list[Record],
    lm: LM | None,
    loom_class: type[L],
    heddle_class: type[Heddle],
) -> L:
    prompt = field(data, "prompt", dict, "the file")
    made = Prompt(
        records[0].tokens,
        field(prompt, "user_prompt", str, "prompt"),
        field(prompt, "chat_template_used", bool, "prompt"),
    )
    home = Home(lm, lm, None if lm is None else lm.tokenizer, is_text=mark == NO_MODEL)
    loom = loom_class._restored(home, made, heddle_class)
    loom.created = field(data, "created", str, "the file")
    home.adapter = None if data.get("adapter") is None else field(data, "adapter", str, "the file")
    _grow_back(loom, records)
    return loom


def _check_model(lm: LM, mark: ModelMark, *, force: bool) -> None:
    info = lm.info
    if mark == NO_MODEL:
        raise ModelMismatch("the loom is of texts that no model wrote: open it without one")
    if info.n_vocab != mark.n_vocab:
        raise ModelMismatch(
            f"the loom was saved by {mark.name} with {mark.n_vocab} token ids; {info.model} has "
            f"{info.n_vocab}. Open it with its own model, or without one to read it"
        )
    if info.fingerprint != mark.fingerprint and not force:
        raise ModelMismatch(
            f"the loom was saved by {mark.name}, not by {info.model}: their fingerprints differ. "
            "Open it with its own model, or take its token ids as they are with force=True",
            hint="force=True",
        )


def _grow_back(loom: Loom, records: list[Record]) -> None:
    nodes: list[Heddle] = [loom]
    _fill(loom, records[0])
    for record in records[1:]:
        parent = nodes[record.parent]
        node = parent._child(record.tokens)
        parent._children.append(node)
        _fill(node, record)
        nodes.append(node)


def _fill(node: Heddle, record: Record) -> None:
    node.id = record.id
    node.logprobs, node.entropies = record.logprobs, record.entropies
    node.params = _params(record)
    node.lineage = tuple(record.lineage)
    node.finish_reason, node.stop_string = record.finish_reason, record.stop_string
    node.terminal, node.score, node.meta = record.terminal, record.score, record.meta
    if node.lm is None:
        node._text = record.text


def _params(record: Record) -> SamplingParams | None:
    if record.params is None:
        return None
    try:
        return SamplingParams.from_dict(record.params)
    except (WeftError, *files.FAULTS) as error:
        raise FormatError(f"the params of node {record.id} are not valid: {error}") from error
