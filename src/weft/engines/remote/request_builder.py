"""`RequestBuilder`: requests in a server's dialect, and parameters that the dialect lacks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ..._core.sampling.params import PARAMETERS, SamplingParams
from ..._core.tokens.tokenizer import Tokenizer
from ...constraints import GBNF, Choice, JsonSchema, Regex
from ...errors import GrammarError, Unsupported
from ..generation import GenerationRequest
from .dialect import Dialect, ServerCapabilities
from .text_pieces import GIVE_TOKENIZER, PieceTokenizer

_NEUTRAL = SamplingParams()
_FILTERS = tuple(name for name, of in PARAMETERS.items() if of.is_filter)
_PENALTIES = (
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
    "dry_multiplier",
)
# Parameters without an effect of their own, by the parameter that uses them.
_DETAILS = {
    "xtc_probability": ("xtc_threshold",),
    "dry_multiplier": tuple(
        name for name in PARAMETERS if name.startswith("dry_") and name != "dry_multiplier"
    ),
}
_MAX_BIAS = 100.0  # servers of the protocol clip larger values
_CHAT_TOP = {"logprobs": True, "top_logprobs": 1}  # some servers need both to return any
# Other servers' names of parameters → Weft's names.
_OURS = {"repeat_penalty": "repetition_penalty", "repeat_last_n": "penalty_last_n"}
_SEED = 2**31 - 1  # the largest seed that all servers accept


class RequestBuilder:
    """Builds the requests for one model of a server.

    Args:
        model: the server's name of the model.
        dialect: kind of server.
        capabilities: features of the server.
        text: tokenizer of the tree.
    """

    def __init__(
        self, model: str, dialect: Dialect, capabilities: ServerCapabilities, text: Tokenizer
    ) -> None:
        self.model = model
        self.dialect = dialect
        self.capabilities = capabilities
        self.text = text
        self.path = "/chat/completions" if capabilities.api == "chat" else "/completions"
        other = capabilities.chat if isinstance(text, PieceTokenizer) else None
        self._chat = None if other is None else RequestBuilder(model, dialect, other, text)

    def for_path(self, tokens: Sequence[int]) -> RequestBuilder:
        """Return the builder for runs after these tokens: chats are sent as messages."""
        if self._chat is not None and PieceTokenizer.has_roles(tokens):
            return self._chat
        return self

    # Unsupported parameters

    def unsupported_params(self, params: SamplingParams) -> str | None:
        """Return the reason why the server would not honour a parameter exactly; None if it honours
        all.

        The reason is of the first such parameter, which it names.
        """
        is_greedy = params.temperature == 0
        used = [
            name
            for name in (*_FILTERS, *_PENALTIES)
            if getattr(params, name) != getattr(_NEUTRAL, name)
            and not (is_greedy and name in _FILTERS)
        ]
        if params.penalty_last_n is not None and any(name in _PENALTIES for name in used):
            used.append("penalty_last_n")
        for name in used:
            if name not in self.dialect.params:
                value = getattr(params, name)
                return (
                    f"{name}={value!r}: servers of the kind {self.dialect.name!r} do not do exactly"
                    " that"
                )
        return (
            self._bias_obstacle(params)
            or self._filter_order_obstacle(params, used)
            or self._constraint_obstacle(params)
        )

    def _bias_obstacle(self, params: SamplingParams) -> str | None:
        """Return the reason why the server cannot apply `logit_bias`; None if it can."""
        if not params.logit_bias:
            return None
        if "logit_bias" not in self.dialect.params:
            return f"logit_bias: servers of the kind {self.dialect.name!r} ignore it"
        if isinstance(self.text, PieceTokenizer):
            return f"logit_bias without the model's tokenizer; give {GIVE_TOKENIZER}"
        wrong = [(t, v) for t, v in params.logit_bias if not abs(v) <= _MAX_BIAS]
        if wrong:
            token, bias = wrong[0]
            return f"a logit_bias of {bias} (token {token}): servers take -100 to 100"
        return None

    def _filter_order_obstacle(self, params: SamplingParams, used: Sequence[str]) -> str | None:
        """Return the reason why the server's order of temperature and filters gives another result
        than Weft's; None if it does not.

        used: names of the parameters that are on.
        """
        order = self.dialect.order
        cut = [name for name in used if name in _FILTERS and name != "top_k"]
        if order == "first" and {"top_p", "min_p"} <= set(cut):
            return (
                f"min_p together with top_p: {self.dialect.name} applies them in another order;"
                " top_p=1 or min_p=0 turns one off"
            )
        cut += [name for name in params.unset if name in _FILTERS]  # the server may cut by them
        if not cut or params.temperature == 1 or order == "either":
            return None
        if params.temperature_first != (order == "first"):
            return (
                f"temperature_first={params.temperature_first} with {cut[0]}:"
                f" {self.dialect.name} has the temperature {order}"
            )
        return None

    def _constraint_obstacle(self, params: SamplingParams) -> str | None:
        """Return the reason why the server cannot enforce the constraint; None if it can."""
        if params.constraint is None:
            return None
        kind = type(params.constraint).__name__
        try:
            fields = self._constraint_fields(params.constraint)
        except GrammarError as error:
            return f"the constraint {kind}, which has no grammar: {error}"
        if fields is None:
            return f"the constraint {kind}: servers of the kind {self.dialect.name!r} have none"
        return None

    def _constraint_fields(self, constraint: Any) -> dict[str, Any] | None:
        """Return the fields of a constraint; None if the server does not support it."""
        fields: dict[str, Any] = {}
        if isinstance(constraint, GBNF):
            fields["grammar"] = constraint.text
        elif isinstance(constraint, JsonSchema):
            fields["grammar"] = constraint.gbnf()
        elif isinstance(constraint, Choice):
            fields["grammar"] = "root ::= " + " | ".join(map(_quoted, constraint.texts))
        elif isinstance(constraint, Regex) and self.dialect.constraints == "structured_outputs":
            fields["regex"] = constraint.pattern
        if not fields or not self.dialect.constraints:
            return None
        return fields if self.dialect.constraints == "gbnf" else {"structured_outputs": fields}

    # Requests

    def may_continue(self) -> bool:
        """Return True if the server can continue an unfinished answer."""
        return self.capabilities.api == "completions" or self.dialect.may_continue

    def must_replay(self, params: SamplingParams) -> bool:
        """Return True if a broken text must be requested again from its start.

        The server counts for a constraint or these penalties from the start of the request.
        """
        counts = params.presence_penalty or params.frequency_penalty
        return bool(counts) or params.constraint is not None

    def shows_logprobs(self, params: SamplingParams) -> bool:
        """Return True if the server's logprobs are those of the raw distribution."""
        if not self.capabilities.logprobs:
            return False
        changed = params.logit_bias or params.constraint is not None
        changed = changed or any(
            getattr(params, name) != getattr(_NEUTRAL, name) for name in _PENALTIES
        )
        # The server's own temperature and penalties may change the distribution, too.
        sent = {"temperature", *(_OURS.get(name, name) for name in self.dialect.neutral)}
        own = sent & {"temperature", *_PENALTIES} & set(params.unset)
        changed = changed or bool(own)
        return self.capabilities.raw or (params.temperature in (0, 1) and not changed)

    def prompt(self, tokens: Sequence[int]) -> dict[str, Any]:
        """Return the fields of a prompt.

        Raises:
            Unsupported: the server cannot continue a chat's unfinished answer.
        """
        text = self.text
        if self.capabilities.api == "chat":
            assert isinstance(text, PieceTokenizer)
            messages = text.messages(tokens)
            if messages and messages[-1]["role"] == "assistant":
                if messages[-1]["content"]:
                    if not self.dialect.may_continue:
                        raise Unsupported(
                            f"chats of the kind {self.dialect.name!r} cannot continue from the"
                            " middle of an answer; generate it at once, answer it, or pass the"
                            f" model's tokenizer: {GIVE_TOKENIZER}",
                            hint="-m 'URL?tokenizer=./folder'",
                        )
                    options = {"continue_final_message": True, "add_generation_prompt": False}
                    return {"messages": messages, **options}
                messages.pop()
            return {"messages": messages}
        if self.capabilities.takes_ids:
            return {"prompt": list(tokens)}
        # The server adds its own begin token to a text.
        begins = bool(tokens) and tokens[0] == text.bos_token_id
        return {"prompt": text.decode(tokens[begins:], first=True)}

    def body(
        self,
        run: GenerationRequest,
        tokens: Sequence[int],
        streams: Sequence[int],
        n_left: int,
        *,
        with_logprobs: bool = True,
    ) -> dict[str, Any]:
        """Return the request for siblings that continue these tokens.

        Args:
            run: the generation request.
            tokens: full path, including tokens generated so far.
            streams: random stream of each sibling.
            n_left: maximum number of new tokens.
            with_logprobs: request logprobs, if the server returns them.
        """
        params, dialect, capabilities = run.params, self.dialect, self.capabilities
        body: dict[str, Any] = {
            "model": self.model,
            **self.prompt(tokens),
            "max_tokens": n_left,
            "stream": True,
            **self._neutral(params),
        }
        if len(streams) > 1:
            body["n"] = len(streams)
        if params.temperature:
            body["seed"] = streams[0] & _SEED
        body |= self._sampling_fields(params)
        if capabilities.logprobs and with_logprobs:
            body |= _CHAT_TOP if capabilities.api == "chat" else {"logprobs": dialect.top}
        if capabilities.gives_ids and dialect.ask_ids:
            body[dialect.ask_ids] = True
        if params.stop and dialect.keep_stop:
            body |= {"stop": list(params.stop), **dialect.keep_stop}
        if dialect.stop_ids and run.stop_ids and not isinstance(self.text, PieceTokenizer):
            body[dialect.stop_ids] = sorted(run.stop_ids)
        if params.constraint is not None:
            body |= self._constraint_fields(params.constraint) or {}
        return body

    def _neutral(self, params: SamplingParams) -> dict[str, Any]:
        """Return the temperature and the dialect's neutral fields, except `params.unset`."""
        unset = set(params.unset)
        if "repetition_penalty" not in unset:
            unset.discard("penalty_last_n")  # else the server's default range would apply
        fields = {**self.dialect.neutral, "temperature": params.temperature}
        return {name: value for name, value in fields.items() if _OURS.get(name, name) not in unset}

    def _sampling_fields(self, params: SamplingParams) -> dict[str, Any]:
        """Return the request's sampling fields, by the server's names."""
        fields: dict[str, Any] = {}
        names = (*_PENALTIES, *(_FILTERS if params.temperature else ()), "penalty_last_n")
        for name in names:
            value = getattr(params, name)
            # A neutral value that the caller passed replaces the server's default.
            is_given = bool(params.unset) and name not in params.unset and value is not None
            if name in self.dialect.params and (is_given or value != getattr(_NEUTRAL, name)):
                fields[self.dialect.params[name]] = value
                for detail in _DETAILS.get(name, ()):
                    value = getattr(params, detail)
                    fields[detail] = -1 if value is None else value
        if params.logit_bias:
            fields["logit_bias"] = {str(token): bias for token, bias in params.logit_bias}
        if self.dialect.samplers and not params.unset:
            cut = list(self.dialect.samplers)
            order = ["temperature", *cut] if params.temperature_first else [*cut, "temperature"]
            fields["samplers"] = ["penalties", "dry", *order]
        return fields

    def echo_body(self, tokens: Sequence[int]) -> dict[str, Any]:
        """Return the request for the logprobs of a full path's tokens."""
        return {
            "model": self.model,
            "prompt": list(tokens),
            "max_tokens": 1,
            "temperature": 0,
            "echo": True,
            "logprobs": self.dialect.top,
        }

    def full_logprobs_body(self, tokens: Sequence[int]) -> dict[str, Any]:
        """Return the request for the logprobs of all tokens after a path."""
        return {
            "model": self.model,
            "prompt": list(tokens),
            "max_tokens": 1,
            "temperature": 0,
            **self.dialect.row,
        }


def _quoted(text: str) -> str:
    """Return a text as a literal of GBNF."""
    return json.dumps(text, ensure_ascii=False)
