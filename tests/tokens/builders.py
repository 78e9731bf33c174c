"""Small real tokenizers of each kind, made in the process."""

from __future__ import annotations

from pathlib import Path

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
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<|begin|>", "<|end|>"],
        show_progress=False,
    )
    made.train_from_iterator(CORPUS, trainer)
    if bos:
        made.post_processor = processors.Sequence(
            [
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(
                    single="<|begin|> $A", special_tokens=[("<|begin|>", 0)]
                ),
            ]
        )
    return made


def sentencepiece() -> Tokenizer:
    """Llama-2 like: dummy space, byte fallback, begin token by the post-processor."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    names += [*"▁helowrdxa\n", "ll", "he", "llo", "▁he", "▁hello", "hello", "wo", "▁wo", "▁x", "▁a"]
    merges = ["l l", "h e", "ll o", "▁ he", "▁he llo", "he llo", "w o", "▁ wo", "▁ x", "▁ a"]
    made = Tokenizer(
        models.BPE(
            vocab={name: index for index, name in enumerate(names)},
            merges=[(left, right) for left, right in map(str.split, merges)],
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>"])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return made


def metaspace(scheme: str = "first") -> Tokenizer:
    """Unigram with a Metaspace pre-tokenizer, as T5-like files have it."""
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    made.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    made.train_from_iterator(CORPUS, trainer)
    return made


def wordpiece() -> Tokenizer:
    names = ["[UNK]", "hello", "world", "##s", "wo", "##rld", "x", "[CLS]", "[SEP]"]
    made = Tokenizer(
        models.WordPiece({name: index for index, name in enumerate(names)}, unk_token="[UNK]")
    )
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.WordPiece(cleanup=False)
    made.add_special_tokens(["[CLS]", "[SEP]"])
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 7), ("[SEP]", 8)]
    )
    return made


def words() -> Tokenizer:
    """Whole words and no decoder at all; the added token leaves a hole in the ids."""
    made = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 5}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.add_tokens([AddedToken("two words")])
    return made
