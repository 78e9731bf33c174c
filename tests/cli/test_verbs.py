"""Results and output of each verb."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import weft as weft_package
from shallow import shallow
from weft import samples
from weft._core.installation import install_hint
from weft.search import STRATEGIES
from weft.viz.terminal import WIDTH


def test_run_shows_every_branch_then_the_tree_and_the_savings(weft) -> None:
    result = weft("run", samples.sum, "-n", "3", "--seed", "1", "--max-tokens", "40", "--tree")
    assert result.exit_code == 0
    for number in (1, 2, 3):
        assert f"[{number}] " in result.stdout
    assert f"\n{samples.sum}\n" in result.stdout
    assert "prefilled" in result.stdout
    assert "saved as what-37-58" in result.stdout
    assert "next: weft grow" in result.stderr


def test_run_names_engine_and_sampling_once_in_its_last_line(weft) -> None:
    sampled = ("--temperature", "0.5", "--top-k", "5", "--max-tokens", "2", "--engine", "numpy")
    result = weft("run", samples.sum, "-n", "2", "--tree", *sampled)
    assert result.stdout.count("numpy: temperature 0.5, top-k 5") == 1
    assert "numpy: temperature 0.5, top-k 5" in result.stdout.splitlines()[-1]
    piped = weft("run", samples.sum, "-n", "1", "--temp", "0", *sampled[4:])
    assert "numpy: greedy" in piped.stderr
    assert "greedy" not in piped.stdout


@pytest.mark.fluent
def test_run_draws_equal_branches_once(weft) -> None:
    result = weft("run", samples.sum, "-n", "3", "--temperature", "0", "--tree")
    assert "1 2 3  37 + 58 = 95." in result.stdout
    assert "×3" in result.stdout
    assert "all branches are equal" in result.stderr


def test_piped_output_of_run_is_only_the_text(weft) -> None:
    few = ("--max-tokens", "16", "--seed", "1")
    branches = json.loads(weft("run", samples.sum, "-n", "3", "--json", *few).stdout)["branches"]
    for flags in ((), ("--text",)):
        result = weft("run", samples.sum, "-n", "1", *few, *flags)
        assert result.stdout == branches[0]["text"].rstrip("\n") + "\n"
        assert "prefilled" in result.stderr
        assert "saved as what-37-58" in result.stderr
    several = weft("run", samples.sum, "-n", "3", *few).stdout
    assert several.split("---\n") == [each["text"].rstrip("\n") + "\n" for each in branches]
    grown = weft("grow", "0", "-n", "1", *few, "--seed", "2")
    assert "[" not in grown.stdout
    assert weft("read").stdout.startswith(f"{samples.sum}\n\n{grown.stdout}")


@pytest.mark.fluent
def test_empty_answer_is_an_empty_line(weft) -> None:
    weft("run", samples.sum, "-n", "1", "--temp", "0")
    command = ("grow", "1", "-n", "3", "--force", "--temp", "0", "--max-tokens", "1")
    assert weft(*command).stdout == "\n---\n\n---\n\n"


@pytest.mark.parametrize("other", ["--json", "-i", "--color=prob"])
def test_text_flag_excludes_json_keys_and_colours(weft, other: str) -> None:
    result = weft("run", samples.sum, "--text", other)
    assert result.exit_code == 2
    assert "--text and --" in (result.stderr)


@pytest.mark.fluent
def test_unquoted_words_become_one_prompt_with_a_hint(weft) -> None:
    result = weft("run", *samples.sum.split(), "-n", "1", "--max-tokens", "2", "--json")
    assert json.loads(result.stdout)["prompt"] == samples.sum
    assert result.stderr.splitlines() == [
        f'hint: taken as one text; quotes keep it as it is: weft run "{samples.sum}"'
    ]
    result = weft("grow", "1", "and", "so", "--raw", "-n", "1", "--max-tokens", "2")
    assert 'weft grow 1 "and so"' in result.stderr
    assert json.loads(weft("tree", "--json").stdout)["nodes"][2]["text"] == "and so"
    few = ("-n", "1", "--max-tokens", "2")
    result = weft("grow", "1", *few, "--", "--and", "so")
    assert 'weft grow 1 -- "--and so"' in result.stderr
    solved = weft("solve", *samples.sum.split(), "--strategy", "greedy")
    assert f'weft solve "{samples.sum}"' in solved.stderr
    assert "95" in solved.stdout


def test_run_json_is_one_object_with_every_branch(weft) -> None:
    result = weft("run", samples.story, "-n", "3", "--max-tokens", "8", "--seed", "5", "--json")
    growth = json.loads(result.stdout)
    assert [branch["branch"] for branch in growth["branches"]] == [1, 2, 3]
    assert growth["params"]["max_tokens"] == 8
    assert growth["params"]["seed"] == 5
    assert growth["stats"]["decoded"] == 24
    for branch in growth["branches"]:
        assert len(branch["token_ids"]) == len(branch["logprobs"]) == 8
        assert branch["finish_reason"] == "length"
        assert branch["text"]


def test_run_with_seed_is_reproducible(weft) -> None:
    arguments = ("run", samples.story, "-n", "2", "--max-tokens", "12", "--seed", "7", "--json")
    first, second = (json.loads(weft(*arguments).stdout)["branches"] for _ in range(2))
    for branch in (*first, *second):
        del branch["id"]
    assert first == second


@pytest.mark.fluent
def test_run_stops_at_each_stop_string(weft) -> None:
    result = weft(
        "run", samples.game24, "-n", "1", "--stop", "(left", "--stop", "\n", "--seed", "1", "--json"
    )
    (branch,) = json.loads(result.stdout)["branches"]
    assert branch["stop_string"] == "(left"
    assert branch["text"].endswith("(left")


def test_run_raw_continues_the_text_and_chat_asks_it(weft) -> None:
    options = ("-n", "1", "--max-tokens", "2", "--json")
    raw = json.loads(weft("run", "Once upon", "--raw", *options).stdout)
    chat = json.loads(weft("run", "Once upon", "--chat", *options).stdout)
    assert (raw["chat_template_used"], chat["chat_template_used"]) == (False, True)
    assert raw["prompt_tokens"] < chat["prompt_tokens"]


def test_run_takes_a_system_message(weft) -> None:
    options = ("-n", "1", "--max-tokens", "2", "--json")
    plain = json.loads(weft("run", "Hi", *options).stdout)
    with_system = json.loads(weft("run", "Hi", "-s", "Be brief.", *options).stdout)
    assert with_system["prompt_tokens"] > plain["prompt_tokens"]


def test_piped_text_is_appended_to_the_prompt(weft) -> None:
    options = ("-n", "1", "--max-tokens", "2", "--json")
    both = json.loads(weft("run", "Read this:", *options, stdin="a story\n").stdout)
    alone = json.loads(weft("run", *options, stdin="a story\n").stdout)
    assert both["prompt"] == "Read this:\n\na story"
    assert alone["prompt"] == "a story"


@pytest.mark.fluent
def test_solve_by_tree_of_thoughts_shows_path_answer_and_cost(weft) -> None:
    result = weft("solve", samples.game24, "-b", "2", "-n", "3", "--seed", "1", "--tree")
    assert result.exit_code == 0
    assert "= 24  ✓ checked: right" in result.stdout
    assert "tree of thoughts · " in result.stdout
    assert "└── " in result.stdout
    assert "next: weft solve" in result.stderr


@pytest.mark.fluent
def test_piped_output_of_solve_is_only_the_text(weft) -> None:
    greedy = ("--strategy", "greedy")
    expected = json.loads(weft("solve", samples.sum, *greedy, "--json").stdout)
    for flags in ((), ("--text",)):
        result = weft("solve", samples.sum, *greedy, *flags)
        assert result.stdout == expected["text"] + "\n"
        assert "greedy · " in result.stderr
        assert "saved as what-37-58" in result.stderr
    assert "└── " in weft("solve", samples.sum, *greedy, "--tree").stdout
    both = weft("solve", samples.game24, "--text", "--json")
    assert both.exit_code == 2
    assert "--text and --json exclude each other" in both.stderr


@pytest.mark.fluent
def test_solve_of_a_prompt_without_a_task_votes_and_writes_its_cost_first(weft) -> None:
    result = weft("solve", samples.sum, "-n", "3", "--seed", "1", "--tree")
    assert result.stderr.startswith("best of n: at most 768 tokens (3 answers of up to 256)\n")
    assert "best of n · " in result.stdout
    assert "--strategy tot" not in result.stderr
    wide = weft("solve", samples.sum, "-b", "1", "-n", "1", "--budget-tokens", "100", "--seed", "1")
    assert wide.stderr.startswith("tree of thoughts: at most 100 tokens (the budget; 16 lines")
    known = weft("solve", samples.game24, "--budget-tokens", "60", "--seed", "1")
    assert known.stderr.startswith("tree of thoughts: at most 60 tokens")


@pytest.mark.programs
def test_hints_for_another_model_name_that_model(weft) -> None:
    model = ("-m", str(shallow()))
    few = ("--seed", "1", "-n", "2")
    ran = weft("run", samples.greeting, *few, "--max-tokens", "4", "--no-keep", *model).stderr
    solved = weft("solve", samples.greeting, *few, *model).stderr
    long = weft("run", "word " * 40, *few, "--max-tokens", "4", "--no-keep", *model).stderr
    for stderr in (ran, solved, long):
        hints = stderr[stderr.index("next: ") :]
        assert str(shallow()) in hints
        for other in ("--temperature", "make 24", samples.story, "--strategy tot"):
            assert other not in hints


def test_solve_without_a_check_prints_once_that_the_answer_is_not_verified(weft) -> None:
    few = ("--strategy", "greedy", "--budget-tokens", "2")
    note = "not verified: give the right answer with --check, as a regular expression"
    for numbers in ("4 9 10 13", "4, 9, 10, 13"):
        bare = weft("solve", numbers, *few).stderr
        assert bare.count(note) == 1
        assert 'like this: weft solve "Use 4 9 10 13 to make 24."' in bare
    assert (other := weft("solve", samples.sum, *few).stderr).count(note) == 1
    assert "Game of 24" not in other
    drawn = weft("solve", samples.sum, *few, "--tree")
    assert (drawn.stdout.count(note), "verified" in drawn.stderr) == (1, False)
    assert "verified" not in weft("solve", samples.sum, *few, "--check", "95").stderr
    assert note not in weft("solve", samples.game24, *few).stderr
    assert weft("solve", samples.sum, *few, "--json").stderr == ""


def test_grow_sets_shows_and_removes_the_author_s_note(weft) -> None:
    few = ("-n", "1", "--max-tokens", "2")
    weft("run", samples.story, *few)
    noted = weft("grow", "0", *few, "--note", "[Be sad.]", "--note-depth", "1")
    assert "author's note at depth 1: [Be sad.]" in noted.stderr
    assert "author's note at depth 1: [Be sad.]" in weft("tree").stdout
    assert "depth 2: [Be sad.]" in weft("grow", "0", *few, "--note-depth", "2").stderr
    assert "[Be sad.]" not in weft("read", "1").stdout
    assert "note" not in weft("grow", "0", *few, "--note", "").stderr
    assert "note" not in weft("tree").stdout
    wrong = weft("grow", "0", *few, "--note-depth", "1")
    assert wrong.exit_code == 2
    assert "--note-depth needs a note" in wrong.stderr


def test_tree_sorts_siblings(weft) -> None:
    weft("run", samples.story, "-n", "6", "--max-tokens", "3", "--seed", "1")
    nodes = json.loads(weft("tree", "--json").stdout)["nodes"]
    by_p = json.loads(weft("tree", "--json", "--sort", "probability").stdout)["nodes"]
    expected = sorted(nodes[1:], key=lambda node: -node["mean_logprob"])
    assert expected != nodes[1:]
    assert [node["node"] for node in by_p[1:]] == [node["node"] for node in expected]
    drawn = weft("tree", "--sort", "probability").stdout
    places = [drawn.index(f"─ {node['node']}  ") for node in expected]
    assert places == sorted(places)
    wrong = weft("tree", "--sort", "age")
    assert wrong.exit_code == 2
    assert "probability" in wrong.stderr


def test_solve_reads_and_checks_answers_and_prints_the_reason(weft) -> None:
    few = ("-n", "2", "--seed", "1", "--budget-tokens", "16", "--answer", "(?s).+")
    right = weft("solve", samples.sum, *few, "--check", "(?s).*", "--tree")
    assert "✓ checked: right" in right.stdout
    assert "chosen because" in right.stdout
    assert "not checked" not in right.stderr
    wrong = weft("solve", samples.sum, *few, "--check", "x", "--tree").stdout
    assert "not a right answer" in wrong
    text = weft("solve", samples.sum, *few, "--judge", "Is {text} right?", "--text")
    assert "chosen because" in text.stderr
    assert "chosen because" not in text.stdout
    report = json.loads(weft("solve", samples.sum, *few, "--json").stdout)
    assert report["reason"]
    assert report["measure"] in ("share of votes", "mean log-probability")
    assert report["answers"][0]["answer"]
    rejected = weft("solve", samples.sum, *few, "--judge", "Right?")
    assert rejected.exit_code == 2
    assert "{text} or {answer}" in rejected.stderr


def test_solve_max_tokens_limits_each_answer(weft) -> None:
    few = ("-n", "2", "--max-tokens", "3", "--seed", "1")
    report = json.loads(weft("solve", samples.sum, *few, "--json").stdout)
    assert report["cost"]["tokens"] == 2 * 3
    assert "at most 6 tokens (2 answers of up to 3)" in weft("solve", samples.sum, *few).stderr


@pytest.mark.fluent
def test_solve_json_has_the_path_with_scores(weft) -> None:
    result = weft("solve", samples.game24, "-b", "1", "-n", "2", "--seed", "2", "--json")
    solution = json.loads(result.stdout)
    assert solution["strategy"] == "tot"
    assert solution["solved"] in (True, False)
    assert solution["path"]
    assert all(isinstance(step["score"], float) for step in solution["path"])
    assert solution["cost"]["tokens"] > 0
    assert solution["answer"] in solution["text"]


# One that is as its function, one with what is fixed, one with other names for its numbers, one
# without numbers: the command reads all rows of the table alike.
FEW = ("greedy",)
BY_ROW = [
    name if name in FEW else pytest.param(name, marks=pytest.mark.programs) for name in STRATEGIES
]


@pytest.mark.fluent
@pytest.mark.parametrize("strategy", BY_ROW)
def test_solve_without_options_equals_the_librarys_search(weft, strategy: str) -> None:
    chosen = ("--strategy", strategy, "--seed", "1", "--json")
    chosen += ("--budget-tokens", "150")
    solution = json.loads(weft("solve", samples.game24, *chosen).stdout)
    row = STRATEGIES[strategy]
    search = getattr(weft_package.search, row.call)
    with weft_package.load("tiny") as lm:
        expected = search(lm, samples.game24, seed=1, budget_tokens=150, **row.fixed)
    assert solution["text"] == expected.text
    assert solution["cost"]["tokens"] == expected.cost.tokens
    assert solution["cost"]["candidates"] == expected.cost.candidates


@pytest.mark.fluent
def test_solve_best_of_n_counts_votes(weft) -> None:
    result = weft(
        "solve", samples.sum, "--strategy", "best-of-n", "-n", "5", "--seed", "1", "--json"
    )
    solution = json.loads(result.stdout)
    assert solution["votes"][0] == {"answer": "95", "count": 5}
    assert solution["answer"].endswith("95.")


@pytest.mark.fluent
def test_solve_greedy_is_one_answer(weft) -> None:
    solution = json.loads(weft("solve", samples.sum, "--strategy", "greedy", "--json").stdout)
    assert solution["nodes"] == 2
    assert "95" in solution["answer"]


@pytest.mark.fluent
def test_solve_greedy_accepts_a_seed(weft) -> None:
    result = weft("solve", samples.sum, "--strategy", "greedy", "--seed", "3")
    assert result.exit_code == 0
    assert "95" in result.stdout


def test_solve_stops_at_its_token_budget(weft) -> None:
    result = weft("solve", samples.game24, "--budget-tokens", "60", "--seed", "1", "--json")
    cost = json.loads(result.stdout)["cost"]
    assert cost["tokens"] <= 60
    assert cost["stopped"] == "tokens"


@pytest.mark.fluent
@pytest.mark.parametrize("strategy", BY_ROW)
def test_solve_resumes_from_a_file_with_every_strategy(weft, strategy: str, tmp_path) -> None:
    """A search stopped by its budget resumes with only the file, and is then only read."""
    file = str(tmp_path / "search.json")
    options = (samples.game24, "--strategy", strategy, "--seed", "1", "--resume", file)
    few = () if strategy == "greedy" else ("-n", "3")
    first = json.loads(weft("solve", *options, *few, "--budget-tokens", "120", "--json").stdout)
    rest = ("--resume", file, "--budget-tokens", "600", "--json")
    second = json.loads(weft("solve", *rest).stdout)
    assert second["strategy"] == strategy
    assert second["prompt"] == samples.game24
    assert first["cost"]["tokens"] <= 120
    assert second["nodes"] > 1
    third = json.loads(weft("solve", *rest).stdout)
    assert third["text"] == second["text"]
    if second["cost"]["stopped"] is None:
        assert third["stats"]["decoded"] == 0


def test_solve_with_a_wrong_resume_file_raises(weft, tmp_path) -> None:
    file = tmp_path / "search.json"
    weft("solve", samples.sum, "--strategy", "greedy", "--resume", str(file))
    other = weft("solve", samples.story, "--resume", str(file))
    assert other.exit_code == 2
    assert "holds another search, of 'What is 37 + 58?'" in other.stderr
    strategy = weft("solve", "--resume", str(file), "--strategy", "tot")
    assert strategy.exit_code == 2
    assert "the strategy was greedy" in strategy.stderr
    file.write_text("{}")
    assert weft("solve", "--resume", str(file)).exit_code == 1
    assert weft("solve", "--resume", str(tmp_path / "none.json")).exit_code == 2


def test_solve_out_of_time_prints_no_answer_yet(weft) -> None:
    result = weft("solve", samples.game24, "--budget-s", "0.000001", "--tree")
    assert result.exit_code == 0
    assert "\nno answer yet\n" in result.stdout
    assert "checked" not in result.stdout


def test_doctor_names_engines_and_tries_the_embedded_model(weft) -> None:
    result = weft("doctor")
    assert result.exit_code == 0
    assert f"weft     {weft_package.__version__} · Python 3." in result.stdout
    assert "numpy " in result.stdout
    assert "torch" in result.stdout
    assert "✓ tiny loads in" in result.stdout
    assert "memory" in result.stdout
    assert result.stderr.startswith("next: weft demo\n")


@pytest.mark.programs
def test_doctor_keeps_what_engines_can_do_within_the_terminal(weft) -> None:
    lines = weft("doctor").stdout.splitlines()
    first = next(at for at, line in enumerate(lines) if line.startswith("can"))
    last = next(at for at, line in enumerate(lines) if line.startswith("model"))
    assert max(map(len, lines[first:last])) <= WIDTH
    assert "devices: CPU, CUDA" in " ".join(" ".join(lines).split())


def test_doctor_names_packages_to_install(weft, monkeypatch) -> None:
    monkeypatch.setattr("weft.cli.engines.versions", lambda name: None)
    result = weft("doctor")
    assert f"- torch: most models of the Hub; {install_hint('torch')}" in result.stdout


@pytest.mark.programs
def test_doctor_finds_another_distribution_of_the_same_name(weft, monkeypatch, tmp_path) -> None:
    assert "another distribution" not in weft("doctor").stdout
    for name in ("weft-9.8", "weft_lm-0.1.0"):
        folder = tmp_path / f"{name}.dist-info"
        folder.mkdir()
        text = f"Metadata-Version: 2.1\nName: {name.partition('-')[0]}\nVersion: 9.8\n"
        (folder / "METADATA").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    text = weft("doctor").stdout
    assert "weft 9.8, another distribution, has the same package and command" in text
    assert "pip uninstall weft, then pip install --force-reinstall --no-deps " in text


def test_bare_weft_is_a_short_screen_without_the_heavy_imports(command) -> None:
    done = command()
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) <= 12
    for line in ("weft demo", "weft run", "weft solve", "weft doctor", "tiny (embedded)"):
        assert line in done.stdout
    assert done.stderr == ""


def test_bare_weft_with_json_writes_json(command) -> None:
    screen = json.loads(command("--json").stdout)
    assert screen["models"][0] == "tiny (embedded)"
    assert screen["engines"][0].startswith("numpy ")
    misplaced = command("--json", "ls")
    assert misplaced.returncode == 2
    assert "weft ls --json" in misplaced.stderr


def test_app_imports_neither_numpy_nor_torch() -> None:

    code = (
        "import sys, weft.cli.app as a; print([m for m in ('numpy', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_version_and_help(weft) -> None:
    assert weft("--version").stdout == f"weft {weft_package.__version__}\n"
    for verb in ("demo", "run", "solve", "doctor"):
        assert weft(verb, "--help").exit_code == 0
        assert verb in weft("--help").stdout
    assert "weft demo" in weft().stdout


@pytest.mark.fluent
def test_hints_repeat_the_model_and_template_flags(weft) -> None:
    folder = str(Path(weft_package.__file__).parent / "data" / "tiny")
    few = ("-m", folder, "-n", "1")
    raw = weft("run", "Once", "--raw", "--max-tokens", "2", "--no-keep", *few)
    hint = next(line for line in raw.stderr.splitlines() if line.startswith("next: "))
    assert hint.endswith(f" --raw -m {folder}")
    lines = weft(
        "solve", samples.game24, "--budget-tokens", "50", "--tree", *few
    ).stderr.splitlines()
    (solve_hint,) = (line for line in lines if line.startswith("next: "))
    assert solve_hint.endswith(f" -m {folder}")


@pytest.mark.parametrize("prompt", ["two\nlines", "a\ttab"])
def test_hints_skip_prompts_that_cannot_be_copied(weft, prompt: str) -> None:
    stderr = weft("run", prompt, "-n", "1", "--max-tokens", "2", "--no-keep").stderr
    assert f'next: weft run "{samples.story}"' in stderr
    stderr = weft("solve", prompt, "--strategy", "greedy", "--max-tokens", "4").stderr
    assert f'next: weft run "{samples.story}"' in stderr


@pytest.mark.fluent
def test_solve_without_a_checker_shows_votes_and_no_verdict(weft) -> None:
    result = weft("solve", samples.sum, "--seed", "1", "--tree")
    assert "\nThe answer is 95.\n" in result.stdout
    assert "checked" not in result.stdout
    assert "37 + 58 = 95.⏎The answer is 95.  ×16 · 1.00\n" in result.stdout
