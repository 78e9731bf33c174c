"""Growing nodes of a loom with other models than its own, and copying a loom for another model."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import serving as servers
import weft
from renumbered import renumbered
from serving import Served
from shallow import shallow
from weft import Loom
from weft.loom.author_note import AuthorNote, place_with_note
from weft.service.server import ServerConfig
from weft.service.server.other_model import context_for

Json = dict[str, Any]
GREEDY = {"max_tokens": 24, "temperature": 0, "wait": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models to load: other ids, and other ids without a chat template."""
    root = tmp_path_factory.mktemp("models")
    shutil.copytree(renumbered(), root / "other")
    shutil.copytree(renumbered(), root / "base")
    (root / "base" / "chat_template.jinja").unlink()
    return root


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    config = ServerConfig(port=0, model_roots=(folder,), engine="numpy", max_models=4)
    with servers.serving(config) as served:
        for source, name in (
            ("tiny", "twin"),
            (folder / "other", "other"),
            (folder / "base", "base"),
        ):
            body = {"source": str(source), "id": name, "wait": True}
            assert served.client.post("/api/v1/models", json=body).json()["status"] == "ok"
        yield served


class Tree:
    """A loom on the server, and requests about it."""

    def __init__(self, served: Served, prompt: str = "Once upon a time", **more: Any) -> None:
        self.client = served.client
        loom = self.client.post("/api/v1/looms", json={"prompt": prompt, **more}).json()
        self.path = f"/api/v1/looms/{loom['id']}"

    def post(self, path: str, status: int = 200, **body: Any) -> Json:
        answer = self.client.post(f"{self.path}{path}", json=body)
        assert answer.status_code == status, answer.text
        return answer.json()

    def grow(self, node: int = 0, status: int = 200, **body: Any) -> Json:
        return self.post(f"/nodes/{node}/generate", status, **{**GREEDY, **body})

    def nodes(self, **query: Any) -> list[Json]:
        return self.client.get(f"{self.path}/nodes", params=query).json()["data"]


@pytest.mark.parametrize("template", [True, False])
def test_other_vocabulary_gives_the_same_text_in_tokens_of_the_loom(
    served: Served, template: bool
) -> None:
    tree = Tree(served, template=template)
    (own,) = tree.grow()["nodes"]
    (other,) = tree.grow(model="other")["nodes"]
    assert (other["text"], other["token_ids"]) == (own["text"], own["token_ids"])
    assert (own["model"], other["model"]) == (None, "other")
    assert (other["logprobs"], other["entropies"], other["mean_p"]) == ([], [], None)
    below = [tree.grow(each["node"], force=True)["nodes"][0]["text"] for each in (own, other)]
    assert below[0] == below[1]


def test_equal_vocabulary_keeps_tokens_and_logprobs(served: Served) -> None:
    tree = Tree(served)
    (own,) = tree.grow()["nodes"]
    (twin,) = tree.grow(model="twin")["nodes"]
    assert twin["token_ids"] == own["token_ids"]
    assert twin["logprobs"] == pytest.approx(own["logprobs"])
    assert twin["model"] == "twin"


def test_chat_of_several_turns_is_rendered_by_the_other_model(served: Served) -> None:
    tree = Tree(served, "Who are you?", system="Be brief.")
    (answer,) = tree.grow(max_tokens=6)["nodes"]
    message = tree.post("/nodes", 201, parent=answer["node"], message="And then?")["added"][0]
    (own,) = tree.grow(message["node"])["nodes"]
    (other,) = tree.grow(message["node"], model="other")["nodes"]
    assert other["text"] == own["text"]
    continued = [tree.grow(message["node"], model=each, max_tokens=4) for each in (None, "other")]
    lower = [tree.grow(each["nodes"][0]["node"], model="other") for each in continued]
    assert lower[0]["nodes"][0]["text"] == lower[1]["nodes"][0]["text"]


def test_several_models_grow_side_by_side_and_are_undone_together(served: Served) -> None:
    tree = Tree(served)
    reply = tree.grow(models=["tiny", "other", "twin"], n=2)
    others = [None, None, "other", "other", "twin", "twin"]
    assert [each["model"] for each in reply["branches"]] == others
    assert [each["branch"] for each in reply["branches"]] == list(range(6))
    assert len({each["text"] for each in reply["nodes"]}) == 1
    assert reply["usage"]["completion_tokens"] == 6 * reply["nodes"][0]["n_tokens"]
    makers = [
        served.client.get(f"{tree.path}/nodes/{number}", params={"fields": "made"}).json()["made"]
        for number in range(1, 7)
    ]
    assert [each["model"] for each in makers] == ["tiny", "tiny", *others[2:]]
    tree.post("/undo")
    assert len(tree.nodes()) == 1
    tree.post("/redo")
    assert [each["model"] for each in tree.nodes()[1:]] == others
    assert tree.nodes()[0]["children"] == [1, 2, 3, 4, 5, 6]


def test_author_note_changes_the_context_of_another_model(served: Served) -> None:
    for template in (True, False):
        texts = {}
        for model in (None, "other"):
            tree = Tree(served, template=template)
            note = {"author_note": {"text": "A cat named Tom slept.", "depth": 0}}
            tree.client.patch(tree.path, json={"meta": note}).raise_for_status()
            texts[model] = tree.grow(model=model)["nodes"][0]["text"]
        assert texts[None] == texts["other"]


@pytest.mark.parametrize("depth", [0, 1, 2, 9])
def test_author_note_after_a_system_message_is_where_the_own_model_reads_it(depth: int) -> None:
    with weft.load(shallow(), engine="numpy") as lm:
        loom = Loom(lm, "Hi", system="Be brief.")
        loom.note = AuthorNote("[N]", depth)
        assert context_for(loom, lm) == place_with_note(loom, loom.note).ids()


def test_stop_string_and_schema_hold_for_another_model(served: Served) -> None:
    tree = Tree(served, template=False)
    (own,) = tree.grow(max_tokens=60, stop=["."])["nodes"]
    (node,) = tree.grow(max_tokens=60, stop=["."], model="other")["nodes"]
    assert (node["text"], node["stop_string"]) == (own["text"], own["stop_string"])
    (chosen,) = tree.grow(choices=[" red", " blue"], model="other")["nodes"]
    assert chosen["text"] in (" red", " blue")


def test_base_model_rejects_a_chat_and_continues_a_text(served: Served) -> None:
    chat, text = Tree(served), Tree(served, template=False)
    error = chat.grow(status=400, models=["tiny", "base"])["error"]
    assert "has no chat template" in error["message"]
    assert len(chat.nodes()) == 1
    assert chat.grow()["status"] == "ok"
    assert text.grow(model="base")["nodes"][0]["model"] == "base"


def test_wrong_models_are_rejected(served: Served) -> None:
    tree = Tree(served)
    assert tree.grow(status=404, model="none")["error"]["code"] == "model_not_found"
    for wrong in ({"models": ["tiny", "tiny"]}, {"models": ["tiny"], "model": "tiny"}):
        assert tree.grow(status=400, **wrong)["error"]["code"] == "invalid_parameter"


def test_cancelled_branch_of_another_model_keeps_its_text(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = Tree(served, template=False)
    job = tree.grow(status=202, model="other", max_tokens=1500, wait=False)["job"]
    while not (len(nodes := tree.nodes()) == 2 and nodes[1]["n_tokens"] > 20):
        pass
    served.client.post(f"/api/v1/jobs/{job}/cancel").raise_for_status()
    while served.client.get(f"/api/v1/jobs/{job}").json()["status"] == "running":
        pass
    node = tree.nodes(fields="tokens")[1]
    (own,) = tree.grow(max_tokens=node["n_tokens"])["nodes"]
    assert node["finish_reason"] == "cancelled"
    assert own["token_ids"] == node["token_ids"]


def test_copy_for_another_model_keeps_the_tree_and_continues_as_the_original(
    served: Served,
) -> None:
    tree = Tree(served, "Who are you?", system="Be brief.", meta={"notes": "mine"})
    (answer,) = tree.grow(max_tokens=6)["nodes"]
    tree.client.patch(
        f"{tree.path}/nodes/{answer['node']}", json={"bookmark": "good", "score": 0.5}
    ).raise_for_status()
    message = tree.post("/nodes", 201, parent=answer["node"], message="And then?")["added"][0]
    (own,) = tree.grow(message["node"])["nodes"]
    tree.grow(0, model="other", max_tokens=6)
    copy = tree.post("/nodes/0/copy", 201, new_loom="copied", model="other")
    assert (copy["chat_template_used"], copy["meta"]["notes"]) == (True, "mine")
    assert copy["model"].endswith("other")
    copied = Tree.__new__(Tree)
    copied.client, copied.path = tree.client, f"/api/v1/looms/{copy['id']}"
    shape = [(each["parent"], each["text"], each["said"], each["score"]) for each in tree.nodes()]
    assert [
        (each["parent"], each["text"], each["said"], each["score"]) for each in copied.nodes()
    ] == shape
    assert [each["model"] for each in copied.nodes()] == [None, "tiny", None, "tiny", None]
    assert copied.nodes()[1]["bookmark"] == "good"
    assert copied.grow(message["node"])["nodes"][0]["text"] == own["text"]
    assert len(tree.nodes()) == 5


def test_copy_for_another_model_fails_without_a_trace(served: Served) -> None:
    tree = Tree(served)
    before = len(served.client.get("/api/v1/looms").json()["data"])
    error = tree.post("/nodes/0/copy", 400, new_loom="failed", model="base")["error"]
    assert "has no chat template" in error["message"]
    assert len(served.client.get("/api/v1/looms").json()["data"]) == before


def test_loom_of_an_unloaded_model_is_copied_for_a_loaded_one(served: Served, folder: Path) -> None:
    body = {"source": str(folder / "other"), "id": "gone", "wait": True}
    shutil.copytree(folder / "other", folder / "gone", dirs_exist_ok=True)
    body["source"] = str(folder / "gone")
    served.client.post("/api/v1/models", json=body).raise_for_status()
    trees = [Tree(served, model="gone", template=template) for template in (True, False)]
    for tree in trees:
        tree.grow(max_tokens=6)
    served.client.delete("/api/v1/models/gone", params={"force": True}).raise_for_status()
    for tree, name in zip(trees, ("chat", "text"), strict=True):
        texts = [each["text"] for each in tree.nodes()]
        copy = tree.post("/nodes/0/copy", 201, new_loom=f"rescued {name}", model="tiny")
        nodes = served.client.get(f"/api/v1/looms/{copy['id']}/nodes").json()["data"]
        assert [each["text"] for each in nodes] == texts
