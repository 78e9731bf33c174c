"""Constraints on every kind of tokenizer, and on models that are wider or narrower than theirs."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from functools import cache
from importlib.resources import files
from pathlib import Path

import jsonschema
import numpy as np
import pytest

from core.tokens import builders
from llama_reference import CONFIG, random_tensors, write_safetensors
from real_models import real_model
from weft import Branch, Loom
from weft._core.tokens.tokenizer import Tokenizer
from weft.constraints import GBNF, Allow, Choice, Constraint, JsonSchema, Lark, Lazy, Regex
from weft.constraints.base import Compiler, Matcher, n_words
from weft.constraints.grammar import Masks
from weft.engines.numpy import NumpyEngine
from weft.errors import ConstraintError
from weft.lm.lm import LM

# name → the tokenizer, and its end tokens
WHOLE: dict[str, Callable[[], Tokenizer]] = {
    "embedded": lambda: Tokenizer.from_folder(Path(str(files("weft") / "data" / "tiny"))),
    "byte-level": lambda: Tokenizer.wrap(builders.byte_level(bos=True), stop_ids=[1]),
    "several ends": lambda: Tokenizer.wrap(builders.byte_level(), stop_ids=[0, 1, 9_999]),
    "no end": lambda: Tokenizer.wrap(builders.byte_level()),
    "sentencepiece": lambda: Tokenizer.wrap(builders.sentencepiece(), stop_ids=[2]),
    "duplicates": lambda: Tokenizer.wrap(builders.duplicates(), stop_ids=[1]),
    "text as end": lambda: _with_end(builders.sentencepiece(), "\n", "h"),
    "mistral": lambda: Tokenizer.wrap(builders.mistral(), stop_ids=[2]),
}
# Not every byte has a token.
PARTIAL: dict[str, Callable[[], Tokenizer]] = {
    "unigram": lambda: Tokenizer.wrap(builders.metaspace(), stop_ids=[1]),
    "characters": lambda: Tokenizer.wrap(builders.characters(), stop_ids=[196]),
}
# Published tokenizers; `make models` fetches them.
REAL = ["llama3", "qwen3", "gemma3", "deepseek_v3", "gpt4o", "gptoss", "claude", "llama2"]
REAL_PARAMS = [pytest.param(name, marks=pytest.mark.models) for name in REAL]
WIDER = [0, 1, 31, 64, 321, -3]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "näme 🙂": {"enum": ["owl", "日本", 3]},
        "age": {"type": "integer", "minimum": 1, "maximum": 12},
    },
    "required": ["name", "näme 🙂", "age"],
    "additionalProperties": False,
}


def _with_end(backend: object, *names: str) -> Tokenizer:
    """Ends that are text all the same: the text must then be written in other tokens."""
    return Tokenizer.wrap(backend, stop_ids=[backend.token_to_id(name) for name in names])


def is_record(text: str) -> bool:
    data = json.loads(text)
    jsonschema.validate(data, SCHEMA)
    return True


# what is asked for, whether a text is it, and texts that are
CASES: list[tuple[Constraint, Callable[[str], object], list[str]]] = [
    (JsonSchema(SCHEMA), is_record, ['{"name": "\\n\\"", "näme 🙂": "日本", "age": 7}']),
    (
        Regex("(hello|ü🙂){2}[^a-z]{3}"),
        re.compile("(hello|ü🙂){2}[^a-z]{3}", re.S).fullmatch,
        ["ü🙂helloé🙂!"],
    ),
    (
        Lark('start: "<" /[a-c]+/ ">" | "日本語 text"'),
        re.compile("<[a-c]+>|日本語 text").fullmatch,
        ["<abc>"],
    ),
    (
        GBNF('root ::= "(" root ")" | [ab🙂]{1,3}'),
        re.compile(r"(\()*[ab🙂]{1,3}(\))*").fullmatch,
        ["((a🙂))"],
    ),
    (
        Choice([" hello", "hello", "true\n", "🙂🙂"]),
        {" hello", "hello", "true\n", "🙂🙂"}.__contains__,
        [" hello", "true\n"],
    ),
]


@cache
def tokenizer(name: str) -> Tokenizer:
    if name in REAL:
        return Tokenizer.from_folder(real_model(f"tokenizers/{name}"))
    return (WHOLE | PARTIAL)[name]()


@cache
def compiler(name: str, wider: int) -> Compiler:
    text = tokenizer(name)
    return Compiler(text, text.n_vocab + wider)


def walk(compiler: Compiler, matcher: Matcher, rng: random.Random, *, forces: bool) -> list[int]:
    """Draw tokens under the masks alone, all alike, until the text ends."""
    bits = np.empty(n_words(compiler.n_vocab), dtype=np.int32)
    tokens: list[int] = []
    while not matcher.must_end:
        forced = matcher.forced() if forces else []
        for token in forced:
            matcher.accept(token)
        tokens += forced
        if matcher.must_end:
            break
        matcher.fill(bits)
        allowed = np.unpackbits(bits.view(np.uint8), bitorder="little")[: compiler.n_vocab]
        (ids,) = allowed.nonzero()
        assert ids.size, compiler.text.decode(tokens)
        ends = sorted(compiler.stop_ids & set(ids.tolist()))
        assert bool(ends) == (matcher.may_end and bool(compiler.stop_ids))
        # Ends and signs are as likely as all words together, so that texts come to an end.
        longest = max(ids.tolist(), key=lambda each: (len(compiler.text.token_bytes(each)), each))
        token = rng.choice([*ends, longest, *rng.sample(ids.tolist(), k=min(3, ids.size))])
        assert matcher.is_allowed(token)
        matcher.accept(token)
        if token in compiler.stop_ids:
            break
        tokens.append(token)
        if matcher.may_end and not compiler.stop_ids and rng.random() < 0.3:
            break
    return tokens


@pytest.mark.parametrize(
    ("name", "wider"),
    [
        *((name, wider) for name in WHOLE for wider in WIDER),
        *(pytest.param(name, 45, marks=pytest.mark.models) for name in REAL),
    ],
)
def test_whatever_is_drawn_under_the_masks_fits(name: str, wider: int) -> None:
    """The twin: a validator of each form that knows nothing of tokens."""
    made = compiler(name, wider)
    rng = random.Random(f"{name} {wider}")
    for constraint, fits, _ in CASES:
        for forces in (True, False) if name in REAL else (True, False, True):
            tokens = walk(made, made.matcher(constraint), rng, forces=forces)
            text = b"".join(map(made.text.token_bytes, tokens)).decode()
            assert fits(text), text


@pytest.mark.parametrize("name", [*WHOLE, *REAL_PARAMS])
def test_texts_that_fit_are_taken_as_the_tokenizer_writes_them(name: str) -> None:
    made = compiler(name, 7)
    for constraint, _, texts in CASES:
        for text in texts:
            matcher = made.matcher(constraint)
            for token in made.ids_of(text.encode()):
                assert matcher.is_allowed(token)
                matcher.accept(token)
            assert matcher.may_end


@pytest.mark.parametrize("name", [*WHOLE, *PARTIAL, *REAL_PARAMS])
def test_forced_text_is_that_text_without_a_space_before_it(name: str) -> None:
    made = compiler(name, 5)
    for text in (' "the"', '{"the"', "the 日本", "🙂"):
        matcher = made.matcher(Choice([text + "!", text + "?"]))
        forced = matcher.forced()
        spelled = b"".join(made.spellings[token] for token in forced)
        assert text.encode().startswith(spelled)
        assert forced or name in PARTIAL
        for token in forced:
            matcher.accept(token)


@pytest.mark.parametrize("name", PARTIAL)
def test_a_text_that_no_tokens_write_is_a_dead_end_and_no_other_text(name: str) -> None:
    made = compiler(name, 0)
    bits = np.empty(n_words(made.n_vocab), dtype=np.int32)
    for constraint in (Choice(["€"]), JsonSchema({"const": "€"}), Regex("€"), Lark('start: "€"')):
        matcher = made.matcher(constraint)
        for _ in range(3):  # a quotation mark may be written
            matcher.fill(bits)
            mask = np.unpackbits(bits.view(np.uint8), bitorder="little")
            (allowed,) = mask[: made.n_vocab].nonzero()
            if not allowed.size:
                break
            matcher.accept(int(allowed[0]))
        assert not allowed.size
        assert not matcher.must_end
        assert not matcher.may_end
        assert not matcher.forced()


@pytest.mark.parametrize("name", WHOLE)
def test_a_batch_of_masks_fits_the_model_and_not_the_tokenizer(name: str) -> None:
    for wider in WIDER:
        made = compiler(name, wider)
        matchers = [made.matcher(case[0]) for case in CASES] + [None, made.matcher(Allow({5}))]
        logits = np.zeros((len(matchers), made.n_vocab), dtype=np.float32)
        masked = _masked(logits, matchers)
        assert np.isfinite(masked[-2]).all()
        assert np.isfinite(masked[-1]).sum() == len({5, *made.stop_ids})
        for row, matcher in zip(masked[:-2], matchers, strict=False):
            alone = _masked(logits[:1], [matcher])[0]
            assert (np.isfinite(row) == np.isfinite(alone)).all()
            assert np.isfinite(row).any()


def _masked(logits: np.ndarray, matchers: list[Matcher | None]) -> np.ndarray:
    masks = Masks([frozenset()] * len(matchers))
    masks.finish(matchers, logits.shape[1])
    return masks.over(logits, np.arange(len(matchers)))


# The whole way, with a model ---------------------------------------------------------------------


@pytest.fixture(params=["byte-level", "no end", "sentencepiece", "duplicates"])
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[0, 32, 45])
def lm(request: pytest.FixtureRequest, name: str, tmp_path: Path) -> Iterator[LM]:
    """A random model with so many logits more than the tokenizer has tokens."""
    text = tokenizer(name)
    size = text.n_vocab + request.param
    config = CONFIG | {"vocab_size": size, "max_position_embeddings": 256}
    (tmp_path / "config.json").write_text(json.dumps(config))
    write_safetensors(tmp_path / "model.safetensors", random_tensors(config))
    with LM(NumpyEngine.load(tmp_path), text) as made:
        yield made


def test_every_face_draws_what_fits(lm: LM) -> None:
    loom = Loom(lm, "hello")
    for constraint, fits, _ in CASES:
        made = loom.grow(n=3, constraint=constraint, max_tokens=200, seed=1, show=False)
        for node in made:
            text = b"".join(map(lm.text.token_bytes, node.tokens)).decode()
            assert node.finish_reason == "length" or fits(text)
            assert node.tokens
    assert any(node.finish_reason == "stop" for node in loom.children)
    with Branch.create(lm, grammar=Choice(["true\n", " 🙂"]), seed=3) as branch:
        branch.prefill(lm.text.encode("hello"))
        while not branch.sampler.matcher.must_end:
            branch.commit(branch.produce().token)
        assert branch.text in ("true\n", " 🙂")
        assert branch.legal().sum() == len(lm.text.stop_ids)


@pytest.mark.slow
def test_a_vocabulary_of_131072_tokens() -> None:
    text = Tokenizer.wrap(builders.tekken(), stop_ids=[2])
    for wider in (0, 128, 17):
        made = Compiler(text, text.n_vocab + wider)
        rng = random.Random(wider)
        for constraint, fits, _ in CASES:
            tokens = walk(made, made.matcher(constraint), rng, forces=True)
            assert fits(b"".join(map(text.token_bytes, tokens)).decode())


def test_an_end_token_that_the_model_does_not_have_is_no_end(text: Tokenizer) -> None:
    ends = Tokenizer.wrap(text._codec._backend, stop_ids=[5, 10_000])
    made = Compiler(ends, 2048)
    assert made.stop_ids == {5}
    with pytest.raises(ConstraintError):
        made.matcher(Regex("a")).accept(5)


@pytest.fixture
def text() -> Tokenizer:
    return tokenizer("embedded")


def test_a_lazy_grammar_and_a_cut_text_are_gone_on_with(lm: LM) -> None:
    loom = Loom(lm, "hello")
    words = Lazy(Regex("o[0-9]{2}!"), ["o"])
    for node in loom.grow(n=4, constraint=words, max_tokens=120, seed=2, show=False):
        text = b"".join(map(lm.text.token_bytes, node.tokens)).decode(errors="replace")
        cut = node.finish_reason == "length"
        assert re.fullmatch("[^o]*(o[0-9]{2}!)?", text, re.S) or (
            cut and re.search("o[0-9]{0,2}$", text)
        )
    (begun,) = loom.grow(n=1, constraint=JsonSchema(SCHEMA), max_tokens=9, seed=3, show=False)
    assert begun.finish_reason == "length"
    for child in begun.grow(n=2, constraint=JsonSchema(SCHEMA), max_tokens=200, seed=4, show=False):
        if child.finish_reason == "stop":
            assert is_record(begun.text + child.text)
