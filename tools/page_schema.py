"""The native API's objects as an OpenAPI document without paths: the source of the page's types.

python -m tools.page_schema | npx openapi-typescript -o page/src/api/schema.d.ts
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

NATIVE = "/api/v1"
_REF = "#/components/schemas/"


def schema() -> dict[str, Any]:
    """Return the objects in requests and replies of the native API."""
    from weft.service.server import create_app

    document = create_app().openapi()
    every = document["components"]["schemas"]
    wanted: set[str] = set()
    todo = [
        name
        for path, methods in document["paths"].items()
        if path.startswith(NATIVE)
        for name in _named(methods)
    ]
    while todo:
        if (name := todo.pop()) not in wanted:
            wanted.add(name)
            todo.extend(_named(every[name]))
    return {
        "openapi": document["openapi"],
        "info": {"title": "Weft", "version": "1"},
        "paths": {},
        "components": {"schemas": {name: _plain(every[name]) for name in sorted(wanted)}},
    }


def _named(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            if key == "$ref" and isinstance(inner, str):
                yield inner.removeprefix(_REF)
            else:
                yield from _named(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _named(inner)


def _plain(value: Any) -> Any:
    """Return a schema without titles, which only repeat the names."""
    if isinstance(value, dict):
        return {
            key: _plain(inner)
            for key, inner in value.items()
            if not (key == "title" and isinstance(inner, str))
        }
    return [_plain(inner) for inner in value] if isinstance(value, list) else value


if __name__ == "__main__":
    json.dump(schema(), sys.stdout, indent=1, sort_keys=True)
