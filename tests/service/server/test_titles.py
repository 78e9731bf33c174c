"""Titles of looms in the native API: as typed; the name is in the address."""

from __future__ import annotations

import json
from typing import Any

import pytest

from serving import Served

TITLE = "My story: part two!"
Json = dict[str, Any]


def call(served: Served, method: str, path: str, status: int = 200, **more: Any) -> Json:
    answer = served.client.request(method, f"/api/v1{path}", **more)
    assert answer.status_code == status, answer.text
    return answer.json()


def create(served: Served, **body: Any) -> Json:
    return call(served, "POST", "/looms", 201, json={"prompt": "A wolf ran.", **body})


def test_created_title_is_returned_and_names_the_loom(served: Served) -> None:
    first, second = create(served, title=TITLE), create(served, title=TITLE)
    assert (first["title"], second["title"]) == (TITLE, TITLE)
    assert (first["name"], second["name"]) == ("story-part-two", "story-part-two.2")
    listed = call(served, "GET", "/looms", params={"search": "two!"})["data"]
    assert [each["title"] for each in listed] == [TITLE, TITLE]
    assert create(served)["title"] == "A wolf ran."
    assert create(served, name="wolves")["title"] == ""


def test_changed_title_changes_the_name_and_is_published(served: Served) -> None:
    loom = create(served)
    path = f"/looms/{loom['id']}"
    changed = call(served, "PATCH", path, json={"title": "Wölfe? Ja!"})
    assert (changed["title"], changed["name"]) == ("Wölfe? Ja!", "wölfe-ja")
    assert call(served, "GET", "/looms/wölfe-ja")["title"] == "Wölfe? Ja!"
    both = call(served, "PATCH", path, json={"title": TITLE, "name": "w"})
    assert (both["title"], both["name"]) == (TITLE, "w")
    only_name = call(served, "PATCH", path, json={"name": "v"})
    assert (only_name["title"], only_name["name"]) == (TITLE, "v")
    hits = call(served, "GET", "/search", params={"q": "wolf", "loom": loom["id"]})
    assert [each["title"] for each in hits["data"]] == [TITLE]
    assert call(served, "GET", f"{path}/kv")["title"] == TITLE


@pytest.mark.parametrize("title", [" ", "x" * 201, "two\nlines"])
def test_invalid_title_is_rejected_by_name(served: Served, title: str) -> None:
    loom = create(served)
    path = f"/looms/{loom['id']}"
    error = call(served, "PATCH", path, 400, json={"title": title})["error"]
    assert (error["param"], error["code"]) == ("title", "invalid_parameter")


def test_copy_and_import_keep_titles(served: Served) -> None:
    loom = create(served, title="Copied & kept")
    path = f"/looms/{loom['id']}"
    copy = call(served, "POST", f"{path}/nodes/0/copy", 201, json={"title": "A copy: 1"})
    assert (copy["title"], copy["name"]) == ("A copy: 1", "copy-1")
    file = served.client.get(f"/api/v1{path}/export", params={"format": "json"})
    assert json.loads(file.content)["title"] == "Copied & kept"
    (imported,) = call(served, "POST", "/import", 201, content=file.content)["looms"]
    assert (imported["title"], imported["name"]) == ("Copied & kept", "copied-kept.2")
    options = {"format": "text", "title": "notes (3)"}
    (text,) = call(served, "POST", "/import", 201, content=b"A fox.", params=options)["looms"]
    assert (text["title"], text["name"]) == ("notes (3)", "notes-3")
    front = served.client.get(f"/api/v1{path}/export", params={"format": "markdown"}).text
    assert 'loom: "Copied & kept"' in front


def test_taken_name_is_a_conflict(served: Served) -> None:
    create(served, name="taken")
    other = create(served)
    path = f"/looms/{other['id']}"
    requests: list[tuple[str, str, Json]] = [
        ("POST", "/looms", {"json": {"prompt": "x", "name": "taken"}}),
        ("PATCH", path, {"json": {"name": "taken"}}),
        ("POST", f"{path}/nodes/0/copy", {"json": {"new_loom": "taken"}}),
        ("POST", "/import?format=text&name=taken", {"content": b"A fox."}),
    ]
    for method, route, more in requests:
        error = call(served, method, route, 409, **more)["error"]
        assert (error["code"], error["type"]) == ("name_taken", "conflict_error")
