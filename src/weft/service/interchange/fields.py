"""Validated reading of values in files of other programs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from ..._core.atomic_files import repr_short
from ...errors import FormatError

Json = dict[str, Any]


def text_of(record: Mapping[str, Any], name: str, where: str) -> str:
    """Return the text in a field of a record; "" if it is null or missing.

    Args:
        record: the JSON object.
        name: the field.
        where: name of the record, for errors.

    Raises: FormatError for another type.
    """
    value = record.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise FormatError(f"{name!r} of {where} is {repr_short(value)}; a text belongs there")
    return value


def id_of(value: object, where: str) -> str:
    """Return an id as text; some files use integers.

    where: name of the object with this id, for errors. Raises: FormatError for another type.
    """
    if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
        return str(value)
    raise FormatError(
        f"the id of {where} is {repr_short(value)}; a text or an integer belongs there"
    )


def parent_of(value: object, where: str) -> str | None:
    """Return the id of a node's parent as text; None for a root, where it is null or empty.

    where: name of the node, for errors. Raises: FormatError for another type.
    """
    return None if value is None or value == "" else id_of(value, f"the parent of {where}")


def record_of(value: object, where: str) -> Json:
    """Return a value that must be a JSON object.

    where: name of the value, for errors. Raises: FormatError for another type.
    """
    if not isinstance(value, dict):
        raise FormatError(f"{where} is {repr_short(value)}; an object belongs there")
    return value


def list_of(record: Mapping[str, Any], name: str, where: str) -> list[Any]:
    """Return the list in a field of a record; [] if it is null or missing.

    Args:
        record: the JSON object.
        name: the field.
        where: name of the record, for errors.

    Raises: FormatError for another type.
    """
    value = record.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise FormatError(f"{name!r} of {where} is {repr_short(value)}; a list belongs there")
    return value


def rating_of(value: object) -> float | None:
    """Return a rating as a score; None if the value is not a finite number."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    try:
        rating = float(value) if is_number else math.nan  # type: ignore[arg-type]
    except OverflowError:
        return None
    return rating if math.isfinite(rating) else None


def without(record: Mapping[str, Any], names: Iterable[str]) -> Json:
    """Return a copy of a record without the named fields, nulls, empty lists and objects."""
    read = frozenset(names)
    return {
        name: value
        for name, value in record.items()
        if name not in read and value is not None and value != [] and value != {}
    }
