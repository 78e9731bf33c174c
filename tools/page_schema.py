"""The native API as an OpenAPI document of what succeeds: the source of the page's types.

python -m tools.page_schema | npx openapi-typescript -o page/src/api/schema.d.ts
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

NATIVE = "/api/v1"
_REF = "#/components/schemas/"
_JSON = "application/json"


def schema() -> dict[str, Any]:
    """Return the calls of the native API, and the objects in their requests and replies."""
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
        "paths": {
            path.removeprefix(NATIVE): {
                name: _operation(method) for name, method in methods.items()
            }
            for path, methods in document["paths"].items()
            if path.startswith(NATIVE)
        },
        "components": {"schemas": {name: _plain(every[name]) for name in sorted(wanted)}},
    }


def _operation(method: dict[str, Any]) -> dict[str, Any]:
    """Return an operation with its JSON bodies, without errors and headers but If-Match."""
    operation: dict[str, Any] = {
        "parameters": [
            each
            for each in method.get("parameters", [])
            if each["in"] != "header" or each["name"] == "if-match"
        ],
        "responses": {
            status: _json(reply) for status, reply in method["responses"].items() if status < "300"
        },
    }
    if "requestBody" in method:
        operation["requestBody"] = _json(method["requestBody"])
    return _plain(operation)


def _json(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content", {})
    return message | {"content": {_JSON: content[_JSON]} if _JSON in content else content}


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
