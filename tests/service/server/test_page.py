"""docs/http.md describes every route, event and error."""

from __future__ import annotations

import re
from pathlib import Path

from serving import Served

PAGE = (Path(__file__).parents[3] / "docs" / "http.md").read_text(encoding="utf-8")


def test_every_route_is_on_the_page(served: Served) -> None:
    paths = served.client.get("/openapi.json").json()["paths"]
    for path in paths:
        if not path.startswith("/api/v1"):
            continue
        short = path.removeprefix("/api/v1")
        tail = short.removeprefix("/looms/{loom}")
        forms = [short, f"…{tail}", f"…/{tail.rpartition('/')[2]}"]
        assert any(f" {form}`" in PAGE or f"`{form}`" in PAGE for form in forms), path


def test_every_event_is_on_the_page() -> None:
    server = Path(__file__).parents[3] / "src" / "weft" / "service" / "server"
    names: set[str] = set()
    for file in server.glob("*.py"):
        text = file.read_text(encoding="utf-8")
        names |= set(re.findall(r'(?:events|log)\.put\(\s*"(\w+)"', text))
    assert names >= {"job", "tok", "branch", "done", "change"}
    for name in names:
        assert f"\n| `{name}` |" in PAGE, name


def test_every_field_and_every_error_is_described(served: Served) -> None:
    schema = served.client.get("/openapi.json").json()
    for path, methods in schema["paths"].items():
        if not path.startswith("/api/v1"):
            continue
        for method, operation in methods.items():
            assert operation.get("summary"), (method, path)
            assert operation.get("description"), (method, path)
            assert "404" in operation["responses"], (method, path)
            for parameter in operation.get("parameters", ()):
                assert parameter.get("description"), (method, path, parameter["name"])
