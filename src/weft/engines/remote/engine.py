"""`RemoteEngine`: a model behind an address, with its KV, its sampling and its weights."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..._core.sampling.params import CHAT_SAMPLING, SERVER_SAMPLING, ModelDefaults, SamplingParams
from ..._core.tokens.tokenizer import Tokenizer
from ..._core.validation import check_int, check_number
from ...errors import ConfigError, ForwardError, Unsupported
from ..base import (
    UNKNOWN_CONTEXT_LENGTH,
    Capabilities,
    Engine,
    EngineInfo,
    FutureTokens,
    HostOutput,
    Row,
)
from ..capabilities import OWN
from ..hub import EMBEDDED, SMOLLM2, tokenizer_of
from .address import Address
from .dialect import ServerCapabilities
from .probe import ServerInfo, find
from .remote_logprobs import RemoteLogprobs
from .request_builder import RequestBuilder
from .requests import RemoteRuns
from .text_pieces import PieceTokenizer
from .token_matching import TokenMatcher
from .transport import RetryPolicy, Transport

MOST = 64


class RemoteEngine(Engine):
    """A server of OpenAI's completions or chat protocol. Made by `load`."""

    fragments = None

    def __init__(
        self,
        transport: Transport,
        found: ServerInfo,
        text: Tokenizer,
        *,
        most: int,
        together: bool,
        n_ctx: int | None,
        steps: bool,
    ) -> None:
        is_pieces = isinstance(text, PieceTokenizer)
        self._transport = transport
        self._text = text
        self._builder = RequestBuilder(found.model, found.dialect, found.capabilities, text)
        n_vocab = 0 if is_pieces else text.n_vocab
        self._rows = RemoteLogprobs(transport, self._builder, n_vocab=n_vocab, most=most)
        if steps:
            n_vocab = transport.run(_width(self._rows, text, transport.address.base))
            self._rows = RemoteLogprobs(transport, self._builder, n_vocab=n_vocab, most=most)
        self.info = EngineInfo(
            name="remote",
            model=transport.address.short_name(found.model),
            n_layers=0,
            n_vocab=n_vocab,
            context_length=found.n_ctx or n_ctx or UNKNOWN_CONTEXT_LENGTH,
            kv_bytes_per_token=0,
            dtype="the server's",
            fingerprint=_fingerprint(found, text),
            device=transport.address.host,
            kv="hidden",
            capabilities=_capabilities_of(found, steps=steps),
            temperature_first=found.dialect.order == "first",
            own_random=True,
            extra={
                "address": transport.address.with_model(found.model),
                "server": found.dialect.name,
                "manners": found.capabilities,
            },
        )
        spelling = TokenMatcher(text, n_vocab)
        self.native: RemoteRuns = RemoteRuns(
            transport, self._builder, spelling, most=most, together=together
        )

    @classmethod
    def load(
        cls,
        url: str,
        *,
        model: str = "",
        token: str | None = None,
        tokenizer: Tokenizer | None = None,
        n_ctx: int | None = None,
        dialect: str = "auto",
        api: str = "auto",
        manners: ServerCapabilities | None = None,
        most: int = MOST,
        together: bool | None = None,
        steps: bool = False,
        connect_s: float = 10.0,
        first_s: float = 600.0,
        between_s: float = 120.0,
        retries: int = 4,
        proxy: str | None = None,
    ) -> RemoteEngine:
        """Ask a server what it is and does; see docs/remote.md.

        url: `http://host:8000/v1`, and behind a # the model and further options of these:
        `…/v1#model?tokenizer=./folder`. tokenizer: None grows text alone. dialect: what kind of
        server it is, and api: "completions" or "chat", where they are not to be found out. manners:
        what it does; nothing is asked then. most: siblings on their way at once. together: siblings
        share a request. steps: ask for whole rows of logprobs, too, which a vLLM server gives
        that was started with `--max-logprobs -1`: all faces work then, each step at the price of a
        row of JSON. connect_s, first_s, between_s, retries: see `RetryPolicy`.
        """
        address = Address.read(url, model)
        given: dict[str, Any] = {
            "n_ctx": n_ctx, "dialect": dialect, "api": api, "most": most, "together": together,
            "steps": steps,
            "connect_s": connect_s, "first_s": first_s, "between_s": between_s, "retries": retries,
        }  # fmt: skip
        given = _with_texts(given, address.options)
        if tokenizer is None and "tokenizer" in address.options:
            address, tokenizer = _with_tokenizer(address)
        if given["api"] not in ("auto", "completions", "chat"):
            raise ConfigError(f"api is {given['api']!r}; allowed are auto, completions and chat")
        retry_policy = _retry_policy(given)
        transport = Transport(address, address.key(token), retry_policy, proxy)
        try:
            found = transport.run(
                find(
                    transport,
                    address.model,
                    tokenizer,
                    given["dialect"],
                    manners,
                    given["api"],
                )
            )
            most = check_int("most", given["most"], 1)
            if found.dialect.most is not None:
                most = min(most, found.dialect.most)
            shared = given["together"]
            if shared and not found.capabilities.n:
                raise Unsupported(f"{address.base} gives one choice a request: leave together out")
            if shared is None:  # where seeds count, each text must depend on its own alone
                shared = found.capabilities.n and not found.dialect.seeded
            is_chat = found.capabilities.api == "chat" or found.capabilities.chat is not None
            if given["steps"] and (
                tokenizer is None or not found.dialect.row or not found.capabilities.takes_ids
            ):
                raise Unsupported(
                    f"{address.base} is no server of whole rows (steps): these are vLLM's, started"
                    " with --max-logprobs -1, with tokenizer=… here"
                )
            return cls(
                transport,
                found,
                tokenizer or PieceTokenizer(is_chat=is_chat, made_from=found.root),
                most=most,
                together=bool(shared),
                steps=bool(given["steps"]),
                n_ctx=None if given["n_ctx"] is None else check_int("n_ctx", given["n_ctx"], 1),
            )
        except BaseException:
            transport.stop()
            raise

    def tokenizer(self) -> Tokenizer:
        return self._text

    def sampling_defaults(self) -> ModelDefaults:
        """Return the defaults of the model; in chats the server chooses the sampling.

        With `steps` Weft draws some tokens itself. Chats then use `CHAT_SAMPLING`, without filters
        that the server applies in another way.
        """
        first = self.info.temperature_first
        if not self.info.capabilities.steps:
            chat = SamplingParams(temperature_first=first, unset=SERVER_SAMPLING)
            return ModelDefaults(SamplingParams(), chat)
        chat = SamplingParams(temperature=CHAT_SAMPLING["temperature"], temperature_first=first)
        for name in ("top_p", "top_k", "min_p"):
            tried = replace(chat, **{name: CHAT_SAMPLING[name]})
            if self._builder.unsupported_params(tried) is None:
                chat = tried
        return ModelDefaults(SamplingParams(), chat)

    def forward(self, rows: Sequence[Row]) -> HostOutput:
        """Run rows where the server gives whole rows (`steps`), else score given tokens by echo.

        Cost: a request a place, `most` at once; the server prefills what it has not cached.
        """
        if self._transport.is_closed:
            raise ForwardError("this engine is closed; load it again")
        if any(row.adapter is not None for row in rows):
            raise Unsupported(f"{self.info.model} has no adapters")
        self._check(rows)
        if self.info.capabilities.steps:
            return self._transport.run(self._rows.whole(rows))
        if not self.info.capabilities.scoring or any(row.logits_at for row in rows):
            raise Unsupported(f"{self.info.model} gives no logits rows")
        return self._transport.run(self._rows.scored(rows))

    def _check(self, rows: Sequence[Row]) -> None:
        """Refuse rows that are no paths of this model."""
        for row in rows:
            ids = [] if isinstance(row.tokens, FutureTokens) else list(row.tokens)
            n_vocab = self.info.n_vocab
            if not ids or not 0 <= min(ids) or (n_vocab and max(ids) >= n_vocab):
                raise ForwardError(
                    f"a row has ids {ids[:8]}; allowed are 0 to {n_vocab - 1}, at least one"
                )
            if len(ids) > self.info.context_length:
                raise ForwardError(
                    f"a row of {len(ids)} tokens; the context is {self.info.context_length}"
                )

    def close(self) -> None:
        self._transport.stop()

    def __repr__(self) -> str:
        return f"<RemoteEngine {self.info.model}>"


async def _width(rows: RemoteLogprobs, text: Tokenizer, base: str) -> int:
    """Return how many tokens a whole row has. Raises: Unsupported where rows are not whole."""
    try:
        found = await rows.likeliest(text.continuation("The")[:4])
    except ForwardError as error:
        raise Unsupported(
            f"{error}; whole rows (steps) want a vLLM server started with --max-logprobs -1"
        ) from None
    mass = sum(map(math.exp, found.values()))
    if (
        sorted(found) != list(range(len(found)))
        or len(found) < text.n_vocab
        or abs(mass - 1) > 0.01
    ):
        raise Unsupported(
            f"{base} gives {len(found)} logprobs of a row, with {mass:.3f} of its probability;"
            f" whole rows (steps) have {text.n_vocab} or more: start it with --max-logprobs -1"
        )
    return len(found)


def _capabilities_of(found: ServerInfo, *, steps: bool) -> Capabilities:
    capabilities = found.capabilities
    return replace(
        OWN["remote"],
        steps=steps,
        raw_logits=False,
        scoring=steps or (capabilities.echo and capabilities.takes_ids),
        continues=capabilities.api == "completions" or found.dialect.may_continue,
        grammar="Weft" if steps else OWN["remote"].grammar if found.dialect.constraints else "",
    )


def _fingerprint(found: ServerInfo, text: Tokenizer) -> str:
    """Return what marks this server's model: its name there, and whose tokens paths are.

    The address is no part of it: a server may move. That two servers' models of one name are the
    same one cannot be seen from here.
    """
    mark = hashlib.sha256(f"remote\0{found.model}\0{found.capabilities.api}\0".encode())
    if not isinstance(text, PieceTokenizer):
        for each in text.vocab_bytes:
            mark.update(each + b"\0")
    return f"remote-{mark.hexdigest()[:32]}"


def _retry_policy(given: dict[str, Any]) -> RetryPolicy:
    return RetryPolicy(
        **{
            name: check_number(name, given[name], low=0.0, open_low=True)
            for name in ("connect_s", "first_s", "between_s")
        },
        retries=check_int("retries", given["retries"], 0),
    )


def _with_tokenizer(address: Address) -> tuple[Address, Tokenizer]:
    """Return the tokenizer that an address names, and the address with that file's full path."""
    name = address.options["tokenizer"]
    text = tokenizer_of(name)
    if name not in (EMBEDDED, SMOLLM2) and (path := Path(name).expanduser()).exists():
        name = str(path.resolve())
    return replace(address, options={**address.options, "tokenizer": name}), text


def _yes_or_no(text: str) -> bool:
    if text not in ("yes", "no"):
        raise ValueError(text)
    return text == "yes"


_READ: dict[str, Callable[[str], Any]] = {
    "n_ctx": int, "dialect": str, "api": str, "most": int, "together": _yes_or_no,
    "steps": _yes_or_no, "connect_s": float, "first_s": float, "between_s": float, "retries": int,
}  # fmt: skip


def _with_texts(given: dict[str, Any], texts: dict[str, str]) -> dict[str, Any]:
    """Return the options with those that stand in the address."""
    found = dict(given)
    for name, text in texts.items():
        if name == "tokenizer":
            continue
        if name not in _READ:
            allowed = ", ".join(["tokenizer", *_READ])
            raise ConfigError(f"the address has the option {name!r}; allowed are {allowed}")
        try:
            found[name] = _READ[name](text)
        except ValueError:
            raise ConfigError(f"the address says {name}={text}, which is no value for it") from None
    return found
