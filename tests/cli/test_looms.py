"""Looms and node numbers persist from one command to the next."""

from __future__ import annotations

import json
import re
import shutil
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from cli.conftest import library, loom_of, names
from weft import Loom, samples

SHORT = ("--max-tokens", "8", "--seed", "1")
NAME = "tell-story-about-fox"


@pytest.fixture
def grown(weft, home: Path, shelves) -> None:
    """A loom with three short branches of a story."""
    shelves(home, "three", lambda: weft("run", samples.story, "-n", "3", *SHORT))


def output_of(result) -> dict:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def numbers(weft) -> dict[int, int | None]:
    """Return the parents of nodes by number."""
    return {each["node"]: each["parent"] for each in output_of(weft("tree", "--json"))["nodes"]}


def test_loom_of_run_is_saved_with_prompt_branches_and_model(weft, grown) -> None:
    loom = loom_of(NAME)
    assert loom.user_prompt == samples.story
    assert len(loom.children) == 3
    assert loom.meta["model"] == "tiny"


def test_run_without_keeping_leaves_nothing(weft, home: Path) -> None:
    shutil.rmtree(home)
    for flag in ("--no-log", "--no-keep"):
        result = output_of(weft("run", samples.sum, "-n", "1", flag, "--json", *SHORT))
        assert result["loom"] is None
        assert not home.exists()


def test_grow_takes_a_number_of_the_last_tree(weft, grown) -> None:
    third = output_of(weft("tree", "--json"))["nodes"][3]
    growth = output_of(weft("grow", "3", "-n", "2", "--json", *SHORT))
    assert [each["node"] for each in growth["branches"]] == [4, 5]
    after = output_of(weft("tree", "--json"))["nodes"]
    assert [each["parent"] for each in after if each["node"] in (4, 5)] == [3, 3]
    assert next(each for each in after if each["node"] == 3)["id"] == third["id"]


def test_node_numbers_do_not_change(weft, grown) -> None:
    weft("grow", "1", "-n", "2", *SHORT)
    weft("grow", "0", "-n", "1", *SHORT)
    expected = {0: None, 1: 0, 2: 0, 3: 0, 4: 1, 5: 1, 6: 0}
    assert numbers(weft) == expected
    weft("rm", "4")
    del expected[4]
    assert numbers(weft) == expected
    weft("grow", "5", "-n", "1", *SHORT)
    assert numbers(weft) == {**expected, 7: 5}


def test_each_loom_has_its_own_node_numbers(weft, grown) -> None:
    weft("run", samples.sum, "-n", "1", *SHORT)
    assert numbers(weft) == {0: None, 1: 0}
    weft("tree", NAME)
    assert numbers(weft) == {0: None, 1: 0, 2: 0, 3: 0}


def test_grow_uses_the_sampling_of_the_node_but_another_seed(weft) -> None:
    step = ("--stop", r"\n", "--temp", "0.7", "--max-tokens", "30", "--seed", "1")
    weft("run", samples.game24, "-n", "1", *step)
    params = output_of(weft("grow", "1", "-n", "1", "--json"))["params"]
    assert (params["stop"], params["temperature"], params["max_tokens"]) == (["\n"], 0.7, 30)
    assert params["seed"] != 1
    params = output_of(weft("grow", "1", "-n", "1", "--temp", "0.2", "--json"))["params"]
    assert params["temperature"] == 0.2


def test_grow_after_a_greedy_node_samples_at_the_models_temperature(weft) -> None:
    weft("run", samples.story, "-n", "1", "--temp", "0", "--top-k", "7", "--max-tokens", "4")
    params = output_of(weft("grow", "1", "-n", "3", "--json", "--max-tokens", "4"))["params"]
    assert (params["temperature"], params["top_k"]) == (1.0, 7)
    params = output_of(weft("grow", "1", "-n", "1", "--temp", "0", "--json"))["params"]
    assert params["temperature"] == 0.0


@pytest.mark.fluent
def test_grow_draws_the_tree_with_equal_and_empty_branches_once(weft) -> None:
    weft("run", samples.sum, "-n", "1", "--temp", "0")
    assert weft("grow", "1").exit_code == 1
    drawn = weft(
        "grow", "1", "-n", "3", "--force", "--temp", "0", "--max-tokens", "1", "--tree"
    ).stdout
    assert "2 3 4  " in drawn
    assert "×3" in drawn


@pytest.mark.fluent
def test_grow_with_text_adds_a_chat_turn(weft) -> None:
    weft("run", samples.greeting, "-n", "1", "--seed", "1")
    growth = output_of(weft("grow", "1", samples.sum, "-n", "1", "--seed", "1", "--json"))
    assert "95" in growth["branches"][0]["text"]
    turn = output_of(weft("tree", "--json"))["nodes"][2]
    assert turn["said"] == samples.sum
    assert turn["text"] == f"<|end|><|user|>{samples.sum}<|end|><|assistant|>"
    assert f"> {samples.sum}" in weft("tree").stdout


def test_grow_raw_adds_the_text_unchanged(weft, grown) -> None:
    weft("grow", "2", " And", "--raw", "-n", "1", *SHORT)
    added = output_of(weft("tree", "--json"))["nodes"]
    assert [each["text"] for each in added if each["parent"] == 2] == [" And"]


def test_run_c_continues_what_was_read_last(weft, grown) -> None:
    weft("read", "2")
    result = weft("run", "-c", "-n", "2", *SHORT)
    assert "continuing node 2" in result.stderr
    assert {node for node, parent in numbers(weft).items() if parent == 2} == {4, 5}


@pytest.mark.fluent
def test_run_c_with_a_prompt_answers_it(weft, grown) -> None:
    weft("read", "1")
    growth = output_of(weft("run", "-c", samples.sum, "-n", "1", "--max-tokens", "30", "--json"))
    assert "95" in growth["branches"][0]["text"]


def test_tree_shows_numbers_and_shared_tokens(weft, grown) -> None:
    result = weft("tree")
    assert result.exit_code == 0
    assert samples.story in result.stdout.splitlines()[0]
    assert "└── 3  " in result.stdout
    assert "3 nodes, 3 paths · 36 tokens (60 unshared) · tiny" in result.stdout
    assert "next: weft grow" in result.stderr


def test_read_writes_the_path_as_one_text(weft) -> None:
    weft("run", "Once upon", "--raw", "-n", "1", *SHORT)
    weft("grow", "1", "-n", "1", *SHORT)
    path = output_of(weft("read", "2", "--json"))
    assert len(path["path"]) == 3
    assert f"Once upon{path['text']}\n" in weft("read", "2").stdout


def test_read_counts_the_tokens_that_the_tree_shows(weft, chat_file: Path) -> None:
    weft("import", str(chat_file), "-m", "tiny")
    drawn = re.findall(r" (\d)  .*?  (\d+) tok", weft("tree").stdout)
    assert len(drawn) == 4
    for number, n_tokens in drawn:
        assert f"node {number} of fox · {n_tokens} tokens" in weft("read", number).stderr


def test_color_without_colours_writes_values_in_braces(weft) -> None:
    result = weft("run", samples.story, "-n", "1", "--color", "prob", *SHORT)
    assert "in braces: p below 0.5" in result.stdout
    assert "{0." in result.stdout
    assert "{" in weft("read", "1", "--color", "entropy").stdout


def test_next_is_the_models_own_distribution(weft, grown) -> None:
    candidates = output_of(weft("next", "0", "--json"))["next"]
    assert len(candidates) == 10
    assert [each["rank"] for each in candidates] == list(range(10))
    assert candidates == sorted(candidates, key=lambda each: -each["p"])
    shown = weft("next", "0", "--top", "3").stdout
    assert shown.count("█ \n") + shown.count("█\n") >= 1
    assert "raw probabilities" in shown
    assert repr(candidates[0]["text"]) in shown


def test_ls_lists_the_last_changed_first_and_marks_the_last_drawn(weft, grown) -> None:
    weft("run", samples.sum, "-n", "1")
    weft("tree", NAME)
    lines = weft("ls").stdout.splitlines()
    assert lines[0].startswith("  what-37-58 ")
    assert lines[1].startswith(f"* {NAME} ")
    listed = output_of(weft("ls", "--json"))
    assert [row["nodes"] for row in listed["looms"]] == [2, 4]
    assert listed["last"] == NAME
    for row in listed["looms"]:
        created, changed = (datetime.fromisoformat(row[name]) for name in ("created", "changed"))
        assert timedelta(0) <= changed - created < timedelta(minutes=5)


def test_ls_without_looms_suggests_run(weft) -> None:
    assert "no loom yet" in weft("ls").stdout


def test_rm_of_a_loom_can_be_undone_once(weft, grown) -> None:
    assert weft("rm", NAME).stdout == f"removed {NAME}\n"
    assert names() == []
    assert weft("rm", "--undo").stdout == f"restored {NAME}\n"
    assert numbers(weft) == {0: None, 1: 0, 2: 0, 3: 0}
    assert weft("rm", "--undo").exit_code == 1


def test_rm_of_nodes_removes_descendants_and_undo_restores(weft, grown) -> None:
    weft("grow", "1", "-n", "2", *SHORT)
    assert weft("rm", "1", "4", "3").stdout == "removed node 1 and 2 below it, node 3\n"
    assert numbers(weft) == {0: None, 2: 0}
    growth = output_of(weft("grow", "2", "-n", "1", "--json", *SHORT))
    back = f"undid remove in {NAME}: 4 nodes back (1, 3-5)\n"
    assert weft("rm", "--undo").stdout == back
    assert numbers(weft) == {0: None, 1: 0, 2: 0, 3: 0, 4: 1, 5: 1, 6: 2}
    after = output_of(weft("tree", "--json"))["nodes"]
    assert [each["node"] for each in after] == [0, 1, 4, 5, 2, 6, 3]
    assert after[5]["text"] == growth["branches"][0]["text"]
    assert names() == [NAME]
    assert weft("grow", "4", "-n", "1", *SHORT).exit_code == 0
    assert weft("rm", "--undo").exit_code == 1


def test_ls_lists_names_and_titles(weft, home: Path) -> None:
    with library() as opened:
        opened.create(Loom(None, "A fox."), title="My story: part two!")
    assert "My story: part two!" in weft("ls").stdout
    (row,) = output_of(weft("ls", "--json"))["looms"]
    assert (row["name"], row["title"]) == ("story-part-two", "My story: part two!")


def test_restored_loom_with_taken_name_is_renamed(weft, grown) -> None:
    weft("rm", NAME)
    weft("run", samples.story, "-n", "1", *SHORT)
    result = weft("rm", "--undo")
    assert result.stdout == f"restored {NAME}.2\n"
    assert f"another loom is named {NAME} now" in result.stderr
    assert sorted(names()) == [NAME, f"{NAME}.2"]


def test_restored_loom_keeps_an_unusual_name(weft, grown) -> None:
    with library() as store:
        store.rename(NAME, "My Loom.v1")
    weft("rm", "My Loom.v1")
    assert weft("rm", "--undo").stdout == "restored My Loom.v1\n"


def test_tree_of_a_file_imports_it(weft, lm_file: Path, home: Path) -> None:
    result = weft("tree", str(lm_file))
    assert result.exit_code == 0
    assert f"imported {lm_file} as mine; use --loom mine from now on" in result.stderr
    assert names() == ["mine"]
    assert weft("grow", "1", "-n", "1", *SHORT).exit_code == 0


def test_import_of_a_prompt_counts_no_nodes(weft, tmp_path: Path) -> None:
    file = tmp_path / "fox.txt"
    file.write_text("A fox.")
    result = weft("import", str(file))
    assert result.stdout == (
        "imported 1 loom (a prompt without continuations) from fox.txt (text): fox\n"
    )
    assert "the texts have no tokens and cannot be grown" in result.stderr
    assert result.stderr.endswith("next: weft tree\n")


def test_import_of_a_chat_suggests_its_selected_message(weft, chat_file: Path) -> None:
    result = weft("import", str(chat_file), "-m", "tiny")
    assert result.stdout.splitlines() == [
        "imported 1 loom, 4 nodes from fox.jsonl (sillytavern): fox"
    ]
    assert result.stderr.endswith('next: weft tree\n      weft grow 3 "…"\n')
    assert weft("grow", "3", "Why?", "-n", "1", *SHORT).exit_code == 0
    chat_file.write_text("".join(chat_file.read_text().splitlines(keepends=True)[:3]))
    result = weft("import", str(chat_file), "--name", "cut", "-m", "tiny")
    assert result.stderr.endswith("next: weft tree\n      weft grow 2\n")


@pytest.fixture
def chat_file(tmp_path: Path) -> Path:
    """A chat of SillyTavern: a greeting, a question, and an answer with a swipe."""
    lines = [
        {"user_name": "You", "character_name": "Fox", "chat_metadata": {}},
        {"name": "Fox", "is_user": False, "mes": "Hello, I am a fox."},
        {"name": "You", "is_user": True, "mes": "Tell me a story."},
        {"name": "Fox", "is_user": False, "mes": "No.", "swipes": ["No.", "Yes."], "swipe_id": 0},
    ]
    file = tmp_path / "fox.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.fixture
def lm_file(tmp_path: Path) -> Path:
    """A loom saved by the library."""
    import weft as package

    file = tmp_path / "mine.loom.json"
    with package.load("tiny") as lm, Loom(lm, samples.game24) as loom:
        loom.grow(2, max_tokens=4, seed=1)
        loom.save(file)
    return file


@pytest.mark.fluent
def test_solved_puzzle_is_saved_with_its_scores(weft) -> None:
    solution = output_of(
        weft("solve", samples.game24, "-b", "2", "-n", "3", "--seed", "1", "--json")
    )
    tree = output_of(weft("tree", "--json"))
    assert tree["loom"] == solution["loom"]
    assert len(tree["nodes"]) == solution["nodes"]
    assert any(each["score"] is not None for each in tree["nodes"])
    assert output_of(weft("read", "--json"))["path"][-1]["text"] == solution["path"][-1]["text"]


def test_gguf_model_of_a_saved_loom_takes_a_fitting_engine(weft) -> None:
    from shallow import shallow_gguf

    assert weft("run", "Hi", "--engine", "numpy", *SHORT).exit_code == 0
    explicit = weft("grow", "1", "-m", str(shallow_gguf()), "--engine", "mlx")
    assert explicit.exit_code == 3
    assert "is a GGUF file, for llamacpp or numpy or torch" in explicit.stderr
    chosen = weft("grow", "1", "-m", str(shallow_gguf()))
    assert "mlx" not in chosen.stderr  # the weights are other ones, so it fails for another reason
    assert chosen.exit_code == 1
    assert weft("grow", "1", "--max-tokens", "2").exit_code == 0  # the loom is as it was


@pytest.mark.fluent
def test_engine_failure_keeps_branches_that_have_ended(weft, monkeypatch) -> None:
    from weft.engines.numpy import NumpyEngine
    from weft.errors import ForwardError

    real, calls = NumpyEngine.forward, []

    def fails(self, rows):
        calls.append(rows)
        if len(calls) > 6 and len(rows) == 1:  # the other branch has ended
            raise ForwardError("the machine is on fire")
        return real(self, rows)

    monkeypatch.setattr(NumpyEngine, "forward", fails)
    broken = weft("run", "Tell me a story about a fox.", "-n", "2", "--seed", "1")
    assert broken.exit_code == 1
    assert "on fire" in broken.stderr
    assert "the branches that had ended are saved as" in broken.stderr
    monkeypatch.setattr(NumpyEngine, "forward", real)
    assert weft("read", "1").stdout.strip()
    assert weft("grow", "0", "--max-tokens", "2").exit_code == 0
