from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend

import weft
from core.tokens import builders
from weft._core.tokens.tokenizer import Tokenizer
from weft.errors import ConfigError, ModelLoadError, Unsupported

TEXTS = [
    "hello world",
    " hello",
    "\nhello",
    "a",
    "x",
    " ",
    "é 日本🙂",
    "12 + 3",
    "<|end|></s>",
    "\n\n",
]


def folder(
    path: Path, backend: Backend, config: dict[str, Any] | None = None, **files: Any
) -> Path:
    path.mkdir(exist_ok=True)
    backend.save(str(path / "tokenizer.json"))
    for name, data in {"tokenizer_config": config or {}, **files}.items():
        (path / f"{name}.json").write_text(json.dumps(data), encoding="utf-8")
    return path


def all_kinds() -> dict[str, Backend]:
    return {
        "byte_level": builders.byte_level(),
        "byte_level_bos": builders.byte_level(bos=True),
        "sentencepiece": builders.sentencepiece(),
        "metaspace": builders.metaspace(),
        "tiny": Backend.from_file(str(builders.TINY / "tokenizer.json")),
    }


@pytest.fixture(scope="module")
def kinds() -> dict[str, Tokenizer]:
    return {name: Tokenizer.wrap(backend) for name, backend in all_kinds().items()}


@pytest.fixture(scope="module")
def tiny() -> Tokenizer:
    return Tokenizer.from_folder(builders.TINY)


def test_all_files_of_the_embedded_folder_are_read(tiny: Tokenizer) -> None:
    assert (tiny.pad_token_id, tiny.bos_token_id, tiny.eos_token_id) == (0, 1, 5)
    assert tiny.stop_ids == {5}
    assert tiny.special_ids == {0, 1, 2, 3, 4, 5}
    assert len(tiny) == tiny.n_vocab == 2048
    assert tiny.object is tiny
    assert tiny.token_text(5) == "<|end|>"
    assert Tokenizer.from_folder(str(builders.TINY), stop_ids=[3]).stop_ids == {3, 5}


def test_chat_prompt_of_the_embedded_model_has_its_special_tokens(tiny: Tokenizer) -> None:
    text = tiny.apply_chat_template([{"role": "user", "content": "Hi"}])
    assert text == "<|bos|><|user|>Hi<|end|><|assistant|>"
    ids = tiny.encode(text, special=True, add_bos=False)
    assert ids[:2] == [1, 2]
    assert ids[-2:] == [5, 3]
    assert tiny.decode(ids) == text
    assert not set(tiny.encode(text, add_bos=False)) & tiny.special_ids


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_encode_and_decode(kinds: dict[str, Tokenizer], text: str) -> None:
    for name in ("byte_level", "byte_level_bos", "sentencepiece", "tiny"):
        tokenizer = kinds[name]
        ids = tokenizer.encode(text, add_bos=False)
        assert tokenizer.decode(ids, first=True) == text, name
        assert not set(ids) & tokenizer.special_ids, name


@pytest.mark.parametrize("text", TEXTS)
def test_continuation_adds_neither_space_nor_begin_token(
    kinds: dict[str, Tokenizer], text: str
) -> None:
    for name in ("byte_level", "byte_level_bos", "sentencepiece", "tiny"):
        ids = kinds[name].continuation(text)
        assert kinds[name].decode(ids) == text, name


def test_continuation_has_the_ids_of_text_after_an_x(kinds: dict[str, Tokenizer]) -> None:
    for name, tokenizer in kinds.items():
        before, full = (tokenizer.encode(t, add_bos=False) for t in ("x", "x, hello"))
        if full[: len(before)] == before:
            assert tokenizer.continuation(", hello") == full[len(before) :], name
    assert (
        kinds["sentencepiece"].continuation("hello")
        == kinds["sentencepiece"].encode("xhello", add_bos=False)[1:]
    )
    assert kinds["tiny"].continuation("") == []


def test_continuation_that_merges_with_one_anchor_uses_another() -> None:
    """In this vocabulary "xa" is one token, so the text after an x would lose its head."""
    backend = builders.byte_level()
    raw = json.loads(backend.to_str())
    raw["model"]["vocab"]["xa"] = len(raw["model"]["vocab"])
    raw["model"]["merges"].insert(0, ["x", "a"])
    merging = Tokenizer.wrap(Backend.from_str(json.dumps(raw)))
    assert merging.encode("xa") == [raw["model"]["vocab"]["xa"]]
    assert merging.decode(merging.continuation("a")) == "a"


def test_continuation_without_fitting_anchor_is_encoded_as_plain_text() -> None:
    each = Tokenizer.wrap(builders.words())
    assert each.continuation("b") == [1]
    empty = Tokenizer.wrap(builders.wordpiece())
    assert empty.continuation("world", special=True) == [2]


def test_special_tokens_in_text_are_matched_with_special_true_only(
    kinds: dict[str, Tokenizer],
) -> None:
    for name, text in (("byte_level", "a<|end|>b"), ("sentencepiece", "a</s>b")):
        tokenizer = kinds[name]
        for encode in (tokenizer.encode, tokenizer.continuation):
            assert len(set(encode(text, special=True)[1:]) & tokenizer.special_ids) == 1, name
            plain = encode(text)
            assert not set(plain[1:]) & tokenizer.special_ids, name
            assert tokenizer.decode(plain).endswith(text), name


def test_add_bos_adds_one_none_or_the_default(tmp_path: Path) -> None:
    config = {"bos_token": "<s>", "eos_token": {"content": "</s>"}, "pad_token": None}
    each = Tokenizer.from_folder(folder(tmp_path, builders.sentencepiece(), config))
    plain = each.encode("hello", add_bos=False)
    assert 1 not in plain
    assert each.encode("hello") == each.encode("hello", add_bos=True) == [1, *plain]
    assert each.stop_ids == {2}
    gpt = Tokenizer.wrap(builders.byte_level())
    assert gpt.encode("hello") == gpt.encode("hello", add_bos=False)
    with pytest.raises(ConfigError, match="no begin token"):
        gpt.encode("hello", add_bos=True)
    llama3 = Tokenizer.wrap(builders.byte_level(bos=True))
    assert llama3.encode("hello")[0] == 0
    bert = Tokenizer.wrap(builders.wordpiece())
    assert bert.encode("hello") == [7, 1, 8]


def test_streamed_and_complete_decoding_agree(kinds: dict[str, Tokenizer]) -> None:
    for name, tokenizer in kinds.items():
        ids = [*tokenizer.encode("é 日本🙂 hello", add_bos=False), 10**6, *tokenizer.special_ids]
        for first in (True, False):
            stream = tokenizer.stream(first=first)
            text = "".join(map(stream.push, ids)) + stream.flush()
            assert text == tokenizer.decode(ids, first=first), name


def test_dummy_space_is_removed_only_at_the_start_of_a_text(kinds: dict[str, Tokenizer]) -> None:
    tokenizer = kinds["sentencepiece"]
    ids = tokenizer.encode("hello world", add_bos=False)
    assert tokenizer.decode(ids, first=True) == "hello world"
    assert tokenizer.decode(ids) == " hello world"


def test_token_bytes_and_text_of_odd_ids(tiny: Tokenizer) -> None:
    assert tiny.token_bytes(99_999) == b""
    assert tiny.token_text(99_999) == ""
    halves = [i for i in range(tiny.n_vocab) if tiny.token_bytes(i) == b"\xe6"]
    assert [tiny.token_text(i) for i in halves] == ["\ufffd"]


def test_wrapping_does_not_change_the_wrapped_object() -> None:
    backend = builders.byte_level()
    backend.enable_truncation(2)
    backend.enable_padding(length=9)
    before = backend.to_str()
    each = Tokenizer.wrap(backend, stop_ids=[1])
    assert len(each.encode("hello there the fox <|end|>")) > 2
    each.encode("<|end|>", special=True)
    assert backend.to_str() == before
    assert backend.encode_special_tokens is False
    assert each.object is backend
    assert each.stop_ids == {1}
    assert (each.eos_token_id, each.bos_token_id, each.pad_token_id) == (None, None, None)
    assert Tokenizer.wrap(each) is each


def test_wrapped_tokenizer_object_keeps_its_settings() -> None:
    given = SimpleNamespace(
        backend_tokenizer=builders.sentencepiece(),
        special_tokens_map={"bos_token": "<s>", "eos_token": "</s>"},
        chat_template={"default": "D", "tool_use": "T"},
    )
    each = Tokenizer.wrap(given)
    assert (each.bos_token_id, each.eos_token_id) == (1, 2)
    assert each.chat_template == "D"
    assert each.object is given


def test_tokenizer_without_a_backend_raises_unsupported() -> None:
    with pytest.raises(Unsupported, match="SimpleNamespace has no tokenizers backend"):
        Tokenizer.wrap(SimpleNamespace())


@pytest.mark.torch
def test_transformers_tokenizer_gives_the_same_ids_and_prompt() -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(builders.TINY)
    ours = Tokenizer.wrap(theirs)
    messages = [{"role": "user", "content": "Use 4 9 10 13 to make 24."}]
    text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ours.apply_chat_template(messages) == text
    expected = theirs(text, add_special_tokens=False)["input_ids"]
    assert ours.encode(text, special=True, add_bos=False) == expected
    assert ours.encode("hello") == theirs("hello")["input_ids"]
    assert ours.stop_ids == {theirs.eos_token_id}
    assert len(ours) == len(theirs)


@pytest.mark.parametrize(
    ("given", "template"),
    [
        ("one", "one"),
        ([{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}], "d"),
        ([{"name": "tool_use", "template": "t"}], None),
        (None, None),
        (5, None),
    ],
)
def test_single_and_named_chat_templates_are_read(
    tmp_path: Path, given: object, template: str | None
) -> None:
    path = folder(tmp_path, builders.byte_level(), {"chat_template": given})
    assert Tokenizer.from_folder(path).chat_template == template
    (path / "chat_template.jinja").write_text("file", encoding="utf-8")
    assert Tokenizer.from_folder(path).chat_template == "file"


def test_missing_chat_template_raises_with_the_remedy() -> None:
    tokenizer = Tokenizer.wrap(builders.byte_level())
    with pytest.raises(ConfigError, match="template=False"):
        tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])


@pytest.mark.parametrize(("eos", "stops"), [([0, 1], {0, 1}), (1, {1}), (None, {1})])
def test_stop_ids_of_all_files_are_joined(tmp_path: Path, eos: object, stops: set[int]) -> None:
    path = folder(
        tmp_path,
        builders.byte_level(),
        special_tokens_map={"eos_token": "<|end|>"},
        generation_config={"eos_token_id": eos},
    )
    assert Tokenizer.from_folder(path).stop_ids == stops


def test_two_tokens_with_one_id_raise(tmp_path: Path) -> None:
    """The library reads it, and one of them is never written."""
    tokenizer = json.loads(builders.byte_level().to_str())
    vocab = tokenizer["model"]["vocab"]
    vocab["a"] = vocab["b"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    with pytest.raises(ModelLoadError, match="two tokens of the tokenizer have one id"):
        Tokenizer.from_folder(tmp_path).encode("a")


def test_missing_and_broken_files_raise_with_their_name(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"', encoding="utf-8")
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json cannot be read"):
        Tokenizer.from_folder(tmp_path)
    shutil.copy(builders.TINY / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json holds list"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json is not readable"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "\\ud800"}', encoding="utf-8")
    with pytest.raises(ModelLoadError, match=r"tokenizer_config\.json: eos_token is '.ud800'"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 1.5}', encoding="utf-8")
    with pytest.raises(ModelLoadError, match="eos_token_id is 1.5"):
        Tokenizer.from_folder(tmp_path)


@pytest.mark.parametrize("special", [False, True])
def test_long_text_has_the_ids_of_its_parts(special: bool) -> None:
    """The library encodes it by another path."""
    with weft.load() as lm:
        part = "<|user|>One day a fox ate 37 eggs.\n"
        ids = lm.text.encode(part, special=special, add_bos=False)
        n = 70_000 // len(part) + 1
        assert lm.text.encode(part * n, special=special, add_bos=False) == ids * n
        with pytest.raises(ConfigError, match="no text that can be tokenised"):
            lm.text.encode("\ud800" + part * n, special=special)
