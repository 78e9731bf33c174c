"""Errors for attribute names of other libraries; each message names Weft's equivalent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NoReturn, TypeVar

T = TypeVar("T", bound=type)

_LOAD = "load a model with weft.load(name): a name, a folder, a GGUF file or a Hub id"
_ASK = 'ask with lm.generate("…") or lm.generate(messages)'
_EACH = "it is a list of nodes; use branches[0].{0}, or [node.{0} for node in branches]"

OF_MODULE: Mapping[str, str] = {
    **dict.fromkeys(("AutoModelForCausalLM", "LLM", "Llama", "from_pretrained", "models"), _LOAD),
    **dict.fromkeys(("chat", "complete", "generate", "pipeline"), f"{_LOAD}, and {_ASK}"),
    "AsyncLLM": "use weft.AsyncLM(lm), or await lm.agenerate(…)",
    "AutoTokenizer": "weft.load(name) brings the tokenizer; use lm.tokenize(text)",
    "GenerationConfig": "use weft.SamplingParams",
}
OF_LM: Mapping[str, str] = {
    **dict.fromkeys(("from_name", "from_pretrained", "load"), _LOAD),
    **dict.fromkeys(("chat", "complete", "create_chat_completion", "create_completion"), _ASK),
    **dict.fromkeys(("stream", "stream_generate"), 'use weft.Loom(lm, "…").stream()'),
    **dict.fromkeys(("forward", "logits"), "use weft.Branch.create(lm), or weft.AsyncLM(lm)"),
    **dict.fromkeys(("cpu", "cuda", "to"), 'give the device at load: weft.load(name, device="…")'),
    **dict.fromkeys(("n_vocab", "vocab_size"), "use lm.info.n_vocab"),
    "apply_chat_template": "use lm.format_chat(messages)",
    "beam_search": "use weft.search.beam(lm, prompt)",
    "bos_token_id": "use lm.text.bos_token_id",
    "config": "use lm.info",
    "create_embedding": "use lm.embed([text])",
    "decode": "use lm.detokenize(ids)",
    "device": "use lm.info.device",
    "dtype": "use lm.info.dtype",
    "encode": "use lm.tokenize(text) for token ids, or lm.embed([text]) for vectors",
    "eos_token_id": "use lm.eog_token",
    "fork": "use weft.Branch.create(lm).fork()",
    "get_tokenizer": "use lm.tokenizer",
    "grow": 'use weft.Loom(lm, "…").grow(n)',
    "reset": "use lm.clear_cache(); a new Loom or Branch needs none",
}
OF_BRANCHES: Mapping[str, str] = {
    **dict.fromkeys(
        ("agrow", "astream", "generate", "grow", "stream"),
        "grow all of them in one batch with loom.grow(n, at=branches), or one: branches[0].grow(n)",
    ),
    **dict.fromkeys(("choices", "content", "outputs", "text", "texts"), _EACH.format("text")),
    **dict.fromkeys(
        ("cumulative_logprob", "logprob", "mean_logprob"), _EACH.format("mean_logprob")
    ),
    **dict.fromkeys(("add", "measure", "next"), "it is a list of nodes; call it on branches[0]"),
    **dict.fromkeys(("show", "to_html"), "it is a list of nodes; use branches[0].parent.show()"),
    "logprobs": _EACH.format("logprobs"),
    "tokens": _EACH.format("tokens"),
}
OF_NODE: Mapping[str, str] = {
    **dict.fromkeys(("choices", "content", "generated_text", "outputs"), "use node.text"),
    **dict.fromkeys(("expand", "generate", "sample"), "use node.grow(n)"),
    **dict.fromkeys(("ids", "input_ids", "token_ids"), "use node.tokens"),
    **dict.fromkeys(("logits", "next_token_logprobs", "top_logprobs"), "use node.next(top=10)"),
    "append": "use node.add(text)",
    "cumulative_logprob": "use node.logprob",
    "fork": "use node.grow(n), or weft.Branch to draw token by token",
    "perplexity": "use math.exp(-node.mean_logprob)",
    "prob": "use node.mean_p",
    "prompt": "use loom.user_prompt, or loom.text for the text with its template",
    "root": "use node.path[0]",
}
OF_BRANCH: Mapping[str, str] = {
    **dict.fromkeys(("generate", "grow"), "draw with `for piece in branch`, or use Loom.grow"),
    **dict.fromkeys(("next", "sample"), "use branch.produce().token, which changes nothing"),
    **dict.fromkeys(("append", "step"), "use branch.commit(branch.produce().token)"),
    **dict.fromkeys(("clone", "copy"), "use branch.fork()"),
    **dict.fromkeys(("input_ids", "token_ids"), "use branch.tokens"),
    **dict.fromkeys(("n_past", "n_tokens"), "use branch.position"),
    **dict.fromkeys(("decode", "eval"), "use branch.prefill(ids), or branch.commit(token)"),
    "entropy": "use branch.model_entropy()",
    "handle": "use branch.number",
    "logprobs": "use branch.logits, or branch.produce().logprob",
    "surprisal": "use branch.model_surprisal(token)",
    "undo": "use branch.rewind(1)",
}


class Remedy:
    """A name of another library: reading it raises AttributeError with Weft's equivalent.

    NOTE: not `__getattr__`, which makes every attribute access of the class slower in CPython.
    """

    __slots__ = ("name", "text")

    def __init__(self, name: str, text: str) -> None:
        self.name = name
        self.text = text

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise AttributeError(f"{owner.__name__} has no {self.name}: {self.text}")


def remedied(remedies: Mapping[str, str], *, camel_case: bool = False) -> Callable[[T], T]:
    """Return a class decorator: reading one of these names is an error with its remedy.

    camel_case: also names as lloyal.node writes them, `retainOnly` and `forkSync`.
    """

    def decorate(cls: T) -> T:
        own = [name for name in dir(cls) if not name.startswith("_")]
        camel = {other: f"use {name}" for name in own for other in _camel_case(name)}
        for name, text in {**(camel if camel_case else {}), **remedies}.items():
            if not hasattr(cls, name):
                setattr(cls, name, Remedy(name, text))
        return cls

    return decorate


def _camel_case(name: str) -> list[str]:
    first, *others = name.split("_")
    camel = first + "".join(map(str.title, others))
    return [other for other in (camel, f"{camel}Sync") if other != name]


class HidesRemedies:
    """A base class that hides remedied names from `dir`, and so from completion."""

    __slots__ = ()

    def __dir__(self) -> list[str]:
        names = super().__dir__()
        return [name for name in names if not isinstance(_static(type(self), name), Remedy)]


def _static(cls: type, name: str) -> object:
    return next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), None)


def unknown_name(module: str, name: str) -> str:
    """Return the message of an attribute that a module lacks."""
    remedy = OF_MODULE.get(name, "") if module == "weft" else ""
    return f"module {module!r} has no attribute {name!r}" + (f": {remedy}" if remedy else "")
