"""`WeftLM`: the harness's requests, answered by one `weft.LM`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from lm_eval import utils
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from tqdm import tqdm

import weft
from weft import Loom
from weft.errors import ConfigError

# A request as the harness tokenizes it: its texts, the context's ids and the continuation's ids.
Tokenized = tuple[Any, list[int], list[int]]

_ENCODED_CONTEXTS = 4096  # a context is tokenized once for all of its continuations
_DEFAULT_DEVICE = "cuda:0"  # what the command passes if the user names no device
# Sampling parameters with the same name and meaning in Weft.
_SAMPLING = ("top_p", "top_k", "min_p", "typical_p", "repetition_penalty", "seed")


@register_model("weft")
class WeftLM(TemplateLM):
    """A model that runs in Weft, in the process of the harness."""

    def __init__(
        self,
        model: str,
        *,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        add_bos_token: bool | None = None,
        device: str | None = None,
        batch_size: int | str | None = None,
        max_batch_size: int | None = None,
        **load_options: Any,
    ) -> None:
        """Load a model.

        Args:
            model: what `weft.load` accepts: a folder, a Hub id, a GGUF file, or "tiny".
            max_length: maximum number of tokens that a prediction depends on; longer requests lose
                their first tokens. None: the model's context.
            max_gen_toks: new tokens of a task that sets no maximum.
            add_bos_token: whether texts begin with the BOS token; None: as the tokenizer does.
            device, load_options: as for `weft.load`.
            batch_size, max_batch_size: accepted from the command line without effect. Weft's
                scheduler fills each step.
        """
        super().__init__()
        if device in (None, _DEFAULT_DEVICE):
            device = "auto"
        self.lm = weft.load(model, device=device, **load_options)
        self._name = str(model)
        self._max_length = max_length
        self.max_gen_toks = int(max_gen_toks)
        self._add_bos_token = add_bos_token
        self._encode = lru_cache(_ENCODED_CONTEXTS)(self._encode_uncached)

    # Tokens

    @property
    def eot_token_id(self) -> int:
        """The end-of-text token."""
        return self.lm.eog_token

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context: BOS, else the end-of-text token."""
        bos = self.lm.text.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def max_length(self) -> int:
        """Maximum number of tokens that a prediction depends on."""
        return self.lm.n_ctx if self._max_length is None else int(self._max_length)

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Return the token ids of a text, in which special tokens are parsed."""
        return list(self._encode(string, add_special_tokens))

    def _encode_uncached(self, string: str, add_special_tokens: bool | None) -> tuple[int, ...]:
        text, add_bos = self.lm.text, add_special_tokens
        if add_bos is None:
            is_begun = string.startswith(text.token_text(self.prefix_token_id))
            add_bos = False if is_begun else self._add_bos_token
        # True means what it means in Transformers: whatever the tokenizer adds by itself.
        ids = text.encode(string, special=True, add_bos=False if add_bos is False else None)
        return tuple(ids)

    # Scores

    def _loglikelihood_tokens(
        self, requests: Sequence[Tokenized], disable_tqdm: bool = False, **_: Any
    ) -> list[tuple[float, bool]]:
        """Return (log-probability, is greedy) of each continuation.

        Requests with equal contexts are one prompt with several candidates.
        """
        by_context: dict[tuple[int, ...], list[int]] = {}
        for index, (_texts, context, continuation) in enumerate(requests):
            n_kept = max(self.max_length + 1 - len(continuation), 1)
            by_context.setdefault(tuple(context[-n_kept:]), []).append(index)
        prompts = [
            (list(context), [requests[index][2] for index in indices])
            for context, indices in by_context.items()
        ]
        groups = list(by_context.values())
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        with tqdm(
            total=len(requests), disable=disable_tqdm, desc="Running loglikelihood requests"
        ) as progress:
            for number, scores in self.lm.score_many(prompts):
                for index, score in zip(groups[number], scores, strict=True):
                    answers[index] = (score.total, bool(score.is_greedy))
                    if requests[index][0] is not None:
                        self.cache_hook.add_partial(
                            "loglikelihood", requests[index][0], answers[index]
                        )
                progress.update(len(scores))
        return answers

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-probability of each text, in windows of the context length."""
        owners: list[int] = []
        windows: list[Tokenized] = []
        for number, request in enumerate(requests):
            for window in utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            ):
                owners.append(number)
                windows.append((None, *utils.make_disjoint_window(window)))
        totals = [0.0] * len(requests)
        for owner, (total, _) in zip(
            owners, self._loglikelihood_tokens(windows, disable_tqdm), strict=True
        ):
            totals[owner] += total
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    # Texts

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return a continuation of each context; those with equal options run in one batch."""
        by_options: dict[str, list[int]] = {}
        for index, request in enumerate(requests):
            by_options.setdefault(repr(sorted(request.args[1].items())), []).append(index)
        answers = [""] * len(requests)
        with tqdm(
            total=len(requests), disable=disable_tqdm, desc="Running generate_until requests"
        ) as progress:
            for indices in by_options.values():
                texts = self._generate([requests[index].args for index in indices])
                for index, text in zip(indices, texts, strict=True):
                    answers[index] = text
                    self.cache_hook.add_partial("generate_until", requests[index].args, text)
                progress.update(len(indices))
        return answers

    def _generate(self, requests: Sequence[tuple[str, dict[str, Any]]]) -> list[str]:
        options = dict(normalize_gen_kwargs(requests[0][1], self.max_gen_toks))
        until = [text for text in options["until"] if text]
        n_new = options["max_gen_toks"]
        if n_new >= self.max_length:
            raise ConfigError(
                f"max_gen_toks is {n_new}, but the context is {self.max_length}; give less"
            )
        sampling = {name: options[name] for name in _SAMPLING if name in options}
        sampling["temperature"] = options.get("temperature", 1.0) if options["do_sample"] else 0.0
        n_kept = self.max_length - n_new
        looms = [Loom(self.lm, self.tok_encode(context)[-n_kept:]) for context, _ in requests]
        children = looms[0].grow(
            at=looms, stop=until or None, max_tokens=n_new, show=False, force=True, **sampling
        )
        special = self.lm.text.special_ids
        return [
            postprocess_generated_text(
                self.lm.detokenize([token for token in child.tokens if token not in special]),
                until,
                None,
            )
            for child in children
        ]

    # Chats

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a chat as text. Without a generation prompt, it ends inside the last message."""
        rendered = self.lm.text.apply_chat_template(
            chat_history, add_generation_prompt=add_generation_prompt
        )
        if add_generation_prompt:
            return rendered
        last = chat_history[-1]["content"]
        start = rendered.rindex(last.strip())
        is_complete = rendered[start:].startswith(last.lstrip())
        return rendered[:start] + (last.lstrip() if is_complete else last.strip())

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Return the model's chat template; None if the harness uses none."""
        return self.lm.text.chat_template if chat_template else None

    @property
    def tokenizer_name(self) -> str:
        """The model's name, for the harness's cache of requests."""
        return self._name.replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """Return facts about the model for the harness's report."""
        info = self.lm.info
        return {"model_dtype": info.dtype, "weft_engine": info.name, "weft": weft.__version__}
