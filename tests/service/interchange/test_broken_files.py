"""A damaged file is imported or raises FormatError, never another exception."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from cases import one_in
from foreign_looms import FILES, LOOMSIDIAN_NOTE, MIKUPAD
from weft import Loom
from weft.errors import FormatError
from weft.service.interchange import IMPORTERS, export, read

SHAPES = {**FILES, "mikupad": MIKUPAD, "loomsidian note": LOOMSIDIAN_NOTE}
ALL = {**SHAPES, "weft": None}
STRANGE: list[Any] = [
    None, True, False, 0, -1, 10**30, 0.5, -1e308, "", "x", "u-1", "r", "\ud800", "a\x00b",
    [], {}, [[]], [{}], {"text": 5}, [None, None], {"": None}, ["u-1"], [["a", {}]],
]  # fmt: skip


def example(name: str) -> Any:
    if name != "weft":
        return SHAPES[name]
    loom = Loom(None, "Once")
    loom.add(" upon").add(" a time")
    return json.loads("".join(export(loom, "json")))


def copied(data: Any) -> Any:
    return json.loads(json.dumps(data))


def places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Every container of a JSON value, with each of its keys."""
    stack = [data]
    while stack:
        top = stack.pop()
        keys = list(top) if isinstance(top, dict) else range(len(top))
        for key in keys:
            yield top, key
            if isinstance(top[key], dict | list):
                stack.append(top[key])


def changed(data: Any, random_: random.Random) -> Any:
    """A copy with one to three values replaced, removed, doubled or put elsewhere."""
    new = copied(data)
    for _ in range(random_.randint(1, 3)):
        result = list(places(new))
        if not result:
            return new
        holder, key = random_.choice(result)
        way = random_.randrange(4)
        if way == 0:
            holder[key] = copied(random_.choice(STRANGE))
        elif way == 1:
            del holder[key]
        elif way == 2 and isinstance(holder, list):
            holder.append(copied(holder[key]))
        else:
            other, at = random_.choice(result)
            taken = other.get(at) if isinstance(other, dict) else other[:at]
            holder[key] = copied(taken)
    return new


def torn(data: bytes, random_: random.Random) -> bytes:
    """Return the bytes truncated, or with some of them changed."""
    if random_.random() < 0.3:
        return data[: random_.randrange(len(data))]
    new = bytearray(data)
    for _ in range(random_.randint(1, 4)):
        new[random_.randrange(len(new))] = random_.choice(b'{}[]",:\\0e-x\xff\x00 ')
    return bytes(new)


def check(source: Any, format: str) -> bool:
    """Return True if the file can be read; then its looms can be exported and read back."""
    try:
        result = read(source, format=format)
    except FormatError:
        return False
    for imported in result.looms:
        assert imported.at.path[0] is imported.loom
        written = "".join(export(imported.loom, "json")).encode(errors="backslashreplace")
        (second,) = (one.loom for one in read(written).looms)
        assert [node.text for node in second.walk()] == [node.text for node in imported.loom.walk()]
        for name in ("markdown", "csv", "messages"):
            assert "".join(export(imported.loom, name, scope="tree"))
    return True


def fuzz(name: str, seed: int, n: int) -> int:
    random_, data = random.Random(f"{name}{seed}"), example(name)
    n_read = 0
    for _ in range(n):
        format = random_.choice(("auto", name.removesuffix(" note")))
        n_read += check(changed(data, random_), format)
        n_read += check(torn(json.dumps(data).encode(), random_), format)
    return n_read


@pytest.mark.parametrize("name", ALL)
def test_changed_or_truncated_file_is_read_or_raises_format_error(name: str) -> None:
    assert fuzz(name, 1, 20) > 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ALL)
def test_many_changed_files_are_read_or_raise_format_error(name: str, seed: int) -> None:
    fuzz(name, seed + 2, 300)


@pytest.mark.parametrize("name", one_in(3, ALL))
def test_any_json_is_read_or_raises_format_error(name: str) -> None:
    for data in [*STRANGE, *(example(each) for each in ALL)]:
        check(json.dumps(data).encode(), name.removesuffix(" note"))


def test_example_files_cover_every_importer() -> None:
    assert set(ALL) - {"loomsidian note"} == {*IMPORTERS, "weft"} - {"text"}
