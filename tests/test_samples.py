"""The sample prompts: complete, and answered by the embedded model as promised."""

from __future__ import annotations

import json
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


@pytest.mark.torch
def test_embedded_model_answers_every_sample() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    from recipe.corpus import game24
    from recipe.evaluate import Model, final_answer

    answers = Model.load(EMBEDDED).complete(list(samples.ALL.values()), 260)
    said = dict(zip(samples.ALL, answers, strict=True))
    assert final_answer(said["word_problem"]) == 5
    assert final_answer(said["large_problem"]) == 1216
    assert final_answer(said["sum"]) == 95
    assert game24.solves(said["game24"], (4, 9, 10, 13))
    assert said["verdict"] == "sure"
    assert str(said["step"]) in map(str, game24.moves((4, 9, 10, 13)))
    assert json.loads(said["record"])["animal"] == "owl"
    assert said["story"].count(".") >= 5
    assert "tiny demo model" in said["greeting"]
