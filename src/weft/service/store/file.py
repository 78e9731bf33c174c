"""Read, validate and write `.loom.json` files, version 1.

A file is one JSON object. `nodes` is a flat list with parents before children, each with the index
of its parent, so that deep trees need no recursion. Tokens are authoritative; texts serve readers
without a model. The strings "inf", "-inf" and "nan" stand for these numbers.

The fields are:

    format: "weft.loom"
    version, created
    title: only if the loom has one
    model: {name, fingerprint, n_vocab}
    prompt: {user_prompt, chat_template_used}
    adapter: only if the loom has one
    nodes: [{id, parent, text, tokens, logprobs, entropies, params, lineage, finish_reason,
             stop_string, terminal, score, meta, legal_logmass (only with a constraint)}]
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast, get_args

from ..._core import atomic_files
from ..._core.atomic_files import json_number, parse_int, parse_number, repr_short, require_field
from ..._core.sampling.params import SamplingParams
from ..._core.sched.work import FinishReason
from ...errors import ConfigError, FormatError, ModelMismatch, StoreError, WeftError
from ...loom import Heddle, Loom
from ...loom.loom import Prompt
from ...loom.model_binding import ModelBinding
from ...loom.node import child_list, new_child, set_text
from . import sidecar

if TYPE_CHECKING:
    from ...lm.lm import LM

FORMAT = "weft.loom"
VERSION = 1

MAX_VOCAB = 1 << 62  # larger values mean that there is no fixed vocabulary
_REASONS = frozenset(get_args(FinishReason))
_NODE_FIELDS = {
    "id": str,
    "text": str,
    "tokens": list,
    "logprobs": list,
    "entropies": list,
    "lineage": list,
    "terminal": bool,
    "meta": dict,
}


class ModelIdentity(NamedTuple):
    """The model and adapter to which a loom's tokens belong."""

    name: str
    fingerprint: str
    n_vocab: int  # vocabulary size; 0 without a fixed vocabulary
    adapter: str = ""  # fingerprint of the loom's LoRA adapter; "" if none or unknown

    def to_dict(self) -> dict[str, Any]:
        """Return the fields of a file. `adapter` is left out if it is empty."""
        fields = {**self._asdict(), "n_vocab": self.n_vocab or None}
        if not self.adapter:
            del fields["adapter"]
        return fields


# The identity of looms that consist of texts without tokens.
NO_MODEL = ModelIdentity("no model", "", 1)


class Record(NamedTuple):
    """A validated node of a file. `parent` is the index of the parent's record; -1 for the root."""

    id: str
    parent: int
    text: str
    tokens: list[int]
    logprobs: list[float]
    entropies: list[float]
    params: dict[str, Any] | None
    lineage: list[int]
    finish_reason: FinishReason | None
    stop_string: str | None
    terminal: bool
    score: float | None
    meta: dict[str, Any]
    legal_logmass: list[float]


def read_header(data: object) -> ModelIdentity:
    """Check the format and the version of a file, and return the model that its tokens belong to.

    data: the parsed JSON of the file. Raises: FormatError.
    """
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise FormatError(f'this is no saved loom: "format" is not "{FORMAT}"')
    version = require_field(data, "version", int, "the file")
    if version > VERSION:
        raise FormatError(
            f"the file has format version {version}; this Weft reads up to {VERSION}. Update Weft",
            hint="Update Weft.",
        )
    if version < 1:
        raise FormatError(f"the file has format version {version}; the first one is 1")
    model = require_field(data, "model", dict, "the file")
    return ModelIdentity(
        require_field(model, "name", str, "model"),
        require_field(model, "fingerprint", str, "model"),
        _n_vocab(model),
        require_field(model, "adapter", str, "model") if "adapter" in model else "",
    )


def _n_vocab(model: dict[str, Any]) -> int:
    """Return the vocabulary size in a file's `model`; 0 if its engine has no fixed vocabulary."""
    if "n_vocab" in model and model["n_vocab"] is None:
        return 0
    n_vocab = parse_int(model.get("n_vocab"), "n_vocab of model", 1)
    return 0 if n_vocab > MAX_VOCAB else n_vocab


def read_records(data: dict[str, Any], n_vocab: int) -> tuple[list[Record], list[str]]:
    """Validate the nodes of a file: parents first, tokens in the vocabulary, unique ids.

    data: the parsed JSON of the file. n_vocab: vocabulary size; 0 if the engine has no fixed one.

    Returns the nodes, and messages about ignored data: logprobs and entropies whose number differs
    from that of the tokens.

    Raises: FormatError for invalid nodes.
    """
    nodes = require_field(data, "nodes", list, "the file")
    if not nodes:
        raise FormatError("the file has no nodes; a loom has at least its root")
    dropped: list[str] = []
    records = [_record(node, index, n_vocab, dropped) for index, node in enumerate(nodes)]
    if len({record.id for record in records}) < len(records):
        raise FormatError("two nodes have the same id; the file is broken")
    return records, dropped


def _record(node: object, index: int, n_vocab: int, dropped: list[str]) -> Record:
    """Validate one node of a file. dropped: receives messages about ignored data."""
    where = f"node {index}"
    if not isinstance(node, dict):
        raise FormatError(f"{where} is {repr_short(node)}; an object belongs there")
    fields = {name: require_field(node, name, kind, where) for name, kind in _NODE_FIELDS.items()}
    tokens = [
        parse_int(token, f"a token of {where}", 0, n_vocab or None) for token in fields["tokens"]
    ]
    values = {}
    for name in ("logprobs", "entropies"):
        values[name] = [parse_number(item, f"{name} of {where}") for item in fields[name]]
        if len(values[name]) not in (0, len(tokens)):
            dropped.append(
                f"{where} has {len(tokens)} tokens and {len(values[name])} {name}: these are"
                " left out"
            )
            values[name] = []
    legal = require_field(node, "legal_logmass", list, where) if "legal_logmass" in node else []
    score = node.get("score")
    return Record(
        id=fields["id"],
        parent=_parent(node, index),
        text=fields["text"],
        tokens=tokens,
        logprobs=values["logprobs"],
        entropies=values["entropies"],
        params=_optional(node, "params", dict, where),
        lineage=[parse_int(part, f"lineage of {where}", 0, 2**63) for part in fields["lineage"]],
        finish_reason=_reason(node, where),
        stop_string=_optional(node, "stop_string", str, where),
        terminal=fields["terminal"],
        score=None if score is None else parse_number(score, f"score of {where}"),
        meta=_savable(fields["meta"], where),
        legal_logmass=[parse_number(item, f"legal_logmass of {where}") for item in legal],
    )


def _savable(meta: dict[str, Any], where: str) -> dict[str, Any]:
    """Return the meta of a node. Raises: FormatError for a meta that could not be written.

    That is one with infinite numbers or deep nesting. where: the node, for the message.
    """
    if meta:
        try:
            json.dumps(meta, allow_nan=False)
        except (ValueError, RecursionError) as error:
            raise FormatError(f"meta of {where} cannot be saved: {error}") from error
    return meta


def _parent(node: dict[str, Any], index: int) -> int:
    """Return the index of a node's parent, which must precede it."""
    if index == 0:
        if node.get("parent") is not None:
            raise FormatError("node 0 is the root; its parent must be null")
        return -1
    return parse_int(node.get("parent"), f"parent of node {index}", 0, index)


def _optional(node: dict[str, Any], name: str, kind: type, where: str) -> Any:
    """Return a field of a type, or None if it is null or missing. Raises: FormatError."""
    return None if node.get(name) is None else require_field(node, name, kind, where)


def _reason(node: dict[str, Any], where: str) -> FinishReason | None:
    """Return a node's finish reason. Raises: FormatError for an unknown one."""
    reason = _optional(node, "finish_reason", str, where)
    if reason is not None and reason not in _REASONS:
        raise FormatError(
            f"finish_reason of {where} is {repr_short(reason)}; allowed: {sorted(_REASONS)}"
        )
    return cast("FinishReason | None", reason)


def save(loom: Loom, path: str | os.PathLike[str], *, kv: bool = False) -> None:
    """Write a loom to a file atomically. kv: also write its KV to a sidecar file."""
    atomic_files.write(path, chunks(loom))
    if kv:
        sidecar.save(loom, sidecar.path_for(path))


def chunks(loom: Loom, *, title: str = "") -> Iterator[str]:
    """Yield the lines of a file, one for each node, with keys in a fixed order.

    title: the loom's title; "" for none.
    Raises: ConfigError for a `meta` that is not JSON.
    """
    identity = identity_of(loom)
    head = {
        "format": FORMAT,
        "version": VERSION,
        "created": loom.created,
        **({"title": title} if title else {}),
        "model": identity.to_dict(),
        "prompt": {
            "user_prompt": loom.user_prompt,
            "chat_template_used": loom.chat_template_used,
        },
        **({} if loom.adapter is None else {"adapter": loom.adapter}),
    }
    yield json.dumps(head, ensure_ascii=False, indent=1)[:-2] + ',\n "nodes": [\n'
    stack: list[tuple[Heddle, int | None]] = [(loom, None)]
    index = 0
    while stack:
        node, parent = stack.pop()
        yield (",\n  " if index else "  ") + _dump(_node_data(node, parent), node)
        stack.extend((child, index) for child in reversed(node.children))
        index += 1
    yield "\n ]\n}\n"


def identity_of(loom: Loom) -> ModelIdentity:
    """Return the model that a loom's tokens belong to: its name, fingerprint and vocabulary size.

    For a loom without an LM these are the values from its file or database row.
    """
    if loom.lm is None:
        return loom.saved_by
    lm, name, info = loom.lm, loom.adapter, loom.lm.info
    if name is None or name in lm.adapters:
        adapter = lm.adapters.fingerprint(name)
    else:  # the adapter was removed from the LM
        adapter = getattr(loom, "saved_by", NO_MODEL).adapter
    return ModelIdentity(info.model, lm.fingerprint(), info.n_vocab, adapter)


def _node_data(node: Heddle, parent: int | None) -> dict[str, Any]:
    """Return a node as a file has it. parent: index of its parent; None for the root."""
    legal = [json_number(value) for value in node.legal_logmass]
    return {
        "id": node.id,
        "parent": parent,
        "text": node.text,
        "tokens": node.tokens,
        "logprobs": [json_number(value) for value in node.logprobs],
        "entropies": [json_number(value) for value in node.entropies],
        "params": None if node.params is None else node.params.to_dict(),
        "lineage": list(node.lineage),
        "finish_reason": node.finish_reason,
        "stop_string": node.stop_string,
        "terminal": node.terminal,
        "score": None if node.score is None else json_number(float(node.score)),
        "meta": node.meta,
        **({"legal_logmass": legal} if legal else {}),
    }


def _dump(record: dict[str, Any], node: Heddle) -> str:
    """Return a node as one line of JSON. Raises: ConfigError for a meta that is not JSON."""
    try:
        if json.loads(json.dumps(node.meta)) != node.meta:
            raise TypeError("a tuple or a key that is not a text would change")
        return json.dumps(record, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"the meta of node {node.id} cannot be saved as JSON: {error}. Allowed are dicts with "
            "text keys, lists, texts, finite numbers, True, False and None"
        ) from error


L = TypeVar("L", bound=Loom)
_log = logging.getLogger(__name__)


def load(
    path: str | os.PathLike[str],
    lm: LM | None,
    *,
    force: bool,
    loom_class: type[L],
    heddle_class: type[Heddle],
    kv: bool = True,
) -> L:
    """Read a loom from a file; see `Loom.open`.

    lm: the model; None opens the loom for reading only. kv: also load the KV of a sidecar file.
    """
    data = atomic_files.read_json(
        path, FormatError, "no saved loom, or is broken", unread=StoreError
    )
    with atomic_files.with_filename(path):
        loom = load_json(data, lm, force=force, loom_class=loom_class, heddle_class=heddle_class)
    for note in loom.dropped:
        _log.warning("%s: %s", path, note)
    if kv and lm is not None and (notice := sidecar.try_load(loom, path)):
        loom.dropped += (notice,)
    return loom


def load_json(
    data: object,
    lm: LM | None,
    *,
    force: bool,
    loom_class: type[L],
    heddle_class: type[Heddle],
) -> L:
    """Create the loom that the parsed JSON of a file describes.

    Args:
        data: the parsed JSON.
        lm: the model; None opens the loom for reading only.
        force: accept tokens of another model with the same vocabulary size.
        loom_class, heddle_class: classes of the root and of the other nodes.

    Raises: like `Loom.open`, but messages do not contain the file's name.
    """
    identity = read_header(data)
    assert isinstance(data, dict)
    records, dropped = read_records(data, identity.n_vocab)
    if lm is not None:
        check_model(lm, identity, data.get("adapter"), force=force)
    loom = _build_loom(data, identity, records, lm, loom_class, heddle_class)
    loom.dropped = tuple(dropped)
    return loom


def _build_loom(
    data: dict[str, Any],
    identity: ModelIdentity,
    records: list[Record],
    lm: LM | None,
    loom_class: type[L],
    heddle_class: type[Heddle],
) -> L:
    """Create the loom from validated records."""
    header = require_field(data, "prompt", dict, "the file")
    prompt = Prompt(
        records[0].tokens,
        require_field(header, "user_prompt", str, "prompt"),
        require_field(header, "chat_template_used", bool, "prompt"),
    )
    adapter = (
        None if data.get("adapter") is None else require_field(data, "adapter", str, "the file")
    )
    created = require_field(data, "created", str, "the file")
    loom = bare_loom(identity, prompt, created, adapter, lm, loom_class, heddle_class)
    _restore_nodes(loom, records)
    return loom


def bare_loom(
    identity: ModelIdentity,
    prompt: Prompt,
    created: str,
    adapter: str | None,
    lm: LM | None,
    loom_class: type[L],
    heddle_class: type[Heddle],
) -> L:
    """Create the root of a saved loom, without tokenizing its prompt.

    Args:
        identity: the model of the loom's tokens.
        created: the time of its creation, as in the file.
        adapter: name of its adapter; None without one.
        lm: the model; None opens the loom for reading only.
        loom_class, heddle_class: classes of the root and of the other nodes.
    """
    binding = ModelBinding(
        lm, lm, None if lm is None else lm.tokenizer, is_text=identity == NO_MODEL
    )
    loom = loom_class.restored(binding, prompt, heddle_class)
    loom.created, binding.adapter, loom.saved_by = created, adapter, identity
    return loom


def _describe_ids(n_vocab: int) -> str:
    """Return the kind of token ids for an error message."""
    return f"{n_vocab} token ids" if n_vocab else "pieces of text for tokens"


def check_model(lm: LM, identity: ModelIdentity, adapter: object, *, force: bool) -> None:
    """Raise ModelMismatch if a loom's tokens belong to another model or adapter.

    adapter: name of the loom's adapter. It is checked only if the LM has loaded it.
    """
    info = lm.info
    if identity == NO_MODEL:
        raise ModelMismatch("the loom has texts without tokens: open it without a model")
    if info.n_vocab != identity.n_vocab:
        raise ModelMismatch(
            f"the loom was saved by {identity.name} with {_describe_ids(identity.n_vocab)}; "
            f"{info.model} has {_describe_ids(info.n_vocab)}. "
            "Open it with its own model, or without one to read it"
        )
    if force:
        return
    if lm.fingerprint() != identity.fingerprint:
        raise ModelMismatch(
            f"the loom was saved by {identity.name}, and {info.model} has other weights: their"
            " fingerprints differ. Open it with its own model, or take its token ids as they are"
            " with force=True",
            hint="force=True",
        )
    if not identity.adapter or not isinstance(adapter, str) or adapter not in lm.adapters:
        return
    if lm.adapters.fingerprint(adapter) != identity.adapter:
        raise ModelMismatch(
            f"the loom was grown with another LoRA adapter named {adapter!r}. Add the one that grew"
            " it, or take its token ids as they are with force=True",
            hint="force=True",
        )


def _restore_nodes(loom: Loom, records: list[Record]) -> None:
    """Create the nodes of the records below the root."""
    nodes: list[Heddle] = [loom]
    _fill(loom, records[0])
    for record in records[1:]:
        parent = nodes[record.parent]
        node = new_child(parent, record.tokens)
        child_list(parent).append(node)
        _fill(node, record)
        nodes.append(node)


def _fill(node: Heddle, record: Record) -> None:
    """Set a node's values from its record."""
    node.id = record.id
    node.logprobs, node.entropies = record.logprobs, record.entropies
    node.legal_logmass = record.legal_logmass
    node.params = _params(record)
    node.lineage = tuple(record.lineage)
    node.finish_reason, node.stop_string = record.finish_reason, record.stop_string
    node.terminal, node.score, node.meta = record.terminal, record.score, record.meta
    if node.lm is None:
        set_text(node, record.text)


def _params(record: Record) -> SamplingParams | None:
    """Return a record's sampling parameters; None without any. Raises: FormatError."""
    if record.params is None:
        return None
    try:
        return SamplingParams.from_dict(record.params)
    except (WeftError, *atomic_files.PARSE_ERRORS) as error:
        raise FormatError(f"the params of node {record.id} are not valid: {error}") from error
