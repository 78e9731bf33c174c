"""Import and export of looms over HTTP, and loading and unloading of models."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from foreign_looms import SILLYTAVERN
from serving import KEY, Served, serving
from shallow import shallow
from weft.service.server import ServerConfig

Json = dict[str, Any]


def make(served: Served, prompt: str = "Once upon a time", **more: Any) -> str:
    answer = served.client.post("/api/v1/looms", json={"prompt": prompt, **more})
    loom: str = answer.json()["id"]
    body = {"n": 2, "max_tokens": 4, "wait": True}
    served.client.post(f"/api/v1/looms/{loom}/nodes/0/generate", json=body).raise_for_status()
    return loom


@pytest.mark.parametrize(
    "format",
    ["json", "text", "markdown", "html", "dot", "mermaid", "csv", "tokens", "messages"],
)
def test_loom_is_exported_in_every_format(served: Served, format: str) -> None:
    loom = make(served, name=f"out {format}")
    answer = served.client.get(f"/api/v1/looms/{loom}/export", params={"format": format})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-disposition"].startswith('attachment; filename="out-')


def test_exported_loom_is_imported_unchanged(served: Served) -> None:
    loom = make(served)
    file = served.client.get(f"/api/v1/looms/{loom}/export").content
    imported = served.client.post("/api/v1/import", content=file, params={"name": "again"}).json()
    assert (imported["recognised_as"], imported["nodes"], imported["dropped"]) == ("weft", 3, [])
    nodes = [
        [
            (node["text"], node["token_ids"])
            for node in served.client.get(
                f"/api/v1/looms/{name}/nodes", params={"fields": "tokens"}
            ).json()["data"]
        ]
        for name in (loom, "again")
    ]
    assert nodes[0] == nodes[1]


def test_bookmarks_are_exported_and_imported(served: Served) -> None:
    loom = make(served)
    for node, label in ((1, "the best"), (2, "")):
        path = f"/api/v1/looms/{loom}/nodes/{node}"
        served.client.patch(path, json={"bookmark": label}).raise_for_status()
    file = served.client.get(f"/api/v1/looms/{loom}/export").content
    imported = served.client.post("/api/v1/import", content=file).json()
    second = f"/api/v1/looms/{imported['looms'][0]['id']}"
    assert served.client.get(second).json()["bookmarks"] == {"1": "the best", "2": ""}
    # A removed bookmark is not in the next file.
    served.client.patch(f"{second}/nodes/1", json={"bookmark": None}).raise_for_status()
    file = served.client.get(f"{second}/export").content
    third = served.client.post("/api/v1/import", content=file).json()["looms"][0]["id"]
    assert served.client.get(f"/api/v1/looms/{third}").json()["bookmarks"] == {"2": ""}


def test_imported_tree_of_another_program_grows(served: Served) -> None:
    tree = {"text": "Once", "children": [{"text": " upon", "children": [], "terminal": False}]}
    imported = served.client.post("/api/v1/import", content=json.dumps(tree)).json()
    (loom,) = imported["looms"]
    assert loom["n_nodes"] == 2
    body = {"max_tokens": 3, "wait": True}
    path = f"/api/v1/looms/{loom['id']}/nodes/1/generate"
    assert served.client.post(path, json=body).status_code == 200


def test_imported_chat_of_sillytavern_is_continued_by_a_message(served: Served) -> None:
    lines = "\n".join(map(json.dumps, SILLYTAVERN)).encode()
    report = served.client.post("/api/v1/import", content=lines).json()
    assert (report["recognised_as"], report["nodes"]) == ("sillytavern", 4)
    path = f"/api/v1/looms/{report['looms'][0]['id']}"
    assert served.client.get(path).json()["chat_template_used"]
    added = served.client.post(f"{path}/nodes", json={"parent": 3, "message": "Why?"})
    assert added.status_code == 201, added.text
    node = added.json()["added"][0]["node"]
    body = {"max_tokens": 3, "wait": True}
    assert served.client.post(f"{path}/nodes/{node}/generate", json=body).status_code == 200
    query = {"as": "messages"}
    messages = served.client.get(f"{path}/nodes/{node}/path", params=query).json()["messages"]
    assert [each["content"] for each in messages] == ["Once", " more", "Why?"]


def test_plain_text_is_imported_as_a_prompt(served: Served) -> None:
    report = served.client.post("/api/v1/import", content=b"A fox.\r\n").json()
    assert (report["recognised_as"], report["nodes"]) == ("text", 1)
    assert report["looms"][0]["prompt"] == "A fox."
    given = {"format": "text"}
    report = served.client.post("/api/v1/import", content=b"[A fox]", params=given).json()
    assert report["looms"][0]["prompt"] == "[A fox]"


def test_unknown_file_is_rejected_with_the_supported_ones(served: Served) -> None:
    answer = served.client.post("/api/v1/import", content=b"\x89PNG\x00")
    assert answer.status_code == 400
    assert "Supported: Weft looms (.loom.json)" in answer.json()["error"]["message"]
    assert "SillyTavern chats" in answer.json()["error"]["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[1, 2]", b'{"a": NaN}', b"\xff\xfe", b"[" * 5000])
def test_import_of_another_file_is_rejected(served: Served, body: bytes) -> None:
    answer = served.client.post("/api/v1/import", content=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unknown_format")


def test_search_returns_matches_in_all_looms(served: Served) -> None:
    loom = make(served, "A zebra walked by")
    hits = served.client.get("/api/v1/search", params={"q": "zebra"}).json()["data"]
    assert [(hit["loom"], hit["node"]) for hit in hits] == [(loom, 0)]
    assert served.client.get("/api/v1/search", params={"q": "?!"}).status_code == 400


# Models ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def roots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("roots")
    (folder / "in").mkdir()
    (folder / "out").mkdir()
    shutil.copytree(shallow(), folder / "in" / "small")
    (folder / "in" / "link").symlink_to(folder / "out")
    return folder


@pytest.fixture(scope="module")
def several(roots: Path) -> Iterator[Served]:
    limits = {"max_models": 2, "kv_budget": "64MiB", "engine": "numpy"}
    config = ServerConfig(port=0, model_roots=(roots / "in",), **limits)
    with serving(config) as server:
        yield server


@pytest.mark.parametrize(
    "source",
    [
        "/etc/passwd",
        "../../etc",
        "in/../../etc/x.gguf",
        "~/.ssh/model.gguf",
        "{roots}/out",
        "{roots}/in/../out",
        "{roots}/in/link",
        "http://169.254.169.254/v1",
        "HTTP://localhost/v1",
        "org/name",
        "name",
        "a\x00b",
        "x" * 4000,
        "C:\\models\\x",
    ],
)
def test_requests_load_only_allowed_models(several: Served, roots: Path, source: str) -> None:
    given = {"source": source.replace("{roots}", str(roots))}
    answer = several.client.post("/api/v1/models", json=given)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "model_not_allowed")
    assert "root:" not in answer.text


def test_models_are_loaded_used_and_unloaded(several: Served, roots: Path) -> None:
    client = several.client
    given = {"source": str(roots / "in" / "small"), "id": "org/small", "wait": True}
    answer = client.post("/api/v1/models", json=given)
    assert answer.status_code == 200, answer.text
    state = client.get("/api/v1/models/org/small").json()
    assert (state["state"], state["id"], state["engine"]) == ("ready", "org/small", "numpy")
    assert client.post("/api/v1/models", json=given).json()["error"]["type"] == "conflict_error"
    loom = make(several, model="org/small")
    assert client.delete("/api/v1/models/org/small").status_code == 200
    assert client.get(f"/api/v1/looms/{loom}/nodes").status_code == 200
    refused = client.post(f"/api/v1/looms/{loom}/nodes/0/generate", json={})
    assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
    client.post("/api/v1/models", json=given).raise_for_status()
    body = {"max_tokens": 2, "wait": True}
    assert client.post(f"/api/v1/looms/{loom}/nodes/0/generate", json=body).status_code == 200


def test_failed_load_has_its_reason(several: Served, roots: Path) -> None:
    (roots / "in" / "broken").mkdir(exist_ok=True)
    given = {"source": str(roots / "in" / "broken")}
    job = several.client.post("/api/v1/models", json=given).json()["job"]
    path = f"/api/v1/jobs/{job}"
    while several.client.get(path).json()["status"] == "running":
        time.sleep(0.02)
    reply = several.client.get(path).json()
    assert (reply["status"], reply["error"]["code"]) == ("failed", "model_not_loadable")
    model = several.client.get("/api/v1/models/broken").json()
    assert model["state"] == "failed"
    several.client.delete("/api/v1/models/broken").raise_for_status()


def test_tokenize_and_detokenize_round_trip(served: Served) -> None:
    client = served.client
    tokenized = client.post("/api/v1/tokenize", json={"text": "über 🦊"}).json()
    assert (
        b"".join(bytes(each["bytes"]) for each in tokenized["tokens"]).decode().endswith("über 🦊")
    )
    back = client.post("/api/v1/detokenize", json={"token_ids": tokenized["token_ids"]}).json()
    assert back["text"].endswith("über 🦊")
    chat = client.post(
        "/api/v1/apply_template", json={"messages": [{"role": "user", "content": "x"}]}
    )
    assert chat.status_code in (200, 400)
    wrong = client.post("/api/v1/detokenize", json={"token_ids": [10**9]})
    assert wrong.status_code == 400


def test_no_secret_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG")
    with serving(ServerConfig(port=0, api_key=KEY)) as server:
        server.client.get("/healthz", params={"key": KEY})
        server.client.get("/nowhere", headers={"Authorization": f"Bearer {KEY}x"})
    logged = [record for record in caplog.records if record.name.startswith(("weft", "uvicorn"))]
    assert logged
    assert not any(KEY in record.getMessage() for record in logged)
