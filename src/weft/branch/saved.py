"""Save and load a branch as JSON data."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._core import atomic_files
from .._core.atomic_files import parse_int, parse_number, repr_short, require_field
from .._core.sampling.params import SamplingParams
from .._core.sampling.rng import stream_of
from .._core.sched.logits_cache import LogitsRow
from ..errors import (
    ConfigError,
    ConstraintError,
    ContextOverflow,
    FormatError,
    ModelMismatch,
    StoreError,
)
from .state import Accepted, accepted_chain

_log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from ..lm.lm import LM
    from .branch import Branch

FORMAT, VERSION = "weft-branch", 1
SUBJECT = "the saved branch"  # in error messages


def save(branch: Branch, path: str | Path | None) -> dict[str, Any]:
    """Serialize a branch; see `Branch.save`."""
    adapter = branch.adapter
    accepted = [[a.position, a.token, *a.own()] for a in accepted_chain(branch.last)]
    data = {
        "format": FORMAT,
        "version": VERSION,
        "fingerprint": branch.lm.fingerprint(adapter),
        "tokens": branch.tokens,
        "params": branch.params.to_dict(),
        "seed": branch.seed,
        "lineage": list(branch.lineage),
        "grammar_from": branch.grammar_from,
        "accepted": accepted[::-1],
        "ahead": list(branch.ahead),
        "steering": SamplingParams(logit_bias=branch.steering).to_dict()["logit_bias"],
        "adapter": adapter,
    }
    if path is not None:
        atomic_files.write(path, json.dumps(data))
    return data


def load(branch_class: type[Branch], lm: LM, source: Mapping[str, Any] | str | Path) -> Branch:
    """Restore a branch from data or a file; see `Branch.load`."""
    if isinstance(source, Mapping):
        return _validate_and_restore(branch_class, lm, source)
    data = atomic_files.read_json(
        source, FormatError, "no saved branch, or is broken", unread=StoreError
    )
    with atomic_files.with_filename(source):
        return _validate_and_restore(branch_class, lm, data)


def _validate_and_restore(branch_class: type[Branch], lm: LM, data: object) -> Branch:
    """Check format, version, model and adapter of saved data; return the branch."""
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        raise FormatError(f'this file is no saved branch: "format" is not "{FORMAT}"')
    version = data.get("version")
    if version != VERSION:
        raise FormatError(f"this is a saved branch of version {repr_short(version)}, not {VERSION}")
    adapter = data.get("adapter")  # missing in files of earlier versions, like the steering
    if adapter is not None and not isinstance(adapter, str):
        raise FormatError(
            f"adapter of {SUBJECT} is {repr_short(adapter)}; a name or null belongs there"
        )
    if require_field(data, "fingerprint", str, SUBJECT) != lm.fingerprint(adapter):
        which = "model" if adapter is None else f"model, or another LoRA adapter named {adapter!r}"
        raise ModelMismatch(f"the branch was saved with another {which}; load it with that one")
    try:
        return _restore(branch_class, lm, data)
    except ContextOverflow:  # the file is valid
        raise
    except (ConfigError, ConstraintError, *atomic_files.PARSE_ERRORS) as error:
        raise FormatError(f"{SUBJECT} is broken: {error}") from error


def _restore(branch_class: type[Branch], lm: LM, data: Mapping[str, Any]) -> Branch:
    """Return a branch with the saved tokens and state."""
    saved = SamplingParams.from_dict(require_field(data, "params", dict, SUBJECT))
    params = SamplingParams.resolve({}, saved)  # with the current draw rule
    if saved.draw_rule != params.draw_rule:
        _log.warning("an earlier version saved the branch: its seed now draws other tokens")
    seed = parse_int(data.get("seed"), f"seed of {SUBJECT}", 0, 2**64)
    lineage = tuple(_parse_int_list(data, "lineage", 2**63))
    tokens = _parse_int_list(data, "tokens", lm.info.n_vocab or lm.text.n_vocab)
    ahead = _parse_int_list(data, "ahead", lm.info.n_vocab or lm.text.n_vocab)
    stream = stream_of(seed, lineage)
    place = lm.place(tokens, namespace=data.get("adapter"))
    lm.check_path(ahead, len(tokens))
    branch = branch_class(lm, place, params, lm.sampler(params, stream, in_steps=True))
    branch.seed, branch.lineage = seed, lineage
    for index, entry in enumerate(require_field(data, "accepted", list, SUBJECT)):
        where = f"accepted token {index} of {SUBJECT}"
        if not isinstance(entry, list | tuple) or len(entry) != 4:
            raise FormatError(f"{where} is {repr_short(entry)}; four values belong there")
        position = parse_int(entry[0], f"position of {where}", 0, len(tokens) + len(ahead))
        token = parse_int(entry[1], where, 0, lm.info.n_vocab or lm.text.n_vocab)
        raw, kept = (None if value is None else parse_number(value, where) for value in entry[2:])
        branch.last = Accepted(branch.last, position, token, raw, kept)
    n_accepted = 0 if branch.last is None else branch.last.n
    branch.grammar_from = parse_int(
        data.get("grammar_from"), f"grammar_from of {SUBJECT}", 0, n_accepted + 1
    )
    if len(ahead) > n_accepted:
        raise FormatError(f"{SUBJECT} has more tokens ahead than accepted ones")
    branch.ahead = ahead
    steering = {"logit_bias": data.get("steering") or {}}
    branch.steering = branch.validate_biases(SamplingParams.from_dict(steering).logit_bias)
    branch.sampler = branch.sampler_at(branch.last, stream)
    branch.row = LogitsRow() if tokens else None
    return branch


def _parse_int_list(data: Mapping[str, Any], name: str, high: int) -> list[int]:
    """Return a field of saved data that must be a list of integers from 0 to `high`."""
    given = require_field(data, name, list, SUBJECT)
    return [parse_int(each, f"{name} of {SUBJECT}", 0, high) for each in given]
