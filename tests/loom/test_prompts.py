"""Prompts that change answers without an error: no BOS, and a space before a constraint."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

import weft
from core.tokens import builders
from shallow import shallow
from weft import Branch, Loom
from weft._core.sampling.params import SamplingParams
from weft._core.tokens.tokenizer import Tokenizer
from weft.constraints import (
    GBNF,
    Allow,
    Choice,
    Constraint,
    JsonSchema,
    Lark,
    Lazy,
    Regex,
    from_dict,
)
from weft.constraints.grammar import Grammar, Prefixed
from weft.constraints.lines import EachLine, after
from weft.errors import ConfigError, FormatError, PromptWarning
from weft.lm.lm import LM

CHAT = "{{ bos_token }}{% for m in messages %}User: {{ m.content }}\nAnswer: {% endfor %}"
HELLO = Choice(["hello there", "hi"])
GRAMMARS: list[tuple[Grammar, str]] = [
    (HELLO, "hello there"),
    (Regex("[a-z]+ [0-9]"), "owl 7"),
    (Lark('start: "an " NAME\nNAME: /owl|otter/'), "an otter"),
    (GBNF('root ::= "an " name\nname ::= "owl" | "otter"'), "an otter"),
    (JsonSchema({"const": {"a": None}}), '{"a": null}'),
    (JsonSchema({"$ref": "#/$defs/n", "$defs": {"n": {"enum": ["x", 3]}}}), "3"),
]  # fmt: skip


@pytest.fixture
def lm() -> Iterator[LM]:
    """A model of its own for each test: a warning is given once."""
    with weft.load(shallow(), engine="numpy") as lm:
        yield lm


# BOS ----------------------------------------------------------------------------------------------


def test_loom_of_ids_without_bos_warns_once(lm: LM) -> None:
    ids = lm.tokenize("hello there", add_bos=False)
    with pytest.warns(PromptWarning, match="do not begin with BOS") as record:
        Loom(lm, ids)
    assert record[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Loom(lm, ids)


def test_branch_of_ids_without_bos_warns(lm: LM) -> None:
    with Branch.create(lm) as branch, pytest.warns(PromptWarning, match="BOS"):
        branch.prefill(lm.tokenize("hello", add_bos=False))


def test_prompts_with_bos_or_of_text_or_after_others_do_not_warn(lm: LM) -> None:
    ids = lm.tokenize("hello")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loom = Loom(lm, ids)
        Loom(lm, "hello", template=False)
        loom.add(lm.tokenize("there", add_bos=False))
        with Branch.create(lm) as branch:
            branch.prefill(ids)
            branch.prefill(lm.tokenize("there", add_bos=False))


def test_ids_that_start_with_a_special_token_are_used_unchanged(lm: LM) -> None:
    special = next(each for each in sorted(lm.text.special_ids) if each != lm.text.bos_token_id)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Loom(lm, [special, *lm.tokenize("hello", add_bos=False)])


def test_tokenizer_that_adds_no_bos_does_not_warn() -> None:
    text = Tokenizer.wrap(builders.byte_level(), stop_ids=[1])
    assert not text.adds_bos
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        text.warn_without_bos(text.encode("hello"))


# show= --------------------------------------------------------------------------------------------


def test_streams_take_show_as_grow_does(lm: LM) -> None:
    loom = Loom(lm, "hello", template=False)
    (grown,) = loom.grow(max_tokens=4, seed=1, show=False)
    for _ in loom.stream(max_tokens=4, seed=1, show=False):
        pass

    async def both() -> None:
        await loom.agrow(max_tokens=4, seed=1, show=False)
        async for _ in loom.astream(max_tokens=4, seed=1, show=False):
            pass

    asyncio.run(both())
    assert [child.tokens for child in loom.children] == [grown.tokens] * 4
    with pytest.raises(ConfigError, match="show is 3"):
        loom.stream(show=3)  # type: ignore[arg-type]


# A space before a constraint ----------------------------------------------------------------------


def test_given_text_that_ends_in_a_space_before_a_grammar_warns(lm: LM) -> None:
    loom = Loom(lm, "Say: ", template=False)
    with pytest.warns(PromptWarning, match="ends in a space") as record:
        loom.grow(constraint=HELLO, max_tokens=4, seed=1)
    assert record[0].filename == __file__
    child = Loom(lm, "Say", template=False).add(" it: ")
    with pytest.warns(PromptWarning, match="ends in a space"):
        list(child.stream(constraint=HELLO, max_tokens=4, seed=1))
    with Branch.create(lm, grammar=HELLO) as branch, pytest.warns(PromptWarning, match="space"):
        branch.prefill(lm.tokenize("Say: "))


def test_grammar_that_is_set_on_a_branch_after_a_space_warns_once(lm: LM) -> None:
    with Branch.create(lm, seed=1) as branch:
        branch.prefill(lm.tokenize("Say: "))
        fork = branch.fork()
        with pytest.warns(PromptWarning, match="ends in a space") as record:
            branch.set_grammar(HELLO)
        assert [each.filename for each in record] == [__file__]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            branch.commit(branch.produce().token)
        with pytest.warns(PromptWarning, match="ends in a space"):
            fork.set_grammar(HELLO)


def test_grammar_that_is_set_on_a_branch_after_other_tokens_does_not_warn(lm: LM) -> None:
    (space,) = lm.tokenize(" ", add_bos=False)
    with warnings.catch_warnings(), Branch.create(lm, seed=1) as branch:
        warnings.simplefilter("error")
        branch.set_grammar(HELLO)
        branch.set_grammar(None)
        branch.prefill(lm.tokenize("Say: "))
        branch.set_grammar(Regex("[0-9]"))
        branch.set_grammar(None)
        branch.commit(space)  # the model's own text may end anywhere
        branch.set_grammar(HELLO)


def test_space_before_text_that_the_tokenizer_cuts_off_from_it_does_not_warn(lm: LM) -> None:
    """The embedded tokenizer writes " 7" as two tokens, and " -" and " he" as one."""
    ids = lm.tokenize("5 + 3 = ")
    assert lm.tokenize("5 + 3 = 8")[:-1] == ids
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for constraint in (Regex("[0-9]+"), JsonSchema({"type": "integer"}), Choice([" x"])):
            Loom(lm, ids).grow(constraint=constraint, max_tokens=4, seed=1)
    for constraint in (Regex("[0-9a-z]+"), Choice(["8", "he"]), Choice(["-8", "-9"])):
        with pytest.warns(PromptWarning, match="ends in a space"):
            Loom(lm, ids).grow(constraint=constraint, max_tokens=4, seed=1)


def test_other_prompts_and_constraints_do_not_warn(lm: LM) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Loom(lm, "Say:", template=False).grow(constraint=HELLO, max_tokens=4, seed=1)
        spaced = Loom(lm, "Say: ", template=False)
        spaced.grow(max_tokens=4, seed=1)
        spaced.grow(constraint=Allow({70, 71}), max_tokens=4, seed=1)
        spaced.grow(constraint=Lazy(Regex("xx[0-9]"), ["xx"]), max_tokens=4, seed=1)
        prompt = lm.format_chat([{"role": "user", "content": "Hi"}], template=CHAT)
        assert prompt.endswith(" ")
        Loom(lm, prompt).grow(constraint=HELLO, max_tokens=4, seed=1)
        # The model's own text may end anywhere.
        (written,) = Loom(lm, "Say:", template=False).grow(constraint=Choice([" x"]), max_tokens=1)
        written.tokens = lm.tokenize(" ", add_bos=False)
        written.params = SamplingParams(seed=1)  # as if the model had drawn them
        written.grow(constraint=HELLO, max_tokens=4, seed=1)


@pytest.mark.parametrize(("constraint", "answer"), GRAMMARS)
def test_healed_loom_moves_its_end_space_into_constrained_text(
    lm: LM, constraint: Grammar, answer: str
) -> None:
    loom = Loom(lm, "Say:  ", template=False, heal=True)
    assert loom.text.endswith("Say:")
    assert loom.tokens == lm.tokenize("Say:")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        new = loom.grow(3, constraint=constraint, max_tokens=60, seed=1)
    for node in new:
        assert node.text.startswith("  ")
        assert node.params is not None
        assert node.params.constraint == constraint
        assert node.parsed == constraint.parse(node.text.removeprefix("  "))
    matcher = lm.constraints.matcher(Prefixed("  ", constraint))
    assert matcher.takes(lm.tokenize("  " + answer, add_bos=False))
    assert not matcher.takes(lm.tokenize(answer, add_bos=False))


def test_healed_text_is_cut_as_the_tokenizer_cuts_the_full_text(lm: LM) -> None:
    only = Choice(["hello there world"])
    loom = Loom(lm, "Say: ", template=False, heal=True)
    (node,) = loom.grow(constraint=only, max_tokens=30, seed=1)
    assert [*loom.tokens, *node.tokens] == lm.tokenize("Say: hello there world")


def test_healed_loom_continues_after_a_cut_and_after_a_file(lm: LM, tmp_path: Path) -> None:
    only = Choice(["hello there world"])
    Loom(lm, "Say: ", template=False, heal=True).save(tmp_path / "a.loom.json")
    loom = Loom.open(tmp_path / "a.loom.json", lm)
    (cut,) = loom.grow(constraint=only, max_tokens=2, seed=1)
    assert cut.finish_reason == "length"
    (rest,) = cut.grow(constraint=only, max_tokens=30, seed=1)
    assert cut.text + rest.text == " hello there world"
    assert rest.parsed == "hello there world"


def test_healed_prompt_that_is_changed_has_nothing_to_heal(lm: LM) -> None:
    loom = Loom(lm, "Say: ", template=False, heal=True)
    loom.text = "Now:"
    (node,) = loom.grow(constraint=HELLO, max_tokens=30, seed=1)
    assert node.text in HELLO.texts


def test_lines_of_a_healed_loom_begin_with_its_space_once(lm: LM) -> None:
    lines = EachLine(Choice(["hello there"]))
    assert from_dict(after(" ", lines).to_dict()) == after(" ", lines)
    loom = Loom(lm, "Say: ", template=False, heal=True)
    for node in loom.grow(4, constraint=lines, max_tokens=12, seed=1):
        first, *others = node.text.split("\n")
        assert " hello there".startswith(first)
        assert all("hello there".startswith(each) for each in others)
        assert node.parsed == node.text[1:]
    with pytest.warns(PromptWarning, match="ends in a space"):
        Loom(lm, "Say: ", template=False).grow(constraint=lines, max_tokens=2, seed=1)


def test_heal_without_an_end_space_changes_nothing(lm: LM) -> None:
    loom = Loom(lm, "Say:", template=False, heal=True)
    (node,) = loom.grow(constraint=HELLO, max_tokens=30, seed=1)
    assert loom.tokens == lm.tokenize("Say:")
    assert node.text in HELLO.texts


def test_heal_of_token_ids_chats_and_looms_of_texts_raises(lm: LM) -> None:
    prompt = lm.format_chat([{"role": "user", "content": "Hi"}], template=CHAT)
    for given in (lm.tokenize("Say: "), prompt):
        with pytest.raises(ConfigError, match="heal=True is for a text"):
            Loom(lm, given, heal=True)
    with pytest.raises(ConfigError, match="heal has no meaning"):
        Loom(None, "Say: ", heal=True)
    with pytest.raises(ConfigError, match="heal is 1"):
        Loom(lm, "Say: ", template=False, heal=1)  # type: ignore[call-overload]


def test_prefixed_grammar_survives_a_json_round_trip() -> None:
    new: Constraint = Prefixed(" ", HELLO)
    assert from_dict(new.to_dict()) == new
    with pytest.raises(FormatError):
        from_dict({"prefixed": Allow({3}).to_dict(), "prefix": " "})
