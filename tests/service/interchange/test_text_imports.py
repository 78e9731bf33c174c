"""Plain text becomes the prompt of a loom; unknown files raise an error with the supported ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from weft.errors import FormatError
from weft.service.interchange import IMPORTERS, read

STORY = "Once upon a time\n\n  there was a fox."


@pytest.mark.parametrize(
    "data",
    [
        STORY.encode(),
        f"{STORY}\n".encode(),
        STORY.encode("utf-8-sig"),
        STORY.encode("utf-16"),
        STORY.replace("\n", "\r\n").encode(),
    ],
    ids=["plain", "final newline", "byte order mark", "utf-16", "crlf"],
)
def test_text_file_becomes_a_prompt(data: bytes, tmp_path: Path) -> None:
    for source in (data, tmp_path / "story.txt", tmp_path / "story.MD", tmp_path / "story"):
        if isinstance(source, Path):
            source.write_bytes(data)
        report = read(source)
        assert (report.recognised_as, report.n_nodes, report.dropped) == ("text", 1, ())
        assert report.looms[0].loom.user_prompt == STORY


def test_text_that_looks_like_json_is_text_by_its_name_or_by_the_format(tmp_path: Path) -> None:
    for text in ("[Chapter 1] It rained.", '{"a": 1}', "17"):
        file = tmp_path / "a.txt"
        file.write_text(text)
        assert read(file).looms[0].loom.user_prompt == text
        assert read(text.encode(), format="text").looms[0].loom.user_prompt == text
        with pytest.raises(FormatError):
            read(text.encode())


def test_prompt_of_a_text_file_never_uses_the_chat_template() -> None:
    import weft
    from shallow import shallow

    lm = weft.load(shallow(), engine="numpy")
    (only,) = read(STORY.encode(), lm).looms
    assert only.loom.tokens == weft.Loom(lm, STORY, template=False).tokens
    assert only.loom.grow(max_tokens=2, seed=1)[0].tokens


@pytest.mark.parametrize("data", [b"\x89PNG\r\n\x1a\n\x00", b"PK\x03\x04", b"17", b"a\0b"])
def test_unknown_file_is_refused_with_the_supported_ones(data: bytes) -> None:
    with pytest.raises(FormatError, match="Supported: Weft looms") as caught:
        read(data)
    for importer in IMPORTERS.values():
        assert importer.about in str(caught.value)


def test_json_file_that_is_not_json_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text("Once upon a time")
    with pytest.raises(FormatError, match="no JSON"):
        read(file)
    for data in (b"", b"<html>"):
        with pytest.raises(FormatError, match="no JSON"):
            read(data)


def test_text_in_another_encoding_names_the_byte(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"caf\xe9 au lait")
    with pytest.raises(FormatError, match=r"a\.txt: it is not text in UTF-8: .* byte 3"):
        read(file)
    with pytest.raises(FormatError, match="it is not text in UTF-8"):
        read(b"caf\xe9")
    file.write_bytes(b"\n")
    with pytest.raises(FormatError, match="the file is empty"):
        read(file)
