"""Reward models: scores of answers and of their steps, with KV shared over the tree of texts."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np

from .._core.sched.work import Extend, Logits
from .._core.validation import check_choice
from ..errors import ConfigError
from ..lm.lm import LM
from ..loom import Heddle, Loom
from .core import Read, Steps, text_of
from .score import Scorer, verdict_steps

Reduce = Literal["last", "min", "prod", "mean"]
REDUCTIONS: dict[str, Callable[[Sequence[float]], float]] = {
    "last": lambda scores: scores[-1],
    "min": min,
    "prod": math.prod,
    "mean": lambda scores: math.fsum(scores) / len(scores),
}
QUESTION = "{prompt}\n\n{text}\n\nIs this correct so far? Answer Yes or No."
# What Qwen2.5-Math-PRM expects.
_QWEN_SYSTEM = "Please reason step by step, and put your final answer within \\boxed{}."
_QWEN_SEPARATOR = "<extra_0>"
_KNOWN = 1 << 16  # scores that are kept


class RewardModel(Scorer):
    """A value for any search: the score that a reward model gives to each node's text.

    All nodes of a round are one batch. The reward model's KV is a token tree of its own. So a child
    costs its own tokens only, and a text is never scored twice.

    Attributes:
        lm: the reward model.
        kind: "text": a sequence classifier, scored at the last token. "steps": a process reward
            model, scored at each step's separator. "judge": a language model, whose score is the
            probability of the first of two words after a question.
    """

    def __init__(
        self,
        lm: LM,
        *,
        reduce: Reduce = "last",
        separator: str | None = None,
        chat: bool | None = None,
        system: str | None = None,
        question: str | Callable[[str, str], str] = QUESTION,
        words: tuple[str, str] = ("Yes", "No"),
        label: int = -1,
        sigmoid: bool = False,
    ) -> None:
        """Wrap a loaded reward model; arguments as for `load`."""
        super().__init__(self._steps)
        check_choice("reduce", reduce, get_args(Reduce))
        info = lm.info
        self.lm = lm
        self.kind = {"language": "judge", "sequence": "text", "steps": "steps"}[info.head]
        if reduce != "last" and self.kind != "steps":
            raise ConfigError(f"reduce is {reduce!r}, but this model scores only full texts")
        if info.n_labels and not -info.n_labels <= label < info.n_labels:
            raise ConfigError(f"label is {label}; the model has {info.n_labels} labels")
        is_qwen = self.kind == "steps" and _is_token(lm, _QWEN_SEPARATOR)
        self.reduce = reduce
        self.separator = separator or (_QWEN_SEPARATOR if is_qwen else "\n")
        has_template = lm.text.chat_template is not None
        self.chat = (self.kind == "text" or is_qwen) and has_template if chat is None else chat
        self.system = _QWEN_SYSTEM if system is None and is_qwen and self.chat else system
        self.question = question
        self.words = words
        self.label = label
        self.sigmoid = sigmoid
        self._known: OrderedDict[tuple[str, ...], float] = OrderedDict()

    @classmethod
    def load(
        cls,
        model: Any,
        tokenizer: Any = None,
        *,
        reduce: Reduce = "last",
        separator: str | None = None,
        chat: bool | None = None,
        system: str | None = None,
        question: str | Callable[[str, str], str] = QUESTION,
        words: tuple[str, str] = ("Yes", "No"),
        label: int = -1,
        sigmoid: bool = False,
        **options: Any,
    ) -> RewardModel:
        """Load a reward model and return it as a value: `tot(…, value=RewardModel.load(…))`.

        Its files decide its kind. A sequence classification head scores texts. A token
        classification head (TRL's PRMTrainer, Qwen2.5-Math-PRM) scores steps. A language model
        judges.

        Args:
            model, tokenizer, options: as for `weft.load`; or a loaded LM.
            reduce: the score of a text from those of its steps: "last", "min", "prod" or "mean".
            separator: the text after each step, at whose last token its score is read. None: a line
                end, as TRL's; or that of Qwen2.5-Math-PRM.
            chat: put the prompt into the model's chat template. None: for sequence classifiers and
                Qwen2.5-Math-PRM, if they have a template.
            system: the system message of the chat; None: none, or that of Qwen2.5-Math-PRM.
            question: of a judge: a text with {prompt} and {text}, or a function of both.
            words: of a judge: the positive and the negative answer.
            label: the index of the score among the head's outputs. With two labels or more a score
                is a probability, with one it is the raw output.
            sigmoid: map a raw output to a probability, which `adaptive` needs.

        Raises: ConfigError, and the errors of `weft.load`.
        """
        if not isinstance(model, LM):
            from ..loading import load

            model = load(model, tokenizer, **options)
        return cls(
            model,
            reduce=reduce,
            separator=separator,
            chat=chat,
            system=system,
            question=question,
            words=words,
            label=label,
            sigmoid=sigmoid,
        )

    @property
    def n_tokens(self) -> int:
        """The tokens that the reward model has computed so far."""
        stats = self.lm.stats()
        return stats.prefilled + stats.recomputed

    def close(self) -> None:
        """Release the model's memory."""
        self.lm.close()

    def _steps(self, nodes: Sequence[Heddle]) -> Steps[list[float]]:
        """Return the score of each node's text."""
        texts = [(_prompt_of(node), text_of(node)) for node in nodes]
        return (yield from self.score_steps(texts))

    def score_steps(self, texts: Sequence[tuple[str, str]]) -> Steps[list[float]]:
        """Return the scores of (prompt, answer so far) pairs, as work of a search.

        An answer without steps has the score 0.
        """
        paths = [self._paths(prompt, text) for prompt, text in texts]
        wanted = dict.fromkeys(path for each in paths for path in each)
        missing = [path for path in wanted if path not in self._known]
        if missing:
            read = self._verdicts if self.kind == "judge" else self._outputs
            for path, score in zip(missing, (yield from read(missing)), strict=True):
                self._known[path] = score
        scores = [[self._known[path] for path in each] for each in paths]
        while len(self._known) > _KNOWN:
            self._known.popitem(last=False)
        return [REDUCTIONS[self.reduce](each) if each else 0.0 for each in scores]

    def score(self, prompt: str, texts: Sequence[str]) -> list[float]:
        """Return the scores of answers to a prompt, in one batch."""
        from .core import run

        return run(self.score_steps([(prompt, text) for text in texts]))

    def token_ids(self, prompt: str, *lines: str) -> list[int]:
        """Return the tokens that a classifier reads: the prompt, and the answer's lines.

        A process reward model ("steps") reads its separator after each line. A judge reads its
        question instead.
        """
        text = self.lm.text
        if self.kind != "steps":
            pieces = [line + "\n" for line in lines[:-1]] + list(lines[-1:])
            ends = self._closing if self.chat else []
            answer = (token for piece in pieces for token in text.continuation(piece))
            return [*self._prompt_ids(prompt), *answer, *ends]
        ends = text.encode(self.separator, special=True, add_bos=False)
        steps = (token for line in lines for token in [*text.encode(line, add_bos=False), *ends])
        return [*self._prompt_ids(prompt), *steps]

    # Its parts

    def _paths(self, prompt: str, text: str) -> list[tuple[str, ...]]:
        """Return the texts to score, each as the prompt and lines of the answer."""
        lines = [line for line in text.split("\n") if line.strip()]
        if self.kind == "steps" and self.reduce != "last":
            return [(prompt, *lines[: n + 1]) for n in range(len(lines))]
        return [(prompt, *lines)] if lines else []

    def _outputs(self, paths: Sequence[tuple[str, ...]]) -> Steps[list[float]]:
        places = [self.lm.place(self.token_ids(*path)) for path in paths]
        items = [Extend(place, (), (Logits(place.depth),)) for place in places]
        rows = yield Read(self.lm, items)
        return [self._number(row) for row in rows]

    def _number(self, row: Any) -> float:
        outputs = np.asarray(row, dtype=np.float64)
        if len(outputs) > 1:
            weights = np.exp(outputs - outputs.max())
            return float(weights[self.label] / weights.sum())
        return float(1 / (1 + np.exp(-outputs[0]))) if self.sigmoid else float(outputs[0])

    def _verdicts(self, paths: Sequence[tuple[str, ...]]) -> Steps[list[float]]:
        questions = [self._question_for(prompt, "\n".join(lines)) for prompt, *lines in paths]
        verdicts = yield from verdict_steps(self.lm, questions, self.words, None)
        return verdicts.values

    def _question_for(self, prompt: str, text: str) -> str:
        if callable(self.question):
            return self.question(prompt, text)
        return self.question.replace("{prompt}", prompt).replace("{text}", text)

    def _prompt_ids(self, prompt: str) -> list[int]:
        if prompt not in self._prompts:
            if self.kind == "steps" and not self.chat:
                text = self.lm.text
                self._prompts[prompt] = text.encode(prompt, add_bos=text.bos_token_id is not None)
            else:
                loom = Loom(self.lm, prompt, system=self.system, template=self.chat)
                self._prompts[prompt] = loom.tokens
        return self._prompts[prompt]

    @cached_property
    def _closing(self) -> list[int]:
        """The tokens that the chat template writes after the last answer."""
        mark = "\ue000"
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": mark}]
        text = self.lm.text
        rendered = text.apply_chat_template(chat, add_generation_prompt=False)
        return text.encode(rendered.rpartition(mark)[2], special=True, add_bos=False)

    @cached_property
    def _prompts(self) -> dict[str, list[int]]:
        return {}


def _is_token(lm: LM, text: str) -> bool:
    return len(lm.text.encode(text, special=True, add_bos=False)) == 1


def _prompt_of(node: Heddle) -> str:
    root = node.path[0]
    return root.user_prompt if isinstance(root, Loom) and root.user_prompt else root.text
