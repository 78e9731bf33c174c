"""DSPy at Weft's server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import dspy
import pytest


@pytest.fixture(scope="module")
def lm(server: Any) -> Iterator[dspy.LM]:
    lm = dspy.LM(
        f"openai/{server.model}",
        api_base=server.v1,
        api_key="none",
        cache=False,
        max_tokens=60,
        temperature=0,
    )
    with dspy.context(lm=lm):
        yield lm


class Judge(dspy.Signature):
    """Decide whether the animal is wild."""

    animal: str = dspy.InputField()
    is_wild: bool = dspy.OutputField()


@pytest.mark.client("dspy", "chat")
def test_lm_returns_text(lm: dspy.LM) -> None:
    (text,) = lm("Name one animal.")
    assert text


@pytest.mark.client("dspy", "completions")
def test_text_model_continues_a_text(server: Any) -> None:
    lm = dspy.LM(
        f"text-completion-openai/{server.model}",
        model_type="text",
        api_base=server.v1,
        api_key="none",
        cache=False,
        max_tokens=8,
    )
    assert lm("Once upon a")


@pytest.mark.xfail(reason="the adapter cannot parse the reply", strict=False)
@pytest.mark.client("dspy", "structured output")
def test_json_adapter_returns_a_typed_prediction(lm: dspy.LM) -> None:
    with dspy.context(lm=lm, adapter=dspy.JSONAdapter()):
        assert isinstance(dspy.Predict(Judge)(animal="wolf").is_wild, bool)
