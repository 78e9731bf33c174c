"""Small real tokenizers of each kind, built in the process."""

from __future__ import annotations

import importlib.util
import json
import struct
from base64 import b64decode
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

import weft

CORPUS = [
    "hello world, hello there: the quick brown fox jumps over the lazy dog",
    "def f(x):\n    return x + 1\n\nprint(f(41))",
    "Übergrößenträger naïve café 日本語 текст 🙂",
] * 3
TINY = Path(weft.__path__[0]) / "data" / "tiny"


def byte_level(*, bos: bool = False) -> Tokenizer:
    """GPT-2 like; with `bos` Llama-3 like: the post-processor puts a begin token first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|begin|>", "<|end|>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    if bos:
        tokenizer.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(
                    single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]
                ),
            ]
        )
    return tokenizer


def sentencepiece() -> Tokenizer:
    """Llama-2 like: dummy space, byte fallback, begin token by the post-processor."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names += [*"▁helowrdxa\n", "ll", "he", "llo", "▁he", "▁hello", "hello", "wo", "▁wo", "▁x", "▁a"]
    merges = ["l l", "h e", "ll o", "▁ he", "▁he llo", "he llo", "w o", "▁ wo", "▁ x", "▁ a"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={name: index for index, name in enumerate(names)},
            merges=[(left, right) for left, right in map(str.split, merges)],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def metaspace(scheme: str = "first") -> Tokenizer:
    """Unigram with a Metaspace pre-tokenizer, as T5-like files have it."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def wordpiece() -> Tokenizer:
    names = ["[UNK]", "hello", "world", "##s", "wo", "##rld", "x", "[CLS]", "[SEP]"]
    tokenizer = Tokenizer(
        models.WordPiece({name: index for index, name in enumerate(names)}, unk_token="[UNK]")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.add_special_tokens(["[CLS]", "[SEP]"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 7), ("[SEP]", 8)]
    )
    return tokenizer


def words() -> Tokenizer:
    """Complete words and no decoder at all; the added token leaves a hole in the ids."""
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 5}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_tokens([AddedToken("two words")])
    return tokenizer


def metaspace_bytes() -> Tokenizer:
    """Llama files as written today: Metaspace before the first word, byte fallback."""
    tokenizer = sentencepiece()
    tokenizer.normalizer = None
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return tokenizer


def duplicates() -> Tokenizer:
    """Byte-level, where several ids have the same bytes, and ids between them have none."""
    tokenizer = byte_level()
    vocab = json.loads(tokenizer.to_str())
    table = vocab["model"]["vocab"]
    n = 1 + max(table.values())
    # Characters outside the byte alphabet: their tokens are the text itself.
    for index, name in enumerate(('"', " ", "日", "🙂", "true", "{")):
        vocab["added_tokens"].append(
            {
                "id": n + 3 * index,
                "content": name,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": False,
            }
        )
    return Tokenizer.from_str(json.dumps(vocab))


def with_words(*words: str) -> Tokenizer:
    """Byte-level, with tokens added that are these words."""
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in words])
    return tokenizer


def characters() -> Tokenizer:
    """WordPiece over ASCII characters only: most text cannot be written in it."""
    signs = [chr(code) for code in range(33, 127)]
    names = ["[UNK]", *signs, *(f"##{sign}" for sign in signs), "the", "##ing", "yes", "no"]
    tokenizer = Tokenizer(
        models.WordPiece({name: index for index, name in enumerate(names)}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    tokenizer.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    return tokenizer


def mistral(version: str = "tokenizer.model.v1") -> Tokenizer:
    """The SentencePiece file of Mistral 7B, as Transformers writes it out; skips without it."""
    return from_sentencepiece(_mistral_file(version).read_bytes())


def tekken() -> Tokenizer:
    """Mistral's byte-level vocabulary of 131,072 tokens; other words fall into bytes."""
    data = json.loads(_mistral_file("tekken_240718.json").read_text("utf-8"))
    n_special = data["config"]["default_num_special_tokens"]
    char_of_byte = {byte: char for char, byte in _byte_of_char().items()}
    size = data["config"]["default_vocab_size"] - n_special
    names = [
        "".join(char_of_byte[b] for b in b64decode(e["token_bytes"])) for e in data["vocab"][:size]
    ]
    vocab = {f"<SPECIAL_{index}>": index for index in range(n_special)}
    vocab["</s>"] = vocab.pop("<SPECIAL_2>")
    vocab |= {name: index + n_special for index, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(vocab)[: n_special - 1] + ["</s>"])
    return tokenizer


def from_sentencepiece(model: bytes) -> Tokenizer:
    """Read a SentencePiece BPE file by hand: pieces and their merges.

    A merge is of the two halves of a piece, the likelier piece first, as Transformers has it.
    """
    pieces = list(_pieces(model))
    vocab = {piece: index for index, (piece, _, _) in enumerate(pieces)}
    merges = []
    for piece, score, kind in pieces:
        if kind == 1:
            halves = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
            pairs = [(a, b) for a, b in halves if a in vocab and b in vocab]
            pairs.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
            merges += [(score, a, b) for a, b in pairs]
    merges.sort(key=lambda merge: -merge[0])
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=[(a, b) for _, a, b in merges],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spelled = sentencepiece()
    tokenizer.normalizer, tokenizer.decoder = spelled.normalizer, spelled.decoder
    tokenizer.add_special_tokens([piece for piece, _, kind in pieces if kind in (2, 3)])
    tokenizer.post_processor = spelled.post_processor
    return tokenizer


def _pieces(model: bytes) -> Iterator[tuple[str, float, int]]:
    """Yield (text, score, kind) of the file's pieces: the repeated field 1 of the message."""
    for field, value in _fields(model):
        if field == 1 and isinstance(value, bytes):
            parts = dict(_fields(value))
            text, score = parts[1], parts.get(2, b"\0\0\0\0")
            assert isinstance(text, bytes)
            assert isinstance(score, bytes)
            yield text.decode(), struct.unpack("<f", score)[0], int(parts.get(3, 1))  # type: ignore[arg-type]


def _fields(data: bytes) -> Iterator[tuple[int, bytes | int]]:
    """Yield (number, value) of a protocol buffers message."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at, value, shift = at + 1, value | (byte & 127) << shift, shift + 7
            if byte < 128:
                return value

    while at < len(data):
        tag = varint()
        kind = tag & 7
        if kind == 0:
            yield tag >> 3, varint()
        else:
            size = {1: 8, 5: 4}.get(kind) or varint()
            yield tag >> 3, data[at : at + size]
            at += size


def _mistral_file(name: str) -> Path:
    """A file of the mistral-common package, which is not imported."""
    spec = importlib.util.find_spec("mistral_common")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("mistral-common is not installed")
    return Path(spec.submodule_search_locations[0]) / "data" / name


def _byte_of_char() -> dict[str, int]:
    """Character → byte of byte-level BPE, from the library's own alphabet."""
    own = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in set(own)]
    return {chr(b): b for b in own} | {chr(256 + at): byte for at, byte in enumerate(rest)}
