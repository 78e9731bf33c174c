"""Names of other libraries raise an error that names what to write in Weft."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

import weft
from shallow import shallow
from weft import LM, Branch, BranchStore, Heddle, Loom
from weft._core import remedies
from weft.errors import ConfigError

MESSAGES = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def lm() -> weft.LM:
    return weft.load(shallow(), engine="numpy")


def prefilled(lm: weft.LM) -> Branch:
    branch = Branch.create(lm)
    branch.prefill([20, 21])
    return branch


@pytest.mark.parametrize(
    ("call", "error", "remedy"),
    [
        (lambda lm: Loom("text", lm), ConfigError, "Loom(lm, prompt)"),
        (lambda lm: Loom(MESSAGES, lm), ConfigError, "Loom(lm, prompt)"),
        (lambda lm: Loom("text", lm.text, lm), ConfigError, "Loom(lm, prompt)"),
        (lambda lm: lm("text"), TypeError, 'lm.generate("…")'),
        (lambda lm: LM("gpt2"), ConfigError, "weft.load(model)"),
        (lambda lm: LM.from_pretrained("gpt2"), AttributeError, "weft.load(name)"),
        (lambda lm: lm.create_chat_completion(MESSAGES), AttributeError, "lm.generate(messages)"),
        (lambda lm: lm.to("cuda"), AttributeError, "weft.load(name, device="),
        (lambda lm: weft.LLM("gpt2"), AttributeError, "weft.load(name)"),
        (lambda lm: weft.generate("a"), AttributeError, "lm.generate"),
        (lambda lm: lm.generate("a", max_tokens=1).text, AttributeError, "branches[0].text"),
        (lambda lm: Loom(lm, "a").grow(2, max_tokens=1).grow(2), AttributeError, "at=branches"),
        (lambda lm: Loom(lm, "a").outputs, AttributeError, "node.text"),
        (lambda lm: Branch(lm), ConfigError, "Branch.create(lm)"),
        (lambda lm: Branch.create(lm).sample(), AttributeError, "branch.produce()"),
        (lambda lm: Branch.create(lm).forkSync(), AttributeError, "use fork"),
        (lambda lm: Branch.create(lm).prefill("text"), ConfigError, "lm.tokenize(text)"),
        (lambda lm: BranchStore(lm).retainOnly, AttributeError, "use retain_only"),
        (lambda lm: BranchStore("tiny"), ConfigError, "weft.load"),
        (lambda lm: lm.tokenize(MESSAGES), ConfigError, "lm.format_chat(messages).ids"),
        (lambda lm: lm.detokenize(5), ConfigError, "lm.token_to_text(id)"),
    ],
)
def test_error_names_the_remedy(
    lm: weft.LM, call: Callable[[Any], Any], error: type[Exception], remedy: str
) -> None:
    with pytest.raises(error, match=re.escape(remedy)):
        call(lm)


def test_every_remedy_names_an_attribute_that_exists(lm: weft.LM) -> None:
    loom = Loom(lm, "a")
    owners = {"lm": lm, "loom": loom, "node": loom, "branch": prefilled(lm), "weft": weft}
    owners |= {"branches[0]": loom, "search": weft.search, "info": lm.info, "text": lm.text}
    tables = [getattr(remedies, name) for name in dir(remedies) if name.startswith("OF_")]
    texts = {text for table in tables for text in table.values()}
    named = {
        pair
        for text in texts
        for pair in re.findall(r"(branches\[0\]|\w+)\.([a-z_]+)", text)
        if pair[0] in owners
    }
    assert len(named) > 30
    for owner, name in named:
        assert hasattr(owners[owner], name), (owner, name)


def test_no_remedy_is_of_an_attribute_that_exists(lm: weft.LM) -> None:
    loom = Loom(lm, "a")
    of = {"LM": lm, "NODE": loom, "BRANCH": prefilled(lm), "BRANCHES": loom.grow(max_tokens=1)}
    for owner, thing in of.items():
        for name in getattr(remedies, f"OF_{owner}"):
            assert not hasattr(thing, name), (owner, name)


def test_remedied_names_are_free_for_subclasses_and_not_listed(lm: weft.LM) -> None:
    class Own(Heddle):
        root = "mine"

    node = Own(lm, "a")
    node.prompt = "also mine"  # type: ignore[attr-defined]
    assert (node.root, node.prompt) == ("mine", "also mine")  # type: ignore[attr-defined]
    assert "outputs" not in dir(node)
    assert {"text", "grow", "root"} <= set(dir(node))
    assert "from_pretrained" not in dir(lm)
