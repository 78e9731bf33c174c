"""Imports of other programs' files: texts keep their place, and dropped fields are reported."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import weft
from foreign_looms import CHAT, CHATS, FILES, LOOMSIDIAN, LOOMSIDIAN_NOTE, TREE
from shallow import shallow
from weft import LM, Heddle, Loom
from weft.errors import ConfigError, FormatError, ModelMismatch, StoreError
from weft.service import interchange
from weft.service.interchange import ImportLimits, Knot, Note, Sketch, export, read, recognise
from weft.service.interchange import importers as importers_module
from weft.service.interchange.user_text import user_text_of
from weft.service.store.library import name_from_prompt
from weft.viz.outline import headline


@cache
def model() -> LM:
    return weft.load(shallow(), engine="numpy")


def tree_of(node: Heddle) -> Any:
    """A tree as nested tuples of texts, without a begin token and a chat template."""
    text = node.user_prompt if isinstance(node, Loom) else user_text_of(node) or node.text
    return (text, tuple(tree_of(child) for child in node.children))


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("with_model", [False, True], ids=["texts", "tokens"])
def test_file_of_each_format_is_recognised_and_has_all_texts(name: str, with_model: bool) -> None:
    lm = model() if with_model else None
    result = read(FILES[name], lm)
    assert result.recognised_as == recognise(FILES[name]) == name
    assert [tree_of(each.loom) for each in result.looms] == [TREE]
    assert result.n_nodes == 4
    loom = result.looms[0].loom
    assert loom.chat_template_used == (with_model and name in CHATS)
    assert loom.meta["imported"]["format"] == name
    if lm is not None:
        assert loom.children[1].grow(n=1, max_tokens=2, temperature=0, force=True)[0].tokens
    else:
        assert not any(node.tokens for node in loom.walk())


@pytest.mark.parametrize("name", FILES)
def test_imported_loom_is_unchanged_after_saving_and_reading(name: str, tmp_path: Path) -> None:
    loom = read(FILES[name]).looms[0].loom
    loom.save(tmp_path / "a.loom.json")
    second = read(tmp_path / "a.loom.json")
    assert second.recognised_as == "weft"
    assert tree_of(second.looms[0].loom) == TREE
    pairs = zip(loom.walk(), second.looms[0].loom.walk(), strict=True)
    assert all((a.id, a.meta, a.score) == (b.id, b.meta, b.score) for a, b in pairs)


def test_unknown_fields_are_kept_in_meta_or_reported() -> None:
    """Every JSON value is in a text, in the meta of a node, or in `dropped`."""
    for name, data in FILES.items():
        result = read(data)
        if name == "conversations":
            continue
        kept = json.dumps([node.meta for each in result.looms for node in each.loom.walk()])
        kept += json.dumps([node.text for each in result.looms for node in each.loom.walk()])
        for word in (
            "lastVisited",
            "collapsed",
            "author",
            "tags",
            "chapters",
            "genai",
        ):
            if word in json.dumps(data):
                assert word in kept, (name, word)
        assert "sk-not-to-be-kept" not in kept
        assert name != "loomsidian" or "setting" in " ".join(result.dropped)


def test_import_keeps_position_bookmarks_and_scores() -> None:
    for name in ("loomsidian", "python-loom", *sorted({*CHATS} - {"chat"})):
        (only,) = read(FILES[name]).looms
        assert only.at.text == " a time", name
    assert read(LOOMSIDIAN_NOTE).looms[0].at.text == " a time"
    assert read(LOOMSIDIAN).looms[0].title == "notes/fox.md"
    for name in ("loomsidian", "python-loom", "basemode"):
        loom = read(FILES[name]).looms[0].loom
        assert [node.text for node in loom.walk() if "bookmark" in node.meta] == [" upon"], name
    assert read(FILES["basemode"]).looms[0].loom.children[0].score == 4
    assert read(FILES["n8loom"]).looms[0].loom.children[0].children[0].terminal


def test_import_of_n8loom_file_displays_the_same_prompt() -> None:
    lm = model()
    new = Loom(lm, "Tell me a story.\n\nA short one.")
    new.add(" Once")
    exported = {
        "node_id": "0",
        "text": new.text,
        "display_text": new.display_text(),
        "terminal": False,
        "children": [
            {"text": " Once", "display_text": " Once", "terminal": False, "children": []},
            {"text": " Twice", "display_text": "(hidden)", "terminal": False, "children": []},
        ],
    }
    for target_lm in (lm, None):
        (only,) = read(exported, target_lm).looms
        assert only.loom.display_text() == new.display_text()
        assert only.loom.user_prompt == new.user_prompt
        assert only.loom.text == new.text
        assert name_from_prompt(only.title or only.loom.user_prompt) == name_from_prompt(
            new.user_prompt
        )
        one, other = only.loom.children
        assert "display_text" not in json.dumps([only.loom.meta, one.meta])
        assert other.display_text() == "(hidden)"


@pytest.mark.parametrize("shown", ["Tell me a story.", "Prompt: Hi.\n\nResponse:\n\nSure: ", ""])
def test_any_display_text_of_an_n8loom_root_is_kept(shown: str, tmp_path: Path) -> None:
    exported = {
        "node_id": "0",
        "text": "<|im_start|>user\nHi.<|im_end|>\n",
        "display_text": shown,
        "terminal": False,
        "children": [],
    }
    for lm in (model(), None):
        loom = read(exported, lm).looms[0].loom
        assert loom.display_text() == headline(loom) == shown
        if lm is not None:
            loom.save(tmp_path / "a.loom.json")
            second = Loom.open(tmp_path / "a.loom.json", lm)
            assert second.display_text() == shown
            second.clip(3)
            assert second.display_text() == second.text


@pytest.mark.parametrize(
    "text",
    [
        "<|im_start|>user\nTell me a story.<|im_end|>\n<|im_start|>assistant\n",
        "<bos><start_of_turn>user\nTell me a story.<end_of_turn>\n<start_of_turn>model\n",
        "<s>[INST] Tell me a story. [/INST]",
        "<|bos|><|user|>Tell me a story.<|end|><|assistant|>",
    ],
)
def test_an_n8loom_export_is_not_named_after_control_tokens(text: str) -> None:
    (only,) = read({"text": text, "children": [], "terminal": False}).looms
    assert only.title == "Tell me a story."
    assert only.loom.text == text


def test_import_of_templated_prompt_adds_no_second_template() -> None:
    lm = model()
    new = Loom(lm, "Tell me a story.")
    data = {"text": new.text, "children": [{"text": "Once", "children": []}], "terminal": False}
    (only,) = read(data, lm).looms
    assert only.loom.tokens == new.tokens
    assert only.loom.children[0].tokens == new.add("Once").tokens
    # In other formats a user typed the text that looks like a special token.
    (plain,) = read(b"<|end|>", lm, format="text").looms
    assert not set(plain.loom.tokens) & lm.text.stop_ids
    (chat,) = read([{"role": "user", "content": "<|end|>"}], lm).looms
    assert chat.loom.tokens == Loom(lm, "<|end|>").tokens


def test_exported_chat_lines_are_imported_as_the_same_tree() -> None:
    loom = read(CHAT).looms[0].loom
    lines = "".join(export(loom, "messages")).encode()
    second = read(lines)
    assert second.recognised_as == "chat"
    assert tree_of(second.looms[0].loom) == TREE
    assert "".join(export(second.looms[0].loom, "messages")).encode() == lines


def test_tool_calls_and_names_survive_a_round_trip() -> None:
    call = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    message = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": call},
        {"role": "tool", "content": "4", "tool_call_id": "c1"},
    ]
    loom = read({"messages": message}).looms[0].loom
    (line,) = "".join(export(loom, "messages")).splitlines()
    assert json.loads(line)["messages"] == message


def test_messages_of_an_imported_chat_use_the_chat_template() -> None:
    (only,) = read(CHAT).looms
    message = interchange.messages_of(only.loom.children[0].children[0].path)
    assert [each["role"] for each in message] == ["user", "assistant", "user"]
    loom = Loom(model(), message)
    assert loom.chat_template_used
    assert interchange.messages_of([loom]) == message


def test_chain_of_20000_nodes_with_parent_ids_is_read() -> None:
    nodes = {str(i): {"text": str(i), "parentId": str(i - 1) if i else None} for i in range(20_000)}
    result = read({"state": {"n": {"nodes": nodes, "current": "19999"}}})
    assert result.n_nodes == 20_000
    assert result.looms[0].at.text == "19999"


def test_nodes_as_list_or_as_pairs_give_the_same_tree() -> None:
    nodes: Any = LOOMSIDIAN["state"]["notes/fox.md"]["nodes"]  # type: ignore[index]
    for form in ([{"id": k, **v} for k, v in nodes.items()], list(map(list, nodes.items()))):
        assert tree_of(read({"state": {"n": {"nodes": form}}}).looms[0].loom) == TREE


def test_several_roots_orphans_and_cycles_are_reported() -> None:
    nodes = {
        "a": {"text": "A", "parentId": None},
        "b": {"text": "B", "parentId": "gone"},
        "c": {"text": "C", "parentId": "d"},
        "d": {"text": "D", "parentId": "c"},
    }
    result = read({"state": {"n": {"nodes": nodes}}})
    assert tree_of(result.looms[0].loom) == ("", (("A", ()), ("B", ())))
    text = " · ".join(result.dropped)
    assert "1 node without a parent in the file is at" in text
    assert "2 nodes that are their own ancestors" in text


def test_lone_surrogates_are_replaced_and_reported() -> None:
    data = b'{"text": "a\\ud83d", "children": [{"text": "\\ude00b", "children": []}]}'
    for lm in (None, model()):
        result = read(data, lm)
        assert tree_of(result.looms[0].loom) == ("a\ufffd", (("\ufffdb", ()),))
        assert result.dropped == ("2 lone surrogates were replaced by U+FFFD",)


def test_weft_file_of_another_model_raises_unless_forced(tmp_path: Path) -> None:
    file = tmp_path / "a.loom.json"
    loom = Loom(model(), "Once", template=False)
    loom.add(" upon")
    loom.save(file)
    data = json.loads(file.read_text(encoding="utf-8"))
    assert read(file, model()).looms[0].loom.children[0].tokens == loom.children[0].tokens
    data["model"]["fingerprint"] = "another"
    with pytest.raises(ModelMismatch):
        read(data, model())
    assert read(data, model(), force=True).n_nodes == read(data).n_nodes == 2


def test_import_over_a_limit_raises_format_error(tmp_path: Path) -> None:
    large = tmp_path / "large.json"
    with open(large, "wb") as file:
        os.truncate(file.fileno(), 1 << 30)  # a gigabyte that takes no room
    with pytest.raises(FormatError, match=r"large\.json: it is larger than the 536,870,912 bytes"):
        read(large)
    few = ImportLimits(n_nodes=3)
    for data in FILES.values():
        with pytest.raises(FormatError, match="an import takes 3 at most"):
            read(data, limits=few)
    with pytest.raises(FormatError, match="one below another"):
        read(FILES["n8loom"], limits=ImportLimits(height=1))
    with pytest.raises(FormatError, match="larger than"):
        read(b" " * 100, limits=ImportLimits(n_bytes=99))


BROKEN: list[tuple[Any, str]] = [
    (b"", "no JSON"),
    (b"\xff\xfe{", "no JSON"),
    (b"[" * 100_000, "nested too deeply"),
    (b'{"text": "a", "children": [' * 50_000, "nested too deeply"),
    (b'{"a": 1}\n{"b": ', "line 2 is no JSON: Expecting value, column 7"),
    (b'{\n  "a": 1,\n  "b": ', "it is no JSON: Expecting value: line 3 column 8"),
    (b'[\n  {"a": 1},\n  {"b"', "it is no JSON: Expecting ':' delimiter: line 3 column 7"),
    (b"[1,\n2", "it is no JSON: Expecting ',' delimiter: line 2 column 2"),
    (b"[NaN]", "no JSON"),
    (b'{"text": "a", "children": [], "x": 1e999}', "cannot be saved as JSON"),
    ([], "unknown file format"),
    ({"nodes": []}, "unknown file format"),
    ({"text": "a", "children": 5}, "'children' of node 0 is 5"),
    ({"text": "a", "children": [{"text": 5}]}, "'text' of node 1 is 5"),
    ({"text": "a", "children": [5]}, "node 1 is 5"),
    ({"text": "a", "children": [], "terminal": 1}, "'terminal' of node 0"),
    ({"state": {"n": {"nodes": 5}}}, "'nodes' of the note 'n' is 5"),
    ({"state": {"n": {"nodes": {"a": {"parentId": []}}}}}, "the parent of a"),
    ({"state": {"n": {"nodes": [["a", {}], ["a", {}]]}}}, "two nodes have the id 'a'"),
    ({"messages": [{"role": "user", "content": 5}]}, "the content of message 0 of chat 0 is 5"),
    ({"mapping": {"a": 5}}, "node 'a' is 5"),
    ({"format": "weft.loom", "version": 99}, "Update Weft"),
]


@pytest.mark.parametrize(("data", "message"), BROKEN)
def test_broken_file_raises_format_error_with_place(
    data: Any, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "x.json"
    file.write_bytes(data if isinstance(data, bytes) else json.dumps(data).encode())
    with pytest.raises(FormatError, match=r"x\.json: ") as caught:
        read(file)
    assert message in str(caught.value)


def test_missing_file_raises_store_error_and_unknown_format_config_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="cannot read"):
        read(tmp_path / "no.json")
    with pytest.raises(ConfigError, match="allowed are auto, weft, loomsidian"):
        read(FILES["n8loom"], format="logitloom")
    with pytest.raises(FormatError, match="no file of loomsidian"):
        read(FILES["n8loom"], format="loomsidian")


def mine(data: object) -> list[Sketch] | None:
    if not isinstance(data, dict) or "mine" not in data:
        return None
    sketch = Sketch("Mine")
    sketch.add(Knot("Once"))
    sketch.add(Knot(str(data["mine"]), 0))
    sketch.notes[Note("image was left out", "images were left out")] += 1
    sketch.notes["sounds left out"] += 1
    return [sketch]


def test_entry_point_of_another_package_adds_a_format(monkeypatch: pytest.MonkeyPatch) -> None:
    from importlib.metadata import EntryPoint

    point = EntryPoint("mine", f"{__name__}:mine", importers_module.ENTRY_POINT_GROUP)
    monkeypatch.setattr(EntryPoint, "load", lambda self: mine)

    def points(*, group: str, name: str = "mine") -> list[EntryPoint]:
        return [point] if (group, name) == (point.group, point.name) else []

    monkeypatch.setattr(importers_module, "entry_points", points)
    result = read({"mine": " upon"})
    assert (result.recognised_as, result.n_nodes) == ("mine", 2)
    assert result.dropped == ("1 image was left out", "1 sounds left out")
    assert result.looms[0].loom.children[0].text == " upon"
    with pytest.raises(FormatError, match="Supported: .*, mine"):
        read({"other": 1})
