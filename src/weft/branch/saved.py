"""A branch as JSON data."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import FormatError, ModelMismatch, WeftError
from ..sampling.params import SamplingParams
from ..sampling.rng import stream_of
from ..sched.rows import LogitsRow
from .metrics import Accepted, chain

_log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from ..lm import LM
    from .branch import Branch

FORMAT, VERSION = "weft-branch", 1


def save(branch: Branch, path: str | Path | None) -> dict[str, Any]:
    """Return a branch as data; see `Branch.save`."""
    data = {
        "format": FORMAT,
        "version": VERSION,
        "fingerprint": branch.lm.info.fingerprint,
        "tokens": branch.tokens,
        "params": branch.params.to_dict(),
        "seed": branch._seed,
        "lineage": list(branch._lineage),
        "grammar_from": branch.grammar_from,
        "accepted": [_record(each) for each in chain(branch.last)][::-1],
        "ahead": list(branch._ahead),
    }
    if path is not None:
        Path(path).write_text(json.dumps(data), encoding="utf-8")
    return data


def _record(each: Accepted) -> list[Any]:
    before = each.before
    raw, n_raw = (before.raw, before.n_raw) if before is not None else (0.0, 0)
    kept, n_kept = (before.kept, before.n_kept) if before is not None else (0.0, 0)
    return [
        each.position,
        each.token,
        each.raw - raw if each.n_raw > n_raw else None,
        each.kept - kept if each.n_kept > n_kept else None,
    ]


def load(kind: type[Branch], lm: LM, source: Mapping[str, Any] | str | Path) -> Branch:
    """Return a branch from data or a file; see `Branch.load`."""
    data = source if isinstance(source, Mapping) else _read(Path(source))
    if data.get("format") != FORMAT or data.get("version") != VERSION:
        raise FormatError(
            f"this is no saved branch of version {VERSION}: it says {data.get('format')!r},"
            f" version {data.get('version')!r}"
        )
    if data.get("fingerprint") != lm.info.fingerprint:
        raise ModelMismatch("the branch was saved with another model; load it with that one")
    try:
        return _made(kind, lm, data)
    except WeftError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"the saved branch is broken: {error!r}") from error


def _made(kind: type[Branch], lm: LM, data: Mapping[str, Any]) -> Branch:
    saved = SamplingParams.from_dict(data["params"])
    params = SamplingParams.resolve({}, saved)  # from here on it is drawn by today's rule
    if saved.draw_rule != params.draw_rule:
        _log.warning("the branch was saved by an earlier version: its seed goes on differently")
    seed, lineage = int(data["seed"]), tuple(map(int, data["lineage"]))
    stream = stream_of(seed, lineage)
    branch = kind(lm, lm.place(list(data["tokens"])), params, lm.sampler(params, stream))
    branch._seed, branch._lineage = seed, lineage
    branch.grammar_from = int(data["grammar_from"])
    for position, token, raw, kept in data["accepted"]:
        branch.last = Accepted(branch.last, position, token, raw, kept)
    branch._ahead = list(data["ahead"])
    branch.sampler = branch.sampler_at(branch.last, stream)
    branch.row = LogitsRow() if data["tokens"] else None
    return branch


def _read(path: Path) -> Mapping[str, Any]:
    try:
        data = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise FormatError(f"{path} holds no saved branch: {error}") from error
    if not isinstance(data, dict):
        raise FormatError(f"{path} holds no saved branch")
    return data
