"""Reward models: `RewardModel` scores answers and their steps, as `value=` of any search."""

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
_MAX_CACHED_SCORES = 1 << 16


class RewardModel(Scorer):
    """A reward model that scores the nodes of a search: `tot(lm, prompt, value=reward)`.

    Use it where a trained model rates answers better than their likelihood does. `load` loads
    one, `score` rates texts without a search, and a call with nodes returns their scores.

    Higher scores are better. They are probabilities, 0 to 1, except of a classifier with one label
    and without `sigmoid`, which gives its raw output.

    `tot`, `adaptive`, `dvts` and `rebase` exclude a line whose probability is below 0.001. They do
    not with `reduce="prod"`, which is small for every long text.

    A search scores all new nodes of a round in one batch. The reward model has a token tree of its
    own, so a child costs the tokens of its own line only. The last 65,536 scores are cached; a
    text among them costs nothing.

    Attributes:
        lm: the LM of the reward model.
        kind: what the model scores; the head in its files decides. "text" (sequence
            classification): the answer so far, at its last token. "steps" (token classification,
            a process reward model): each line of the answer, at the separator after it. "judge"
            (language model): the answer so far, by the probability of the first of `words` against
            the second, after `question`.
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
        """Create a value for searches from a loaded LM; the other arguments are those of `load`."""
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
        # (prompt, line, line, …) → score, oldest first
        self._cached_scores: OrderedDict[tuple[str, ...], float] = OrderedDict()

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
        """Load a reward model for searches: `tot(lm, prompt, value=RewardModel.load(folder))`.

        The head in the model's files decides how it scores; see `kind`. Process reward models are
        those of TRL's PRMTrainer and Qwen2.5-Math-PRM, and others with a token classification head.

        Args:
            model: a folder, a Hub id or a file, as for `weft.load`; or a loaded LM.
            tokenizer, options: as for `weft.load`.
            reduce: how the scores of the steps become the score of a text: "last", "min", "prod"
                or "mean". "last" is the only one for models that score no steps.
            separator: the text after each step; the step's score is read at its last token. None: a
                newline, as in TRL, or the separator of Qwen2.5-Math-PRM.
            chat: render the prompt with the model's chat template. None: True for sequence
                classifiers and Qwen2.5-Math-PRM, if they have a template.
            system: the system message of the chat. None: no system message, except for
                Qwen2.5-Math-PRM, which gets its own.
            question: the question to a judge: a text with {prompt} and {text}, or a function of
                prompt and text that returns the question.
            words: the positive and the negative answer of a judge.
            label: index of the output to use as the score, if the head has several.
            sigmoid: map the raw output of a head with one label to 0 to 1, as `adaptive` and `mcts`
                need.

        Raises: ConfigError for arguments that do not fit the model, and the errors of `weft.load`.
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
    def is_verdict(self) -> bool:  # type: ignore[override]
        """True if scores are probabilities; not for `reduce="prod"`."""
        is_raw = self.lm.info.n_labels == 1 and not self.sigmoid
        return not is_raw and self.reduce != "prod"

    @property
    def n_tokens(self) -> int:
        """Number of tokens that the reward model has computed since it was loaded."""
        stats = self.lm.stats()
        return stats.prefilled + stats.recomputed

    def close(self) -> None:
        """Close the LM of the reward model, which frees its memory."""
        self.lm.close()

    def _steps(self, nodes: Sequence[Heddle]) -> Steps[list[float]]:
        """Return a score for the text of each node, in model calls that a search batches."""
        texts = [(_prompt_of(node), text_of(node)) for node in nodes]
        return (yield from self.score_steps(texts))

    def score_steps(self, texts: Sequence[tuple[str, str]]) -> Steps[list[float]]:
        """Like `score`, but a generator of model calls, for use in a `value` of one's own.

        texts: pairs of a prompt and an answer, complete or not.

        Returns one score per pair; 0 for an answer without a line.
        """
        prefixes = [self._scored_prefixes(prompt, text) for prompt, text in texts]
        distinct = dict.fromkeys(prefix for each in prefixes for prefix in each)
        # Another search may evict cached scores while this one waits for the model.
        cached = self._cached_scores
        known = {prefix: cached[prefix] for prefix in distinct if prefix in cached}
        missing = [prefix for prefix in distinct if prefix not in known]
        if missing:
            compute = self._verdicts if self.kind == "judge" else self._outputs
            known.update(zip(missing, (yield from compute(missing)), strict=True))
            cached.update((prefix, known[prefix]) for prefix in missing)
        scores = [[known[prefix] for prefix in each] for each in prefixes]
        while len(self._cached_scores) > _MAX_CACHED_SCORES:
            self._cached_scores.popitem(last=False)
        return [REDUCTIONS[self.reduce](each) if each else 0.0 for each in scores]

    def score(self, prompt: str, texts: Sequence[str]) -> list[float]:
        """Return one score per text, each an answer to the prompt, in one batch; blocks.

        Args:
            prompt: the question, without a chat template.
            texts: answers, complete or not. Their lines are the steps.
        """
        from .core import run

        return run(self.score_steps([(prompt, text) for text in texts]))

    def token_ids(self, prompt: str, *lines: str) -> list[int]:
        """Return the input ids of a classifier for a prompt and the lines of an answer.

        To compare with the model's own code. A process reward model gets its separator after each
        line, other classifiers newlines between them. A judge has other inputs: its question.
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

    def _scored_prefixes(self, prompt: str, text: str) -> list[tuple[str, ...]]:
        """Return the prefixes of the answer that need a score, each as (prompt, line, line, …).

        That is the full answer, or each line's prefix if `reduce` needs the scores of all steps.
        """
        lines = [line for line in text.split("\n") if line.strip()]
        if self.kind == "steps" and self.reduce != "last":
            return [(prompt, *lines[: n + 1]) for n in range(len(lines))]
        return [(prompt, *lines)] if lines else []

    def _outputs(self, prefixes: Sequence[tuple[str, ...]]) -> Steps[list[float]]:
        """Return a classifier's score of each prefix."""
        places = [self.lm.place(self.token_ids(*prefix)) for prefix in prefixes]
        items = [Extend(place, (), (Logits(place.depth),)) for place in places]
        rows = yield Read(self.lm, items)
        return [self._score_of_outputs(row) for row in rows]

    def _score_of_outputs(self, row: Any) -> float:
        """Return the score in the head's outputs [labels]: see `label` and `sigmoid` of `load`."""
        outputs = np.asarray(row, dtype=np.float64)
        if len(outputs) > 1:
            weights = np.exp(outputs - outputs.max())
            return float(weights[self.label] / weights.sum())
        return float(1 / (1 + np.exp(-outputs[0]))) if self.sigmoid else float(outputs[0])

    def _verdicts(self, prefixes: Sequence[tuple[str, ...]]) -> Steps[list[float]]:
        """Return a judge's score of each prefix."""
        questions = [self._question_for(prompt, "\n".join(lines)) for prompt, *lines in prefixes]
        verdicts = yield from verdict_steps(self.lm, questions, self.words, None)
        return verdicts.values

    def _question_for(self, prompt: str, text: str) -> str:
        if callable(self.question):
            return self.question(prompt, text)
        return self.question.replace("{prompt}", prompt).replace("{text}", text)

    def _prompt_ids(self, prompt: str) -> list[int]:
        """Return the tokens of a prompt, in the chat template if `chat` is set; cached."""
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
        """Tokens that the chat template appends to the last answer, such as an end-of-turn."""
        mark = "\ue000"
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": mark}]
        text = self.lm.text
        rendered = text.apply_chat_template(chat, add_generation_prompt=False)
        return text.encode(rendered.rpartition(mark)[2], special=True, add_bos=False)

    @cached_property
    def _prompts(self) -> dict[str, list[int]]:
        return {}


def _is_token(lm: LM, text: str) -> bool:
    """Return True if the text is one token of the model."""
    return len(lm.text.encode(text, special=True, add_bos=False)) == 1


def _prompt_of(node: Heddle) -> str:
    """Return the user's prompt of a node's loom, or the root's text if there was no chat."""
    root = node.path[0]
    return root.user_prompt if isinstance(root, Loom) and root.user_prompt else root.text
