from __future__ import annotations

import pytest
from tokenizers import Tokenizer, decoders, models

from core.tokens import builders
from effort import lines_run
from weft._core.tokens.codec import byte_vocab, first_space_is_dummy
from weft.errors import Unsupported

TEXTS = [
    "hello world",
    " hello",
    "the quick  brown fox",
    "Übergrößen 日本語 🙂 текст",
    "tab\tline\n\nend ",
    "\x00\x7f\xad\u200d",
]


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_tokens_spell_their_text(text: str) -> None:
    backend = builders.byte_level()
    table = byte_vocab(backend)
    assert b"".join(table[i] for i in backend.encode(text).ids) == text.encode()
    assert not first_space_is_dummy(backend)


def test_byte_level_has_every_single_byte_once() -> None:
    table = byte_vocab(builders.byte_level())
    assert sorted(token for token in table if len(token) == 1) == [bytes([b]) for b in range(256)]
    assert table[:2] == [b"<|begin|>", b"<|end|>"]


def test_byte_level_token_outside_the_alphabet_is_plain_text() -> None:
    backend = Tokenizer(models.BPE(vocab={"日": 0, "Ġa": 1, "a b": 2, "\xad": 3}, merges=[]))
    backend.decoder = decoders.ByteLevel()
    assert byte_vocab(backend) == ["日".encode(), b" a", b"a b", "\xad".encode()]
    # The tokenizers library agrees.
    assert [backend.decode([i]) for i in range(4)] == ["日", " a", "a b", "\xad"]


@pytest.mark.parametrize("text", ["hello world", " hello", "é 日本 x", "a\nhello  hello"])
def test_sentencepiece_tokens_spell_a_dummy_space_and_their_text(text: str) -> None:
    backend = builders.sentencepiece()
    table = byte_vocab(backend)
    ids = backend.encode(text, add_special_tokens=False).ids
    assert b"".join(table[i] for i in ids) == b" " + text.encode()
    assert first_space_is_dummy(backend)
    assert table[:4] == [b"<unk>", b"<s>", b"</s>", b"\x00"]


def test_metaspace_tokens_spell_their_text() -> None:
    for scheme, dummy in (("first", True), ("always", True), ("never", False)):
        backend = builders.metaspace(scheme)
        table = byte_vocab(backend)
        spelled = b"".join(table[i] for i in backend.encode("hello the world").ids)
        assert spelled == b" " * dummy + b"hello the world"
        assert first_space_is_dummy(backend) is dummy


def test_wordpiece_tokens_join_as_the_library_joins_them() -> None:
    backend = builders.wordpiece()
    table = byte_vocab(backend)
    ids = backend.encode("hello worlds xs", add_special_tokens=False).ids
    spelled = b"".join(table[i] for i in ids)
    assert spelled == b" " + backend.decode(ids).encode() == b" hello worlds xs"
    assert first_space_is_dummy(backend)


def test_without_a_decoder_words_are_apart_and_holes_are_empty() -> None:
    backend = builders.words()
    assert byte_vocab(backend) == [b" a", b" b", b"", b"two words", b"", b" [UNK]"]
    assert first_space_is_dummy(backend)


def test_byte_level_is_recognized_by_the_pre_tokenizer_too() -> None:
    backend = builders.byte_level()
    expected = byte_vocab(backend)
    backend.decoder = None
    assert byte_vocab(backend) == expected


def test_replacements_by_pattern_and_word_ends_are_spelled() -> None:
    backend = Tokenizer(models.BPE(vocab={"a_-b": 0, "c</w>": 1}, merges=[]))
    backend.decoder = decoders.BPEDecoder("</w>")
    assert byte_vocab(backend)[1] == b"c "
    assert not first_space_is_dummy(backend)
    from tokenizers import Regex

    backend.decoder = decoders.Replace(Regex("[_-]"), "\\1")
    assert byte_vocab(backend)[0] == b"a\\1\\1b"


def test_decoder_without_bytes_raises_unsupported_with_its_name() -> None:
    backend = Tokenizer(models.BPE(vocab={"a": 0}, merges=[]))
    backend.decoder = decoders.CTC()
    with pytest.raises(Unsupported, match="CTC"):
        byte_vocab(backend)


def test_empty_vocabulary_gives_an_empty_list() -> None:
    assert byte_vocab(Tokenizer(models.BPE())) == []


def test_spelling_a_vocabulary_costs_no_more_than_linear() -> None:
    def cost(n: int) -> int:
        vocab = {f"Ġtoken{i:06d}é": i for i in range(n)}
        backend = Tokenizer(models.BPE(vocab=vocab, merges=[]))
        backend.decoder = decoders.ByteLevel()
        table: list[bytes] = []
        n_lines = lines_run(lambda: table.extend(byte_vocab(backend)))
        assert len(table) == n
        assert table[5] == b" token000005\xe9"
        return n_lines

    assert cost(2000) < 2.1 * cost(1000)
