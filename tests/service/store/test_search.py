"""Search over all looms: words, phrases and prefixes; no query is a syntax error."""

from __future__ import annotations

import pytest

from weft import load
from weft.errors import ConfigError
from weft.loom import Loom
from weft.service.store.library import Library


def keep(library: Library, prompt: str, *texts: str) -> str:
    loom = Loom(None, prompt)
    for text in texts:
        loom.add(text)
    return library.create(loom).name


def hits_of(library: Library, words: str, **more: object) -> list[tuple[str, int]]:
    return [(hit.loom, hit.number) for hit in library.find(words, **more)]  # type: ignore[arg-type]


def test_find_words_phrases_and_prefixes(library: Library) -> None:
    one = keep(library, "A fox", "The quick brown fox jumps.", "A lazy dog; quick!")
    two = keep(library, "Animals", "Foxes and dogs", "brown quick")
    assert sorted(hits_of(library, "quick brown")) == [(two, 2), (one, 1)]
    assert hits_of(library, '"quick brown"') == [(one, 1)]
    assert sorted(hits_of(library, "fox")) == [(one, 0), (one, 1)]
    assert sorted(hits_of(library, "fox*")) == [(two, 1), (one, 0), (one, 1)]
    assert hits_of(library, "QUICK", loom=two) == [(two, 2)]
    assert len(hits_of(library, "fox*", limit=2)) == 2


def test_marks_cover_the_matches(library: Library) -> None:
    keep(library, "x", "und " * 100 + "Große Äpfel, große Birnen" + " und" * 100)
    (hit,) = library.find('apf* "grosse birnen"')
    assert [hit.snippet[start:end] for start, end in hit.marks] == ["Äpfel", "große Birnen"]
    assert hit.snippet.startswith("…")
    assert hit.snippet.endswith("…")
    assert len(hit.snippet) < 300


def test_find_ignores_case_accents_and_missing_spaces(library: Library) -> None:
    name = keep(library, "x", "Élève naïve, Straße, ﬁne", "私は東京に住んでいます", "हिन्दी 한국어")
    for words in ("eleve", "NAÏVE", "strasse", "STRASSE", "fine"):
        assert hits_of(library, words) == [(name, 1)], words
    for words in ("東京", "京に住", "私"):
        assert hits_of(library, words) == [(name, 2)], words
    assert hits_of(library, "한국어 हिन्दी") == [(name, 3)]
    assert hits_of(library, "京東") == []


ODD = [
    'fox"', "fox AND", "NOT fox", "fox OR", "(fox", "fox)", "fox:*", "words:fox", "fox^2",
    "NEAR(fox, 2)", "fox & !", "fox' --", "{fox}", "-fox", "+fox", "fox\\", "fox\0", "*fox",
    "fox " * 500, "\ud800fox", "fox|", "'fox'", ";DROP TABLE nodes; fox",
]  # fmt: skip


def test_find_accepts_any_punctuation(library: Library) -> None:
    name = keep(library, "fox", "near fox 2 and not or words fox drop table nodes fox")
    for words in ODD:
        assert (name, 1) in hits_of(library, words), words
    for words in ("", '"', "<->", "\0", "*"):
        with pytest.raises(ConfigError, match="no word"):
            library.find(words)


def test_find_text_restored_by_undo(library: Library) -> None:
    lm = load("tiny")
    loom = Loom(lm, "x")
    loom.add("a fox")
    kept = library.create(loom)
    kept.loom.children[0].text = "a dog"
    kept.commit("edit")
    assert (hits_of(library, "fox"), hits_of(library, "dog")) == ([], [(kept.name, 1)])
    kept.undo()
    assert (hits_of(library, "fox"), hits_of(library, "dog")) == ([(kept.name, 1)], [])
    kept.redo()
    assert (hits_of(library, "fox"), hits_of(library, "dog")) == ([], [(kept.name, 1)])
    lm.close()


def test_find_skips_removed_nodes_until_restored(library: Library) -> None:
    kept = library.create(Loom(None, "x"))
    kept.loom.add("unicorn")
    kept.commit("add")
    assert hits_of(library, "unicorn") == [(kept.name, 1)]
    kept.loom.children[0].remove()
    kept.commit("remove")
    assert hits_of(library, "unicorn") == []
    kept.undo()
    assert hits_of(library, "unicorn") == [(kept.name, 1)]
    library.remove(kept.name)
    assert hits_of(library, "unicorn") == []
    library.restore()
    assert hits_of(library, "unicorn") == [(kept.name, 1)]


def test_find_in_long_text_searches_its_start(
    library: Library,
) -> None:
    text = " ".join(f"w{at}" for at in range(100_000))
    kept = library.create(Loom(None, "long " + text))
    assert library.open(kept.name).loom.text == "long " + text
    assert hits_of(library, "w5000") == [(kept.name, 0)]
    assert hits_of(library, "w99999") == []
    one_word = library.create(Loom(None, "y" * 1_500_000))
    assert library.open(one_word.name).loom.text == "y" * 1_500_000


def test_find_ignores_the_chat_template(
    library: Library,
) -> None:
    with load("tiny") as tiny:
        name = library.create(Loom(tiny, "Tell me a story about a fox.")).name
        library.create(Loom(tiny, "and so on " * 400 + "at last a walrus"))
    (hit,) = library.find("fox")
    assert (hit.loom, hit.snippet) == (name, "Tell me a story about a fox.")
    assert [hit.snippet[start:end] for start, end in hit.marks] == ["fox"]
    assert hits_of(library, "assistant") == []
    (hit,) = library.find("walrus")
    assert hit.snippet.startswith("…")
    assert "a walrus" in hit.snippet
