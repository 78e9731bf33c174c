"""How files break: good bytes, changed by a seeded hand; what may lie where a file belongs."""

from __future__ import annotations

import copy
import json
import os
import shutil
import sys
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

# What JSON has no word for, or no reader can take; written into the text as they are.
RAW = ["1e999", "-1e999", "NaN", "Infinity", "1" + "0" * 400, "1" * 5000, "-0", "1e-999", "0.1e1"]
RAW += ["[" * n + "1" + "]" * n for n in (20, 200, 800, 5000)]
RAW += ['{"a":' * n + "null" + "}" * n for n in (200, 800, 5000)]
PLACE = "@raw@"  # stands for one of them until the rest is text
VALUES: list[Any] = [
    None, True, False, 0, 1, -1, 2, 255, 2**31 - 1, 2**31, 2**32, 2**53, 2**63, 2**64, -(2**63),
    10**18, 10**30, 0.5, -1.5, 1e308, 1e-320, "", "x", "1", "nan", "inf", "-inf", "\u0000",
    "\ud800", "ü" * 300, "../../x", "/", [], {}, [[]], [None], [1], ["x"], {"x": 1}, {"": []}, [{}],
    [1, 2, 3], {"type": "x"}, {"content": 5}, "[", "(?P<", "{{", "{% for", [[1, 2], [3]],
]  # fmt: skip
TEMPLATES = [
    "",
    "{{",
    "{% for %}",
    "{{ messages[9].x.y }}",
    "{{ 'x' * 10 ** 10 }}",
    "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ 9 ** 9 ** 9 ** 9 }}",
    "{% set n = namespace(s='x') %}{% for a in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "{% if a %}" * 3000 + "{% endif %}" * 3000,
    "{{ '%1000000000d' % 1 }}{{ 1 // 0 }}",
    "{% include 'x' %}",
    "{{ messages | nothing }}",
    "{{ strftime_now(5) }}",
    "{{ raise_exception(5) }}",
    "\ufeff{{ messages[0]['content'] }}",
]


def changed(data: bytes, rng: Random) -> bytes:
    """Return a file's bytes, changed: more often in a JSON file's values than anywhere."""
    if rng.random() < 0.65:
        with suppress(ValueError):  # it is no JSON
            return changed_json(data, rng)
    return changed_bytes(data, rng)


def changed_bytes(data: bytes, rng: Random) -> bytes:
    """Return bytes that were torn, flipped, doubled, cut, or are something else altogether."""
    at, size = rng.randrange(len(data) + 1), rng.randrange(1, 64)
    match rng.randrange(12):
        case 0:
            return b""
        case 1:
            return data[:at]
        case 2:
            return data[at:]
        case 3 | 4 | 5:
            flipped = bytearray(data)
            for _ in range(rng.choice([1, 1, 2, 8])):
                flipped[rng.randrange(len(flipped))] ^= 1 << rng.randrange(8)
            return bytes(flipped)
        case 6:
            return data[:at] + rng.randbytes(size) + data[at:]
        case 7:
            return data[:at] + data[at + size :]
        case 8:
            return data[:at] + data[at : at + size] * 2 + data[at + size :]
        case 9:
            return data[:at] + rng.choice([b"\xff\xfe", b"\x00", b"\xed\xa0\x80"]) + data[at:]
        case 10:
            return rng.choice([b"[", b'{"a":', b"("]) * 200_000
        case _:
            return rng.choice([rng.randbytes(2000), sys.executable.encode(), zlib.compress(data)])


def changed_json(data: bytes, rng: Random) -> bytes:
    """Return JSON with one to three of its values changed. Raises: ValueError for what is none."""
    value = json.loads(data)
    raws: list[str] = []
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        value = _changed_value(value, rng, raws)
    text = json.dumps(value)
    for raw in raws:
        text = text.replace(f'"{PLACE}"', raw, 1)
    if rng.random() < 0.05 and '"' in text:  # the same key again, with another value
        key = rng.choice([part for part in text.split('"')[1::2] if part] or ["x"])
        text = text.replace("{", f'{{"{key}": {json.dumps(rng.choice(VALUES))}, ', 1)
    return text.encode("utf-8", "surrogatepass")


def changed_part(root: Any, holder: dict[str, Any], key: str, rng: Random) -> bytes:
    """Return JSON in which only the value at `key` of `holder`, a part of `root`, is changed."""
    kept, holder[key] = holder[key], PLACE
    part = changed_json(json.dumps(kept).encode(), rng)
    return json.dumps(root).encode().replace(f'"{PLACE}"'.encode(), part)


def changed_tensors(data: bytes, rng: Random) -> bytes:
    """Return a safetensors file whose header says something else, or is none."""
    length = int.from_bytes(data[:8], "little")
    if rng.random() < 0.6:
        return with_header(data, changed_json(data[8 : 8 + length], rng))
    return changed_bytes(data[: 8 + length], rng) + data[8 + length :]


def with_header(data: bytes, header: bytes) -> bytes:
    """Return a safetensors file with another header."""
    length = int.from_bytes(data[:8], "little")
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header + data[8 + length :]


def _changed_value(root: Any, rng: Random, raws: list[str]) -> Any:
    holders: list[Any] = []
    stack = [root]
    while stack:
        each = stack.pop()
        if isinstance(each, dict | list) and each:
            holders.append(each)
            stack.extend(each.values() if isinstance(each, dict) else each)
    if not holders or rng.random() < 0.03:
        return copy.deepcopy(rng.choice(VALUES))
    holder = rng.choice(holders)
    key = rng.choice(list(holder) if isinstance(holder, dict) else range(len(holder)))
    match rng.randrange(12):
        case 0 | 1:
            del holder[key]
        case 2:
            if isinstance(holder, dict):
                holder[str(key) + rng.choice(["x", "_", " "])] = holder.pop(key)
            else:
                holder.append(holder[key])
        case 3 | 4:
            raws.append(rng.choice(RAW))
            holder[key] = PLACE
        case 5:
            other = rng.choice(holders)
            values = list(other.values()) if isinstance(other, dict) else other
            holder[key] = copy.deepcopy(rng.choice(values))
        case 6:
            value = holder[key]
            holder[key] = [value] if rng.random() < 0.5 else {"x": value}
        case 7:
            value = holder[key]
            holder[key] = str(value) if not isinstance(value, str) else len(value)
        case _:
            holder[key] = copy.deepcopy(rng.choice(VALUES))
    return root


def put(file: Path, data: bytes) -> None:
    """Make a file of these bytes, whatever is there."""
    clear(file)
    file.write_bytes(data)


def clear(file: Path) -> None:
    """Take away what is there."""
    if file.is_dir() and not file.is_symlink():
        shutil.rmtree(file)
    else:
        file.unlink(missing_ok=True)


def _sparse(file: Path) -> None:
    with file.open("wb") as out, suppress(OSError):  # where files cannot be that large
        out.truncate(1 << 43)


# What may lie where a file should be.
KINDS: dict[str, Callable[[Path], object]] = {
    "nothing": lambda file: None,
    "folder": lambda file: file.mkdir(),
    "loop": lambda file: file.symlink_to(file.name),
    "dangling": lambda file: file.symlink_to("nothing-there"),
    "binary": lambda file: shutil.copyfile(sys.executable, file),
}
if os.name != "nt":
    KINDS |= {
        "pipe": lambda file: os.mkfifo(file),
        "zero": lambda file: file.symlink_to("/dev/zero"),
        "null": lambda file: file.symlink_to("/dev/null"),
        "sparse": _sparse,
    }
