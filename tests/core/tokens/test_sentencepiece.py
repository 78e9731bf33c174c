"""SentencePiece BPE by scores, against a naive twin."""

from __future__ import annotations

import random

import pytest

from weft._core.tokens.sentencepiece import PieceTable, SentencePieceCodec
from weft._core.tokens.tokenizer import Tokenizer
from weft.errors import ConfigError

BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
CONTROLS = ["<unk>", "<s>", "</s>", "<tag>"]
SYLLABLES = ["▁", "a", "b", "c", "ab", "ba", "▁a", "▁ab", "bc", "abc", "▁▁", "▁▁▁", "ca", "aa", "é"]


def codec(pieces: list[str], scores: list[float], **options: object) -> SentencePieceCodec:
    """Return a vocabulary of control tokens, bytes and pieces."""
    first = len(CONTROLS)
    values: dict[str, object] = {
        "spellings": [*CONTROLS, *BYTES, *pieces],
        "scores": [0.0] * (first + 256) + scores,
        "byte_ids": list(range(first, first + 256)),
        "control_ids": frozenset(range(3)),
        "text_ids": frozenset({3}),
        "unknown_id": 0,
        "begin_ids": (1,),
    }
    return SentencePieceCodec(PieceTable(**{**values, **options}))  # type: ignore[arg-type]


def naive(text: str, pieces: list[str], scores: list[float]) -> list[str]:
    """Merge the pair with the best score, the leftmost of equals, by looking at all pairs."""
    best = dict(zip(pieces, scores, strict=True))
    parts = list(text.replace(" ", "▁"))
    while True:
        pairs = [
            (-best[both], at)
            for at in range(len(parts) - 1)
            if (both := parts[at] + parts[at + 1]) in best
        ]
        if not pairs:
            break
        at = min(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [
        piece
        for part in parts
        for piece in ([part] if part in best else [BYTES[byte] for byte in part.encode()])
    ]


@pytest.mark.parametrize("seed", range(20))
def test_merges_equal_the_naive_twin(seed: int) -> None:
    rng = random.Random(seed)
    pieces = [*SYLLABLES, *(["a▁b"] if seed % 2 else [])]  # a piece that reaches across words
    scores = [float(rng.randrange(6)) for _ in pieces]
    pieces_codec = codec(pieces, scores, puts_space=False)
    for _ in range(50):
        text = "".join(rng.choice("aab bc  é€") for _ in range(rng.randrange(30)))
        ids = pieces_codec.encode(text, special=False, decorated=False)
        assert [pieces_codec.spelling(i) for i in ids] == naive(text, pieces, scores)
        assert b"".join(pieces_codec.vocab_bytes[i] for i in ids).decode() == text


def test_space_is_put_before_a_text_and_after_special_tokens() -> None:
    pieces_codec = codec(SYLLABLES, [1.0] * len(SYLLABLES))
    ids = pieces_codec.encode("a</s>a", special=True, decorated=True)
    assert [pieces_codec.spelling(i) for i in ids] == ["<s>", "▁a", "</s>", "▁a"]
    assert Tokenizer(pieces_codec).decode(ids[1:2], first=True) == "a"


def test_names_of_control_tokens_stay_text_unless_special() -> None:
    pieces_codec = codec(["<s", "<", "s", ">"], [1.0] * 4, puts_space=False)
    assert pieces_codec.encode("<s>", special=True, decorated=False) == [1]
    plain = pieces_codec.encode("<s>", special=False, decorated=False)
    assert 1 not in plain
    assert b"".join(pieces_codec.vocab_bytes[i] for i in plain) == b"<s>"
    assert pieces_codec.encode("x<tag>y", special=False, decorated=False).count(3) == 1


def test_stripping_tokens_take_the_blanks_after_them() -> None:
    pieces_codec = codec(["a"], [1.0], stripping_ids=frozenset({2}), puts_space=False)
    assert pieces_codec.encode("</s> \n a", special=True, decorated=False) == [
        2,
        pieces_codec.id_of("a"),
    ]
    assert pieces_codec.max_token_bytes is None


def test_text_that_is_not_unicode_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="is no text that can be tokenised"):
        codec(["a"], [1.0]).encode("\ud800", special=False, decorated=False)
