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
COMPLETE: dict[str, Callable[[], Tokenizer]] = {
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


# constraint, predicate of its texts, and texts that fit
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
    return (COMPLETE | PARTIAL)[name]()


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
        *(
            pytest.param(*pair, marks=pytest.mark.programs) if number % 3 else pair
            for number, pair in enumerate((name, wider) for name in COMPLETE for wider in WIDER)
        ),
        *(pytest.param(name, 45, marks=pytest.mark.models) for name in REAL),
    ],
)
def test_any_text_drawn_under_the_masks_fits(name: str, wider: int) -> None:
    """The twin: a validator of each form, without tokens."""
    grammar_compiler = compiler(name, wider)
    rng = random.Random(f"{name} {wider}")
    for constraint, fits, _ in CASES:
        for forces in (True, False) if name in REAL else (True, False, True):
            tokens = walk(
                grammar_compiler, grammar_compiler.matcher(constraint), rng, forces=forces
            )
            text = b"".join(map(grammar_compiler.text.token_bytes, tokens)).decode()
            assert fits(text), text


@pytest.mark.parametrize("name", [*COMPLETE, *REAL_PARAMS])
def test_fitting_texts_are_accepted_as_the_tokenizer_writes_them(name: str) -> None:
    grammar_compiler = compiler(name, 7)
    for constraint, _, texts in CASES:
        for text in texts:
            matcher = grammar_compiler.matcher(constraint)
            for token in grammar_compiler.ids_of(text.encode()):
                assert matcher.is_allowed(token)
                matcher.accept(token)
            assert matcher.may_end


@pytest.mark.parametrize("name", [*COMPLETE, *PARTIAL, *REAL_PARAMS])
def test_forced_text_is_that_text_without_a_space_before_it(name: str) -> None:
    grammar_compiler = compiler(name, 5)
    for text in (' "the"', '{"the"', "the 日本", "🙂"):
        matcher = grammar_compiler.matcher(Choice([text + "!", text + "?"]))
        forced = matcher.forced()
        spelled = b"".join(grammar_compiler.spellings[token] for token in forced)
        assert text.encode().startswith(spelled)
        assert forced or name in PARTIAL
        for token in forced:
            matcher.accept(token)


@pytest.mark.parametrize("name", PARTIAL)
def test_text_that_no_tokens_write_is_a_dead_end(name: str) -> None:
    grammar_compiler = compiler(name, 0)
    bits = np.empty(n_words(grammar_compiler.n_vocab), dtype=np.int32)
    for constraint in (Choice(["€"]), JsonSchema({"const": "€"}), Regex("€"), Lark('start: "€"')):
        matcher = grammar_compiler.matcher(constraint)
        for _ in range(3):  # a quotation mark may be written
            matcher.fill(bits)
            mask = np.unpackbits(bits.view(np.uint8), bitorder="little")
            (allowed,) = mask[: grammar_compiler.n_vocab].nonzero()
            if not allowed.size:
                break
            matcher.accept(int(allowed[0]))
        assert not allowed.size
        assert not matcher.must_end
        assert not matcher.may_end
        assert not matcher.forced()


@pytest.mark.parametrize("name", COMPLETE)
def test_batch_of_masks_has_the_size_of_the_models_vocabulary(name: str) -> None:
    for wider in WIDER:
        grammar_compiler = compiler(name, wider)
        matchers = [grammar_compiler.matcher(case[0]) for case in CASES] + [
            None,
            grammar_compiler.matcher(Allow({5})),
        ]
        logits = np.zeros((len(matchers), grammar_compiler.n_vocab), dtype=np.float32)
        masked = _masked(logits, matchers)
        assert np.isfinite(masked[-2]).all()
        assert np.isfinite(masked[-1]).sum() == len({5, *grammar_compiler.stop_ids})
        for row, matcher in zip(masked[:-2], matchers, strict=False):
            alone = _masked(logits[:1], [matcher])[0]
            assert (np.isfinite(row) == np.isfinite(alone)).all()
            assert np.isfinite(row).any()


def _masked(logits: np.ndarray, matchers: list[Matcher | None]) -> np.ndarray:
    masks = Masks(*2 * [[frozenset()] * len(matchers)])
    masks.finish(matchers, logits.shape[1])
    return masks.apply(logits, np.arange(len(matchers)))


# -- with a model ----------------------------------------------------------------------------------


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
    with LM(NumpyEngine.load(tmp_path), text) as model:
        yield model


def test_loom_and_branch_draw_fitting_texts(lm: LM) -> None:
    loom = Loom(lm, "hello")
    for constraint, fits, _ in CASES:
        nodes = loom.grow(n=3, constraint=constraint, max_tokens=200, seed=1, show=False)
        for node in nodes:
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
def test_masks_of_a_vocabulary_of_131072_tokens_allow_fitting_texts() -> None:
    text = Tokenizer.wrap(builders.tekken(), stop_ids=[2])
    for wider in (0, 128, 17):
        grammar_compiler = Compiler(text, text.n_vocab + wider)
        rng = random.Random(wider)
        for constraint, fits, _ in CASES:
            tokens = walk(grammar_compiler, grammar_compiler.matcher(constraint), rng, forces=True)
            assert fits(b"".join(map(text.token_bytes, tokens)).decode())


def test_end_token_outside_the_models_vocabulary_is_ignored(text: Tokenizer) -> None:
    ends = Tokenizer.wrap(text._codec._backend, stop_ids=[5, 10_000])
    grammar_compiler = Compiler(ends, 2048)
    assert grammar_compiler.stop_ids == {5}
    with pytest.raises(ConstraintError):
        grammar_compiler.matcher(Regex("a")).accept(5)


@pytest.fixture
def text() -> Tokenizer:
    return tokenizer("embedded")


def test_lazy_grammar_and_a_cut_text_are_gone_on_with(lm: LM) -> None:
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
