"""The checker of names and prose in `tools/prose.py`."""

import subprocess
from pathlib import Path

import pytest

from tools import prose

CODE = '''"""Where a node is told of."""

def find(node):
    """Return the node."""
    raise KeyError("nobody has asked for it")

class Place:
    @classmethod
    def of(cls, held_nodes):
        for each in held_nodes:
            cls.count = each  # each node is held
'''


def rules_of(every: list[prose.Breach]) -> list[tuple[str, int]]:
    return sorted((breach.rule, breach.line) for breach in every)


@pytest.fixture
def code(tmp_path: Path) -> Path:
    path = tmp_path / "place.py"
    path.write_text(CODE)
    return path


def test_python_file_lists_names_words_and_openings(code: Path) -> None:
    assert rules_of(list(prose.breaches_in_python(code))) == [
        *[("names", 9), ("names", 9), ("names", 10)],
        ("openings", 1),
        *[("words", 1), ("words", 5), ("words", 5), ("words", 11)],
    ]


def test_strings_of_training_texts_are_not_checked_and_docstrings_are(tmp_path: Path) -> None:
    path = tmp_path / "recipe" / "corpus" / "stories.py"
    path.parent.mkdir(parents=True)
    path.write_text('"""Stories that nobody told."""\n\nSTORY = "She said nothing."\n')
    assert rules_of(list(prose.breaches_in_python(path))) == [("words", 1), ("words", 1)]


def test_integer_and_prompt_phrases_are_allowed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Tell me about a whole number of whole tokens.\n")
    (breach,) = prose.breaches_in_page(page)
    assert breach.text.startswith("whole: ")


def test_module_name_is_checked_like_an_identifier(code: Path) -> None:
    renamed = code.rename(code.with_name("told_nodes.py"))
    named = [b.text for b in prose.breaches_in_python(renamed) if b.line == 1 and b.rule == "names"]
    assert named == ["told_nodes"]


@pytest.mark.parametrize(("n_words", "n_breaches"), [(25, 0), (26, 1)])
def test_sentence_of_26_words_is_too_long(tmp_path: Path, n_words: int, n_breaches: int) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Title\n\nShort. {'word ' * n_words}\n\n- item\n- item\n")
    assert len(list(prose.breaches_in_page(page))) == n_breaches


def test_code_blocks_and_tables_of_a_page_are_not_prose(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("```\nwho told nobody\n```\n\n| told | nobody |\n\n`told` is told.\n")
    assert rules_of(list(prose.breaches_in_page(page))) == [("words", 7)]


def test_banned_word_after_a_negation_is_allowed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("The file was not found. It found a file.\n")
    assert [breach.text[:6] for breach in prose.breaches_in_page(page)] == ["found:"]


def test_increases_lists_higher_counts_and_unknown_packages() -> None:
    recorded = {"a": {"names": 2, "words": 1}}
    counts = {"a": {"names": 1, "words": 2}, "b": {"names": 0, "words": 3}}
    assert prose.increases(counts, recorded) == [("a", "words"), ("b", "words")]


def test_subject_of_73_characters_after_the_recorded_commit_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def git(*args: str) -> str:
        author = ("-c", "user.name=a", "-c", "user.email=a@example.org")
        command = ["git", *author, *args]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    git("init", "--quiet")
    git("commit", "--allow-empty", "--message", "a" * 80)
    since = git("rev-parse", "HEAD")
    git("commit", "--allow-empty", "--message", "b" * 72)
    git("commit", "--allow-empty", "--message", "c" * 73)
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    assert [subject.partition(" ")[2] for subject in prose.long_subjects(since)] == ["c" * 73]


def test_public_name_with_a_banned_word_is_allowed_in_its_file(tmp_path: Path) -> None:
    path = tmp_path / "src" / "weft" / "errors.py"
    path.parent.mkdir(parents=True)
    path.write_text("class NotFound: ...\nclass Found: ...\n")
    assert [breach.text for breach in prose.breaches_in_python(path)] == ["Found"]


TYPESCRIPT = """/** What a node has. */
interface Node { heldTokens: number[] }

/**
 * Return the node that was asked for. %s
 */
export function find(tree: Tree, wanted: RegExp): Node {
  const found = tree.found.filter((each) => /['"]told/.test(each.text))
  for (const each of found) this.made = `nobody has ${each.told} it`
  return found[0] // with its letters
}
"""


def test_typescript_file_lists_names_words_openings_and_sentences(tmp_path: Path) -> None:
    path = tmp_path / "find.ts"
    path.write_text(TYPESCRIPT % ("word " * 26))
    every = list(prose.breaches_in_typescript(path))
    assert rules_of(every) == [
        *[("names", 2), ("names", 8), ("names", 9), ("names", 9), ("names", 9), ("names", 10)],
        ("openings", 1),
        ("sentences", 5),
        *[("words", 5), ("words", 9), ("words", 10)],
    ]
    names = [breach.text for breach in every if breach.rule == "names"]
    assert names == ["heldTokens", "found", "found", "made", "found", "each outside a callback"]


def test_typescript_and_page_sources_are_listed_without_the_generated_schema() -> None:
    names = {path.name for path in prose.sources()}
    assert {"client.ts", "App.tsx", "test_prose.py"} & names == {"client.ts", "App.tsx"}
    assert "schema.d.ts" not in names
