"""Laws of making a loom: prompts, templates, closing."""

from __future__ import annotations

import gc
import inspect
import weakref
from typing import Any

import pytest

import weft
from weft import Heddle, Loom, samples
from weft._core.tokens.tokenizer import Tokenizer
from weft.errors import ConfigError, ContextOverflow, StaleHandle


def test_text_prompt_is_rendered_by_the_chat_template_once(lm: weft.LM) -> None:
    loom = Loom(lm, samples.game24)
    rendered = lm.format_chat([{"role": "user", "content": samples.game24}])
    assert loom.text == rendered
    assert loom.tokens == lm.tokenize(rendered, special=True, add_bos=False)
    assert loom.tokens.count(lm.text.bos_token_id) == 1
    assert loom.chat_template_used
    assert loom.user_prompt == samples.game24
    assert loom.display_text() == f"Prompt: {samples.game24}\n\nResponse:\n\n"


def test_messages_are_the_same_prompt_as_their_text(lm: weft.LM) -> None:
    text = Loom(lm, samples.game24, system="Be brief.")
    messages = Loom(
        lm,
        [{"role": "system", "content": "Be brief."}, {"role": "user", "content": samples.game24}],
    )
    assert text.tokens == messages.tokens
    assert "Be brief." in text.text
    assert messages.user_prompt == samples.game24


def test_raw_text_and_token_ids_are_used_unchanged(lm: weft.LM) -> None:
    raw = Loom(lm, "Once upon", template=False)
    assert raw.tokens == lm.tokenize("Once upon")
    assert not raw.chat_template_used
    assert raw.display_text() == raw.text
    ids = Loom(lm, raw.tokens)
    assert ids.tokens == raw.tokens
    assert not ids.chat_template_used


def test_known_argument_forms_create_the_same_loom(lm: weft.LM) -> None:
    two = Loom(lm, samples.game24)
    three = Loom(lm, lm.tokenizer, samples.game24)
    named = Loom(model=lm, tokenizer=lm.tokenizer, prompt=samples.game24)
    assert two.tokens == three.tokens == named.tokens
    assert three.model is lm
    assert three.tokenizer is lm.tokenizer
    child = three.add("Yes")
    assert (child.model, child.tokenizer) == (lm, lm.tokenizer)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ("", {}, "empty"),
        ("", {"template": False}, "empty"),
        ([], {}, "empty"),
        (None, {}, "needs a prompt"),
        (5, {}, "not int"),
        (b"bytes", {}, "not bytes"),
        ([1.5], {}, "integers"),
        ([99_999], {}, "outside the vocabulary"),
        ([-1], {}, "outside the vocabulary"),
        ([1], {"system": "x"}, "system"),
        ("x", {"system": "x", "template": False}, "system"),
        ([{"role": "user", "content": "x"}], {"template": False}, "chat template"),
        ([{"role": "system", "content": "x"}], {"system": "y"}, "system message already"),
        ([{"role": "user"}], {}, "content"),
    ],
)
def test_invalid_prompt_raises_at_the_call(
    lm: weft.LM, prompt: Any, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        Loom(lm, prompt, **options)


def test_prompt_longer_than_the_context_raises_with_both_numbers(lm: weft.LM) -> None:
    with pytest.raises(ContextOverflow) as caught:
        Loom(lm, [3] * (lm.n_ctx + 1))
    assert (caught.value.n_tokens, caught.value.n_ctx) == (lm.n_ctx + 1, lm.n_ctx)


def test_error_of_the_chat_template_is_raised(lm: weft.LM, monkeypatch: pytest.MonkeyPatch) -> None:
    """B14."""
    monkeypatch.setattr(lm.text, "chat_template", "{{ raise_exception('no such turn') }}")
    with pytest.raises(ConfigError, match="no such turn"):
        Loom(lm, samples.game24)


def test_prompt_without_a_chat_template_is_raw_text(
    lm: weft.LM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lm.text, "chat_template", None)
    loom = Loom(lm, samples.game24)
    assert not loom.chat_template_used
    assert loom.tokens == lm.tokenize(samples.game24)
    with pytest.raises(ConfigError, match="chat template"):
        Loom(lm, samples.game24, system="x")


def test_tokenizer_without_bos_keeps_the_first_token_of_text_children() -> None:
    """B4: nothing is trimmed from a continuation but what the encoder added."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({character: i for i, character in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    plain = Tokenizer.wrap(backend)
    assert plain.decode(plain.continuation("I will")) == "I will"


def test_close_is_idempotent_and_leaves_the_loom_readable(lm: weft.LM) -> None:
    with Loom(lm, samples.game24) as loom:
        child = loom.grow(max_tokens=2, seed=1)[0]
    loom.close()
    assert loom.text
    assert child.text
    assert loom.count_children() == 2
    for call in (loom.grow, loom.next, lambda: loom.add("x"), lambda: child.measure("x")):
        with pytest.raises(StaleHandle, match="closed"):
            call()


def test_handles_dropped_without_close_leave_nothing_pinned() -> None:
    with weft.load("tiny") as own:
        loom = Loom(own, samples.game24)
        for child in loom.grow(3, max_tokens=4, seed=1):
            child.add("so").grow(max_tokens=2, seed=1)
        stream = loom.stream(2, max_tokens=8, seed=1)
        next(stream)
        gone = weakref.ref(loom)
        del loom, child, stream
        gc.collect()
        assert gone() is None
        Loom(own, samples.sum).next(1)  # the next step drops the cancelled runs
        gc.collect()
        own.clear_cache()
        assert own.stats().kv_bytes == 0


def test_subclass_with_its_own_constructor_creates_children_of_its_class(lm: weft.LM) -> None:
    class Scored(Heddle):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.visits = 0

        def display_text(self) -> str:
            return f"[{self.text}]"

    with Loom(lm, samples.game24, heddle_class=Scored) as loom:
        child = loom.add("a")
        grown = child.grow(2, max_tokens=2, seed=1)
        assert [type(node) for node in (child, *grown)] == [Scored] * 3
        assert grown[0].visits == 0
        assert grown[0].get_display_text(1) == f"[a][{grown[0].text}]"
        assert child.split(1) if len(child.tokens) > 1 else True


def test_known_constructor_creates_a_node_that_add_child_accepts(loom: Loom) -> None:
    node = Heddle(loom.model, loom.tokenizer, "4 + 9", None, None)
    assert node.parent is None
    assert node.text == "4 + 9"
    loom.add_child(node)
    assert loom.children == [node]
    twin = loom.add("4 + 9")
    assert twin.tokens == node.tokens
    assert twin.next(3) == node.next(3)


def test_special_tokens_in_a_text_are_read_with_special_true(lm: weft.LM) -> None:
    prompt, turn = "<|bos|><|user|>Hi<|end|><|assistant|>", "<|end|><|user|>Bye<|end|><|assistant|>"
    loom = Loom(lm, prompt, template=False, special=True)
    assert loom.tokens == lm.text.encode_chat([{"role": "user", "content": "Hi"}])
    assert loom.text == prompt
    delta = lm.turn_delta([{"role": "user", "content": "Bye"}])
    assert loom.add(turn, special=True).tokens == delta
    assert loom.add_text_child(turn, special=True).tokens == delta
    assert loom.ramify(turn, special=True).tokens == delta
    assert loom.measure(turn, special=True).tokens == tuple(delta)
    for plain in (loom.add(turn), loom.add_text_child(turn), loom.ramify([turn])[0]):
        assert plain.text == turn
        assert len(plain.tokens) > len(delta)


def test_begin_token_in_a_text_is_not_doubled() -> None:
    """For tokenizers that add a begin token, as Llama's do."""
    from tokenizers import AddedToken, processors

    from core.tokens.builders import byte_level
    from weft._core.tokens.tokenizer import Tokenizer
    from weft.loom import loom as prompt

    backend = byte_level()
    backend.add_special_tokens([AddedToken("<s>", special=True, normalized=False)])
    begin = backend.token_to_id("<s>")
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", begin)]
    )
    text = Tokenizer(backend, special_tokens={"bos_token": "<s>"})
    for given in ("Hi", "<s>Hi"):
        assert prompt.read_prompt(text, given, special=True).ids == text.encode("Hi")
    assert prompt.read_prompt(text, "<s>Hi").ids.count(begin) == 1


def test_special_raises_where_it_has_no_meaning(lm: weft.LM, loom: Loom) -> None:
    for given in ("Hi", [{"role": "user", "content": "Hi"}], [1, 2]):
        with pytest.raises(ConfigError, match="special=True needs a text"):
            Loom(lm, given, special=True)
    with pytest.raises(ConfigError, match="leave it out for token ids|token ids are not parsed"):
        loom.add([1, 2], special=True)
    with pytest.raises(ConfigError, match="special"):
        loom.ramify(n=1, special=True)


@pytest.mark.parametrize("given", [None, 5, 1.5, b"ab", {"a": 1}])
def test_value_that_is_no_text_raises_at_the_call(loom: Loom, given: Any) -> None:
    for call in (loom.add, loom.add_text_child, loom.measure):
        with pytest.raises(ConfigError, match=r"the text is .*; allowed is a text, or a list of"):
            call(given)
    for node in (loom, loom.add("a")):
        before = node.text
        with pytest.raises(ConfigError, match=r"text is .*; allowed is a text"):
            node.text = given
        assert node.text == before


@pytest.mark.parametrize("given", [[1, "a"], [None]])
def test_invalid_token_ids_raise_at_the_call(loom: Loom, given: Any) -> None:
    for call in (loom.add, loom.measure):
        with pytest.raises(ConfigError, match="token ids must be integers"):
            call(given)


def test_add_of_list_of_lists_is_rejected(loom: Loom) -> None:
    with pytest.raises(ConfigError, match="token ids must be integers"):
        loom.add([[1]])  # type: ignore[list-item]


def test_unknown_option_raises_with_a_suggestion(lm: weft.LM) -> None:
    with pytest.raises(ConfigError, match=r"'templat' of Loom. Did you mean template\?"):
        Loom(lm, "x", templat=False)  # type: ignore[call-overload]
    for wrong in ("contxt", "n_ctxt"):
        with pytest.raises(ConfigError, match=rf"'{wrong}' of load. Did you mean n_ctx\?"):
            weft.load(**{wrong: 5})
    with pytest.raises(ConfigError, match=r"torch_dtype\? Here it is dtype"):
        weft.load(torch_dtype="float32")  # type: ignore[call-arg]
    assert "n_ctx" in inspect.signature(weft.load).parameters
