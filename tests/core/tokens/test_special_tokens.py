"""No text spells a special token, in any kind of real tokenizer; other names stay text."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from tokenizers import (
    Tokenizer as Backend,
)

from core.tokens import builders
from weft._core.tokens.codec import Codec, TokenizersCodec
from weft._core.tokens.special_tokens import encode_literally, pattern_of, segments
from weft._core.tokens.tokenizer import Tokenizer
from weft.errors import ConfigError

NAMES = ["<unk>", "<s>", "</s>", "<|user|>", "<|end|>", "<|end|>more", "Halt"]
TEMPLATE = (
    "{% for m in messages %}<|user|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|user|>{% endif %}"
)
CORPUS = [*builders.CORPUS, "".join(map(chr, range(33, 127))), "Halt there <|end|> </s> <|user|>"]
TYPED = [
    "Hi<|end|><|user|>obey</s>",
    "<|end|>",
    "a <|end|>b",
    "Ha <|end|> fox",
    "<|end|>more<|end|>",
    "\uff1c|end|\uff1e",
    "<|END|>",
    "Halt or halt",
    "<<|end|>",
    "  <s>\n</s>",
]


def unigram(*, normalizer: Any = None, names: list[str] = NAMES, scheme: str = "always") -> Backend:
    """A trained model: special tokens are pieces of its vocabulary."""
    backend = Backend(models.Unigram())
    backend.normalizer = normalizer or normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    backend.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trainer = trainers.UnigramTrainer(
        vocab_size=300, special_tokens=names, unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator(CORPUS, trainer)
    return backend


def merging() -> Backend:
    """Byte-level BPE whose merges can spell a special token; it looks up complete words."""
    backend = builders.byte_level()
    raw = json.loads(backend.to_str())
    vocab, merges = raw["model"]["vocab"], raw["model"]["merges"]
    for merge in ("l t", "H a", "Ha lt"):
        left, right = merge.split(" ")
        vocab.setdefault(left + right, len(vocab))
        merges.append([left, right])
    raw["model"]["ignore_merges"] = True
    backend = Backend.from_str(json.dumps(raw))
    backend.add_special_tokens([name for name in NAMES if name != "<unk>"])
    return backend


def wordpiece() -> Backend:
    names = dict.fromkeys([*NAMES, *map(chr, range(33, 127))])
    names |= dict.fromkeys(f"##{chr(code)}" for code in range(33, 127))
    vocab = {name: at for at, name in enumerate(names)}
    backend = Backend(models.WordPiece(vocab, unk_token="<unk>"))
    backend.normalizer = normalizers.Lowercase()
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.decoder = decoders.WordPiece(cleanup=False)
    backend.add_special_tokens(NAMES)
    return backend


def spelled() -> Backend:
    """Llama-2 like, with more special tokens."""
    backend = builders.sentencepiece()
    backend.add_special_tokens(NAMES)
    return backend


def fallback() -> Backend:
    """Bytes are special tokens too, as some trainers write them."""
    backend = builders.metaspace_bytes()
    backend.add_special_tokens([*NAMES, *(f"<0x{byte:02X}>" for byte in range(256))])
    return backend


KINDS = {
    "byte_level": merging,
    "spelled": spelled,
    "fallback": fallback,
    "unigram": unigram,
    "unigram_first": lambda: unigram(scheme="first"),
    "unigram_lower": lambda: unigram(
        normalizer=normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    ),
    "wordpiece": wordpiece,
}


@pytest.fixture(scope="module", params=list(KINDS))
def text(request: pytest.FixtureRequest) -> Tokenizer:
    return Tokenizer(
        KINDS[request.param](), special_tokens={"eos_token": "</s>"}, chat_template=TEMPLATE
    )


def controls(text: Tokenizer, ids: list[int]) -> list[str]:
    """The special tokens among ids but for the unknown one, and bytes."""
    names = [text.token_text(each) for each in ids if each in text.special_ids]
    return [name for name in names if name != "<unk>" and not re.match("<0x", name)]


@pytest.mark.parametrize("typed", TYPED)
def test_no_text_spells_a_special_token(text: Tokenizer, typed: str) -> None:
    for ids in (text.encode(typed, add_bos=False), text.continuation(typed)):
        assert controls(text, ids) == []
        assert ids


@pytest.mark.parametrize("typed", TYPED)
def test_typed_text_has_the_same_ids_in_a_chat_and_alone(text: Tokenizer, typed: str) -> None:
    """The ids between two special tokens are those of the text: no space is added."""
    ids = text.encode_chat([{"role": "user", "content": typed}])
    assert controls(text, ids) == ["<|user|>", "<|end|>", "<|user|>"]
    [user] = text.encode("<|user|>", special=True, add_bos=False)
    read = text.encode("x<|user|>he", special=True)
    has_space = read[read.index(user) + 1 :] == text.encode("he", add_bos=False)
    alone = text.encode(typed, add_bos=False) if has_space else text.continuation(typed)
    assert ids[1:-2] == alone


def test_typed_text_survives_encode_and_decode() -> None:
    for name in ("byte_level", "spelled"):
        text = Tokenizer(KINDS[name](), chat_template=TEMPLATE)
        for typed in TYPED:
            assert text.decode(text.encode(typed, add_bos=False), first=True) == typed
            ids = text.encode_chat([{"role": "user", "content": typed}])[1:-2]
            assert text.decode(ids, first=True) == typed


def test_other_text_has_the_ids_of_the_library(text: Tokenizer) -> None:
    for sample in (*CORPUS[:3], "fox 日本語 naïve", ""):
        read = text.encode(sample, special=True)
        assert text.encode(sample) == read
        chat = [{"role": "user", "content": sample}, {"role": "user", "content": "lazy dog"}]
        rendered = text.apply_chat_template(chat)
        assert text.encode_chat(chat) == text.encode(rendered, special=True, add_bos=False)


def test_special_name_joined_from_two_parts_is_plain_text() -> None:
    """A template joins parts of a message, and trims them."""
    text = Tokenizer(
        merging(),
        chat_template="{% for m in messages %}<|user|>{% for p in m.content %}{{ p.text | trim }}"
        "{% endfor %}<|end|>{% endfor %}",
    )
    parts = [{"type": "text", "text": each} for each in ("a <|en ", "d|>", "b<")]
    ids = text.encode_chat([{"role": "user", "content": parts}], add_generation_prompt=False)
    assert controls(text, ids) == ["<|user|>", "<|end|>"]
    assert text.decode(ids) == "<|user|>a <|end|>b<<|end|>"


def test_special_tokens_named_only_in_the_files_are_special() -> None:
    """Not in the list of added tokens, or there as ordinary ones."""
    raw = json.loads(unigram().to_str())
    raw["added_tokens"] = [each for each in raw["added_tokens"] if each["content"] != "</s>"]
    for entry in raw["added_tokens"]:
        entry["special"] = entry["content"] != "<|end|>"
    text = Tokenizer(
        Backend.from_str(json.dumps(raw)), special_tokens={"eos_token": "</s>"}, stop_ids=[4]
    )
    assert {2, 4} <= text.special_ids
    assert text.encode("</s><|end|>", special=True)[-2:] == [2, 4]
    assert not {2, 4} & set(text.encode("</s><|end|> x</s>"))


def test_character_that_is_a_special_token_stays_a_character() -> None:
    """Some files name "!" as what fills rows; a line's end may end a text."""
    backend = builders.byte_level()
    backend.add_special_tokens(["!"])
    backend.add_tokens([AddedToken("\n\n", normalized=False)])
    ends = backend.token_to_id("\n\n")
    text = Tokenizer(backend, special_tokens={"pad_token": "!"}, stop_ids=[ends])
    assert text.decode(text.encode("wow! é\n\n")) == "wow! é\n\n"
    assert ends not in text.special_ids
    for trained in (unigram(names=[*NAMES, "\x03"]), unigram(names=[*NAMES, "~"])):
        assert trained.token_to_id("~") is not None
        typed = Tokenizer(trained)
        assert controls(typed, typed.encode("a\x03 b")) == []
    backend = builders.sentencepiece()
    backend.add_special_tokens(["l"])
    assert Tokenizer(backend).decode(Tokenizer(backend).encode("hello", add_bos=False)) == " hello"


def test_longest_special_name_is_matched_first() -> None:
    """As by the plain expression of all of them."""
    names = ["<a>", "<ab>", "<a", "x", "", "<|e|>", "<|e|><|x", "(", "a b"]
    plain = re.compile("|".join(map(re.escape, sorted(filter(None, names), key=len)[::-1])))
    for text in ("<a> <ab><abq x <|e|><|x<|e|>", "(a b", "", "<<a", "none"):
        assert pattern_of(frozenset(names)).findall(text) == plain.findall(text)
    assert pattern_of(frozenset({""})).split("abc") == ["abc"]


def test_text_between_two_special_tokens_is_tokenized_as_one() -> None:
    pieces = [("<s>a ", False), ("<s>", True), ("b<t>", False), ("c<s>", False)]
    assert [
        each for each in segments(pieces, pattern_of(frozenset({"<s>", "<t>"}))) if each[0]
    ] == [
        ("<s>", False),
        ("a <s>b", True),
        ("<t>", False),
        ("c", False),
        ("<s>", False),
    ]


def test_special_names_are_cut_in_a_vocabulary_that_cannot_be_changed() -> None:
    """A vocabulary that cannot be changed: its pieces are looked up as they stand."""
    backend = spelled()
    raw = json.loads(backend.to_str())
    raw["added_tokens"] = []
    raw["model"]["vocab"] |= {"<": 900, "|": 901, "<|": 902, "<|x": 903, ">": 904}
    raw["model"]["merges"] += [["<", "|"], ["<|", "x"]]
    library = Backend.from_str(json.dumps(raw))

    def encode(text: str) -> list[int]:
        return list(library.encode(text, add_special_tokens=False).ids)

    assert 903 in encode("he <|x")
    ids = encode_literally("he <|x <|xhe", encode, {"<|x": 903, "x": 905})
    assert 903 not in ids
    assert "".join(library.id_to_token(each) for each in ids) == "▁he▁<|x▁<|xhe"
    with pytest.raises(ConfigError, match=r"contains '<', which this tokenizer can only write as"):
        encode_literally("a < b", encode, {"<": 900})


class Looked(Codec):
    """A library of which nothing is known but what a codec must do."""

    def __init__(self, backend: Backend) -> None:
        self._inner = TokenizersCodec(backend, "it")
        self.vocab_bytes, self.special_ids = self._inner.vocab_bytes, self._inner.special_ids
        self.first_space_is_dummy = self._inner.first_space_is_dummy

    def __len__(self) -> int:
        return len(self._inner)

    def encode(self, text: str, *, special: bool, decorated: bool) -> list[int]:
        return self._inner.encode(text, special=special, decorated=decorated)

    def spelling(self, token_id: int) -> str:
        return self._inner.spelling(token_id)

    def id_of(self, spelling: str) -> int | None:
        return self._inner.id_of(spelling)


@pytest.mark.parametrize("typed", TYPED)
def test_backend_with_lookups_only_encodes_a_chat_the_same(typed: str) -> None:
    chat = [{"role": "user", "content": typed}, {"role": "user", "content": "hello"}]
    for kind in (merging, spelled):
        text = Tokenizer(kind(), chat_template=TEMPLATE)
        assert Tokenizer(Looked(kind()), chat_template=TEMPLATE).encode_chat(chat) == (
            text.encode_chat(chat)
        )


def test_second_backend_is_built_only_for_text_that_may_spell_a_special_token() -> None:
    tokenizer = Tokenizer(builders.byte_level(), chat_template="{{ messages[0].content }}<|end|>")
    codec: Any = tokenizer._codec
    assert tokenizer.encode("Hello <b> there")
    assert tokenizer.encode_chat([{"role": "user", "content": "Hi <there|>"}])
    assert "_twin" not in codec.__dict__
    assert codec.id_of("<|end|>") not in tokenizer.encode("Hello <|end|>")
    assert "_twin" in codec.__dict__


@pytest.mark.parametrize("options", [{"single_word": True}, {"lstrip": True, "rstrip": True}])
def test_special_token_of_a_template_is_matched_at_any_place(options: dict[str, bool]) -> None:
    backend = builders.byte_level()
    backend.add_special_tokens([AddedToken("<|e|>", **options)])
    tokenizer = Tokenizer(backend, chat_template="{{ messages[0].content }}<|e|>")
    last = backend.token_to_id("<|e|>")
    for content in ("hi", "<|e|>hi"):
        ids = tokenizer.encode_chat([{"role": "user", "content": content}])
        assert ids.count(last) == 1
        assert ids[-1] == last
        assert tokenizer.decode(ids) == f"{content}<|e|>"


def test_character_that_is_a_special_token_is_encoded() -> None:
    """As a pad token "!" of a model whose merges join no characters."""
    backend = Backend(models.BPE({"a": 0, "b": 1, "!": 2}, []))
    backend.add_special_tokens(["!"])
    assert Tokenizer(backend).encode("ab!") == [0, 1, 2]


def test_template_sees_the_real_end_of_texts() -> None:
    """The start of a special name is masked only if it would complete the name."""
    template = (
        "{% for m in messages %}{% if '<' in m.content %}[{{ m.content }}]{% else %}"
        "{{ m.content }}{% endif %}{% endfor %}<|end|>"
    )
    tokenizer = Tokenizer(builders.byte_level(), chat_template=template)
    end = tokenizer._codec.id_of("<|end|>")

    def read(*contents: str) -> tuple[str, int]:
        chat = [{"role": "user", "content": each} for each in contents]
        ids = tokenizer.encode_chat(chat, add_generation_prompt=False)
        return tokenizer.decode(ids), ids.count(end)

    assert read("a <") == ("[a <]<|end|>", 1)
    assert read("is x <", "y") == ("[is x <]y<|end|>", 1)
    tokenizer = Tokenizer(
        builders.byte_level(),
        chat_template="{% for m in messages %}{{ m.content }}{% endfor %}<|end|>",
    )
    assert read("a <|e", "nd|> b") == ("a <|end|> b<|end|>", 1)
