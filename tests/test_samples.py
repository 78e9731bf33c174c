"""The sample prompts: complete, and answered by the embedded model as promised."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from weft import samples

EMBEDDED = Path(samples.__file__).parent / "data" / "tiny"


def test_all_lists_every_sample_by_its_name() -> None:
    public = {
        name: value
        for name, value in vars(samples).items()
        if isinstance(value, str) and not name.startswith("_")
    }
    assert dict(samples.ALL) == public


@pytest.mark.programs
@pytest.mark.torch
def test_embedded_model_answers_every_sample() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    from recipe.corpus import game24
    from recipe.evaluate import Model, final_answer

    prompts = {name: text for name, text in samples.ALL.items() if name != "opening"}
    answers = Model.load(EMBEDDED).complete(list(prompts.values()), 260)
    texts = dict(zip(prompts, answers, strict=True))
    assert final_answer(texts["word_problem"]) == 5
    assert final_answer(texts["large_problem"]) == 1216
    assert final_answer(texts["sum"]) == 95
    assert game24.solves(texts["game24"], (4, 9, 10, 13))
    assert not game24.solves(texts["hard24"], (3, 3, 4, 11))
    assert texts["verdict"] == "sure"
    assert str(texts["step"]) in map(str, game24.moves((4, 9, 10, 13)))
    assert json.loads(texts["record"])["animal"] == "owl"
    assert texts["story"].count(".") >= 5
    assert "tiny demo model" in texts["greeting"]


# Names of what a page leaves to the reader.
_PLACEHOLDERS = {"text", "text ", "PROMPT", "…", "..."}
# Prompts for real models, and the beginning of a sentence that the embedded model can end.
_OTHERS = {
    "What is the capital of Italy?",
    "The owl lives in the ",
    "Once upon a time there was a fox.",
}
_SHOWN = re.compile(r'(?:weft (?:run|solve) |Loom\(\w+, )\\?"([^"\\]+)\\?"')


def test_every_prompt_shown_on_a_page_is_a_sample() -> None:
    root = Path(__file__).parent.parent
    pages = [root / "README.md", *root.glob("docs/*.md"), *root.glob("examples/**/*.*")]
    pages = [page for page in pages if page.suffix in (".md", ".ipynb", ".py")]
    # That example uses another model with its own corpus.
    pages = [page for page in pages if page.parent != root / "examples" / "engine"]
    shown = {
        (page.name, prompt)
        for page in pages
        for prompt in _SHOWN.findall(page.read_text("utf-8"))
        if prompt not in _PLACEHOLDERS | _OTHERS
    }
    assert len(shown) >= 9
    assert {prompt for _, prompt in shown} <= set(samples.ALL.values())
