"""N8Loom's API: its response formats, and its effect on the shared looms."""

from __future__ import annotations

import json
import threading
from typing import TYPE_CHECKING, Any

import pytest

import weft

pytestmark = pytest.mark.fluent

if TYPE_CHECKING:
    from serving import Served

PROMPT = weft.samples.story


def call(served: Served, method: str, path: str, **body: Any) -> Any:
    answer = served.client.request(method, path, json=body or None)
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.fixture
def root(served: Served) -> str:
    """The root of a new loom."""
    return str(call(served, "POST", "/create_loom", model_id="tiny", prompt=PROMPT)["heddle_id"])


def loom_of(served: Served, root: str) -> str:
    looms = call(served, "GET", "/looms")
    return str(next(each["loom_id"] for each in looms if each["root_heddle_id"] == root))


def test_n8looms_page_calls_all_succeed(served: Served) -> None:
    """Load, create, grow as a stream, extend, delete, export, import, rename."""
    assert call(served, "POST", "/load_model", model_path="tiny") == {"model_id": "tiny"}
    created = call(served, "POST", "/create_loom", model_id="tiny", prompt=PROMPT)
    assert set(created) == {"loom_id", "heddle_id"}
    loom, root = created["loom_id"], created["heddle_id"]
    tree = call(served, "GET", f"/loom/{loom}")
    assert set(tree) == {"node_id", "text", "display_text", "terminal", "children"}
    assert (tree["node_id"], tree["children"], tree["terminal"]) == (root, [], False)
    assert tree["display_text"] == f"Prompt: {PROMPT}\n\nResponse:\n\n"

    lines = served.client.post("/node/ramify", json={"node_id": root, "stream": True, "n": 3})
    assert lines.headers["content-type"] == "application/json"
    *updates, final = [json.loads(line) for line in lines.text.splitlines()]
    assert updates
    assert {each["type"] for each in updates} == {"update"}
    assert all(set(each) == {"type", "tokens", "decoded_texts", "ended"} for each in updates)
    assert final["type"] == "final"
    assert final["children"] == len(final["children_ids"]) == 3
    assert final["generated_lengths"] == [8, 8, 8]
    assert final["prompt_cache"] is None
    lm = served.service.models.lm()
    assert final["total_prompt_len"] == len(weft.Loom(lm, PROMPT).tokens)
    tree = call(served, "GET", f"/loom/{loom}")
    assert [each["node_id"] for each in tree["children"]] == final["children_ids"]
    assert [each["text"] for each in tree["children"]] == final["decoded_texts"]

    first = final["children_ids"][0]
    more = call(served, "POST", "/node/ramify", node_id=first, n=2, max_tokens=3)
    assert set(more) == {"node_id", "created_children"}
    info = call(served, "GET", f"/node/{first}")
    assert set(info) == {"node_id", "text", "display_text", "children_ids", "terminal"}
    assert info["children_ids"] == more["created_children"]
    gone = call(served, "DELETE", f"/node/{first}")
    assert gone == {"node_id": first, "deleted_children": more["created_children"]}
    for node in (first, *more["created_children"]):
        assert served.client.get(f"/node/{node}").status_code == 404

    exported = call(served, "GET", f"/loom/{loom}/export")
    copied = call(served, "POST", "/looms/import", model_id="tiny", loom_data=exported)
    exported_copy = call(served, "GET", f"/loom/{copied['loom_id']}/export")
    assert without_ids(exported_copy) == without_ids(exported)
    new = f"{loom} renamed"
    renamed = call(served, "POST", f"/looms/{loom}/rename", new_id=new)
    assert renamed == {"old_loom_id": loom, "new_loom_id": new}
    assert served.client.get(f"/loom/{loom}").status_code == 404
    assert call(served, "GET", f"/loom/{new}")["node_id"] == root  # nodes keep their ids
    assert call(served, "DELETE", f"/looms/{new}") == {
        "deleted_loom_id": new,
        "deleted_root_heddle_id": root,
    }
    assert served.client.get(f"/node/{root}").status_code == 404


def without_ids(tree: Any) -> Any:
    """Return a nested tree without the fields that differ between copies."""
    kept = {key: each for key, each in tree.items() if key not in ("node_id", "display_text")}
    return {**kept, "children": [without_ids(each) for each in tree["children"]]}


def test_texts_are_children_in_their_order(served: Served, root: str) -> None:
    one = call(served, "POST", "/node/ramify", node_id=root, text=" Hello")["created_children"]
    two = call(served, "POST", "/node/ramify", node_id=root, text=[" a", " b"])
    info = call(served, "GET", f"/node/{root}")
    assert info["children_ids"] == [*one, *two["created_children"]]
    texts = [call(served, "GET", f"/node/{each}")["text"] for each in info["children_ids"]]
    assert texts == [" Hello", " a", " b"]


def test_clip_and_trim_drop_descendants(served: Served, root: str) -> None:
    (node,) = call(served, "POST", "/node/ramify", node_id=root, n=1)["created_children"]
    (below,) = call(served, "POST", "/node/ramify", node_id=node, n=1)["created_children"]
    full = call(served, "GET", f"/node/{node}")["text"]
    clipped = call(served, "POST", "/node/clip", node_id=node, token_limit=-1)
    assert clipped == {"node_id": node, "clipped_to": -1}
    assert served.client.get(f"/node/{below}").status_code == 404
    assert call(served, "GET", f"/node/{node}/subtree")["children"] == []
    trimmed = call(served, "POST", "/node/trim", node_id=node, token_trim=2)
    assert trimmed == {"node_id": node, "trimmed_tokens": 2}
    text = call(served, "GET", f"/node/{node}")["text"]
    assert full.startswith(text)
    assert len(text) < len(full)


def test_growth_equals_the_n8loom_library(served: Served, root: str) -> None:
    ids = call(
        served, "POST", "/node/ramify", node_id=root, n=2, seed=7, temp=0.9, max_tokens=12,
        min_p=0.1, top_p=0.9, stop_strings=["the"],
    )["created_children"]  # fmt: skip
    loom = weft.Loom(served.service.models.lm(), PROMPT)
    wanted = loom.make_children(
        n=2, seed=7, temp=0.9, max_tokens=12, min_p=0.1, top_p=0.9, stop_strings=["the"]
    )
    texts = [call(served, "GET", f"/node/{each}")["text"] for each in ids]
    assert texts == [node.text for node in wanted]


def test_import_prefers_the_exported_tokens(served: Served) -> None:
    """The tokenizer would encode the text with other tokens."""
    lm = served.service.models.lm()
    odd = [lm.tokenize(char, add_bos=False)[0] for char in "the"]
    data = {"text": PROMPT, "children": [{"text": "the", "tokens": odd, "terminal": True}]}
    imported = call(served, "POST", "/looms/import", model_id="tiny", loom_data=data)
    back = call(served, "GET", f"/loom/{imported['loom_id']}/export")
    assert back["text"] == PROMPT  # and not templated
    assert back["children"][0]["tokens"] == odd
    assert back["children"][0]["terminal"] is True
    other = {"text": PROMPT, "children": [{"text": "fox", "tokens": odd}]}
    imported = call(served, "POST", "/looms/import", model_id="tiny", loom_data=other)
    back = call(served, "GET", f"/loom/{imported['loom_id']}")
    assert back["children"][0]["text"] == "fox"


def test_native_api_sees_the_same_loom(served: Served, root: str) -> None:
    loom = loom_of(served, root)
    (child,) = call(served, "POST", "/node/ramify", node_id=root, n=1)["created_children"]
    number = child.rpartition("-")[2]
    node = served.client.get(f"/api/v1/looms/{loom}/nodes/{number}").json()
    assert node["text"] == call(served, "GET", f"/node/{child}")["text"]
    assert served.client.post(f"/api/v1/looms/{loom}/undo").status_code == 200
    assert served.client.get(f"/node/{child}").status_code == 404


def test_a_node_that_has_ended_grows_nothing(served: Served, root: str) -> None:
    body = {"node_id": root, "n": 1, "max_tokens": 400, "temp": 0}
    (node,) = call(served, "POST", "/node/ramify", **body)["created_children"]
    assert call(served, "GET", f"/node/{node}")["terminal"] is True
    assert call(served, "POST", "/node/ramify", node_id=node)["created_children"] == []
    text = served.client.post("/node/ramify", json={"node_id": node, "stream": True}).text
    (final,) = [json.loads(line) for line in text.splitlines()]
    assert (final["type"], final["children"], final["tokens"]) == ("final", 0, [])


def test_concurrent_growth_loses_no_children(served: Served, root: str) -> None:
    ids: list[str] = []

    def grow() -> None:
        ids.extend(call(served, "POST", "/node/ramify", node_id=root, n=3)["created_children"])

    threads = [threading.Thread(target=grow) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(ids)) == 12
    assert set(call(served, "GET", f"/node/{root}")["children_ids"]) == set(ids)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "detail"),
    [
        ("GET", "/loom/none", None, 404, "Loom not found"),
        ("GET", "/node/heddle_id-1", None, 404, "Node not found"),
        ("GET", "/node/ROOT9", None, 404, "Node not found"),
        ("DELETE", "/looms/none", None, 404, "Loom not found"),
        ("DELETE", "/node/ROOT", None, 400, "Cannot delete root node"),
        ("POST", "/create_loom", {"model_id": "big", "prompt": "a"}, 400, "Model path not found"),
        ("POST", "/create_loom", {"model_id": "tiny", "prompt": ""}, 400, "the prompt is empty"),
        ("POST", "/load_model", {"model_path": "/etc"}, 403, "may not be loaded"),
        ("POST", "/looms/none/rename", {"new_id": "a"}, 404, "Loom not found"),
        ("POST", "/looms/LOOM/rename", {"new_id": "OTHER"}, 400, "already"),
        ("POST", "/looms/LOOM/rename", {"new_id": "a/b"}, 400, ""),
        ("POST", "/looms/import", {"model_id": "big", "loom_data": {}}, 400, "Model path"),
        ("POST", "/looms/import", {"model_id": "tiny", "loom_data": {"text": 3}}, 400, "'text'"),
        (
            "POST",
            "/looms/import",
            {"model_id": "tiny", "loom_data": {"text": "a", "children": 3}},
            400,
            "'children'",
        ),
        ("POST", "/node/ramify", {"node_id": "nowhere"}, 404, "Node not found"),
        ("POST", "/node/ramify", {"node_id": "ROOT", "n": 0}, 422, "greater than or equal"),
        ("POST", "/node/ramify", {"node_id": "ROOT", "n": 10**6}, 400, "n is"),
        ("POST", "/node/ramify", {"node_id": "ROOT", "temperature": 1}, 422, "temperature"),
        ("POST", "/node/trim", {"node_id": "ROOT", "token_trim": -1}, 422, "token_trim"),
    ],
)
def test_errors_have_the_detail_format(
    served: Served, method: str, path: str, body: Any, status: int, detail: str
) -> None:
    created = call(served, "POST", "/create_loom", model_id="tiny", prompt=PROMPT)
    other = call(served, "POST", "/create_loom", model_id="tiny", prompt=PROMPT)
    names = {"ROOT": created["heddle_id"], "LOOM": created["loom_id"], "OTHER": other["loom_id"]}
    for name, value in names.items():
        path = path.replace(name, value)
        body = {key: value if each == name else each for key, each in (body or {}).items()}
    answer = served.client.request(method, path, json=body or None)
    assert answer.status_code == status, answer.text
    assert set(answer.json()) == {"detail"}
    assert detail in str(answer.json()["detail"])


def test_rejected_body_has_the_documented_format(served: Served) -> None:
    schemas = served.client.get("/openapi.json").json()["components"]["schemas"]
    answer = served.client.post("/node/ramify", json={"node_id": 1, "other": 2})
    assert answer.status_code == 422
    fault, unknown = answer.json()["detail"]
    assert (fault["loc"], fault["type"]) == (["body", "node_id"], "string_type")
    assert unknown["loc"] == ["body", "other"]
    assert set(schemas["ValidationError"]["required"]) <= set(fault)
