"""`RemoteEngine`: a model behind an address; the server has its weights, KV and sampling."""

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
from .probe import ServerInfo, probe_server
from .remote_logprobs import RemoteLogprobs
from .request_builder import RequestBuilder
from .requests import RemoteRuns
from .text_pieces import PieceTokenizer
from .token_matching import TokenMatcher
from .transport import RetryPolicy, Transport

MAX_CONCURRENT = 64


class RemoteEngine(Engine):
    """A server of OpenAI's completions or chat protocol. Created by `load`."""

    fragments = None

    def __init__(
        self,
        transport: Transport,
        server: ServerInfo,
        text: Tokenizer,
        *,
        max_concurrent: int,
        together: bool,
        n_ctx: int | None,
        steps: bool,
    ) -> None:
        """Connect the parts; `load` creates them.

        Args:
            transport: connection to the server.
            server: the model and its features.
            text: the model's tokenizer, or a `PieceTokenizer`.
            max_concurrent: maximum number of siblings in flight.
            together: siblings share a request.
            n_ctx: context length in tokens; None: unknown.
            steps: the server returns logprobs of the full vocabulary.
        """
        is_pieces = isinstance(text, PieceTokenizer)
        self._transport = transport
        self._text = text
        self._builder = RequestBuilder(server.model, server.dialect, server.capabilities, text)
        n_vocab = 0 if is_pieces else text.n_vocab
        self._rows = RemoteLogprobs(
            transport, self._builder, n_vocab=n_vocab, max_concurrent=max_concurrent
        )
        if steps:
            n_vocab = transport.run(_full_row_size(self._rows, text, transport.address.base))
            self._rows = RemoteLogprobs(
                transport, self._builder, n_vocab=n_vocab, max_concurrent=max_concurrent
            )
        self.info = EngineInfo(
            name="remote",
            model=transport.address.short_name(server.model),
            n_layers=0,
            n_vocab=n_vocab,
            context_length=server.n_ctx or n_ctx or UNKNOWN_CONTEXT_LENGTH,
            kv_bytes_per_token=0,
            dtype="the server's",
            fingerprint=_fingerprint(server, text),
            device=transport.address.host,
            kv="hidden",
            capabilities=_capabilities_of(server, steps=steps),
            temperature_first=server.dialect.order == "first",
            own_random=True,
            extra={
                "address": transport.address.with_model(server.model),
                "server": server.dialect.name,
                "manners": server.capabilities,
            },
        )
        matcher = TokenMatcher(text, n_vocab)
        self.native: RemoteRuns = RemoteRuns(
            transport, self._builder, matcher, max_in_flight=max_concurrent, together=together
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
        most: int = MAX_CONCURRENT,
        together: bool | None = None,
        steps: bool = False,
        connect_s: float = 10.0,
        first_s: float = 600.0,
        between_s: float = 120.0,
        retries: int = 4,
        proxy: str | None = None,
    ) -> RemoteEngine:
        """Connect to a server and probe its features; see docs/remote.md.

        Args:
            url: `http://host:8000/v1`, optionally with a model and options in the fragment:
                `…/v1#model?tokenizer=./folder`.
            model: the server's name of the model; "" for its only model.
            token: API key.
            tokenizer: the model's tokenizer; None to grow text without one.
            n_ctx: context length, if the server does not report it.
            dialect: kind of server; "auto" to detect it.
            api: "completions", "chat", or "auto" to detect it.
            manners: features of the server; the probe is skipped then.
            most: maximum number of siblings in flight.
            together: siblings share a request; None to decide by the server's seeds.
            steps: request logprobs of the full vocabulary, too, from a vLLM server that was started
                with `--max-logprobs -1`. All interfaces work then; each step costs one row of JSON.
            connect_s: see `RetryPolicy`, like `first_s`, `between_s` and `retries`.
            proxy: URL of an HTTP proxy.
        """
        address = Address.parse(url, model)
        given: dict[str, Any] = {
            "n_ctx": n_ctx, "dialect": dialect, "api": api, "most": most, "together": together,
            "steps": steps,
            "connect_s": connect_s, "first_s": first_s, "between_s": between_s, "retries": retries,
        }  # fmt: skip
        given = _apply_address_options(given, address.options)
        if tokenizer is None and "tokenizer" in address.options:
            address, tokenizer = _with_tokenizer(address)
        if given["api"] not in ("auto", "completions", "chat"):
            raise ConfigError(f"api is {given['api']!r}; allowed are auto, completions and chat")
        retry_policy = _retry_policy(given)
        transport = Transport(address, address.key(token), retry_policy, proxy)
        try:
            server = transport.run(
                probe_server(
                    transport,
                    address.model,
                    tokenizer,
                    given["dialect"],
                    manners,
                    given["api"],
                )
            )
            max_concurrent = check_int("most", given["most"], 1)
            if server.dialect.max_concurrent is not None:
                max_concurrent = min(max_concurrent, server.dialect.max_concurrent)
            shared = given["together"]
            if shared and not server.capabilities.n:
                raise Unsupported(
                    f"{address.base} returns one choice per request: leave out together"
                )
            if shared is None:  # with seeds, each text must depend only on its own seed
                shared = server.capabilities.n and not server.dialect.seeded
            is_chat = server.capabilities.api == "chat" or server.capabilities.chat is not None
            if given["steps"] and (
                tokenizer is None or not server.dialect.row or not server.capabilities.takes_ids
            ):
                raise Unsupported(
                    f"{address.base} does not return full rows (steps): use a vLLM server started"
                    " with --max-logprobs -1, with tokenizer=… here"
                )
            return cls(
                transport,
                server,
                tokenizer or PieceTokenizer(is_chat=is_chat, base_model=server.root),
                max_concurrent=max_concurrent,
                together=bool(shared),
                steps=bool(given["steps"]),
                n_ctx=None if given["n_ctx"] is None else check_int("n_ctx", given["n_ctx"], 1),
            )
        except BaseException:
            transport.stop()
            raise

    def tokenizer(self) -> Tokenizer:
        """Return the tokenizer given to `load`; without one, a `PieceTokenizer`."""
        return self._text

    def sampling_defaults(self) -> ModelDefaults:
        """Return the default parameters; they do not depend on the model's files.

        Raw prompts use temperature 1 without filters. In chats the server chooses the sampling.
        With `steps`, Weft samples some tokens itself. Chats then use `CHAT_SAMPLING`, without
        filters that the server applies differently.
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
        """Return logits and scores of rows; see `Engine.forward`.

        With `steps`, the server returns logprobs of the full vocabulary, which are used as logits.
        Without it, only scores are possible: the server returns the logprobs of a prompt's tokens.

        Cost: with `steps`, one request per position; else one per score span. At most `most` run at
        once. The server prefills tokens that it has not cached.

        Raises:
            Unsupported: logits without `steps`, scores on a server without echo, or an adapter.
            ForwardError: a row is invalid, the server failed, or the engine is closed.
        """
        if self._transport.is_closed:
            raise ForwardError("this engine is closed; load it again")
        if any(row.adapter is not None for row in rows):
            raise Unsupported(f"{self.info.model} has no adapters")
        self._check(rows)
        if self.info.capabilities.steps:
            return self._transport.run(self._rows.full_logits(rows))
        if not self.info.capabilities.scoring or any(row.logits_at for row in rows):
            raise Unsupported(f"{self.info.model} returns no logits")
        return self._transport.run(self._rows.score(rows))

    def _check(self, rows: Sequence[Row]) -> None:
        """Raise an error for rows that are not valid paths of this model."""
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
        """Cancel all requests and close the connection. Idempotent."""
        self._transport.stop()

    def __repr__(self) -> str:
        return f"<RemoteEngine {self.info.model}>"


async def _full_row_size(rows: RemoteLogprobs, text: Tokenizer, base: str) -> int:
    """Return the number of logprobs in a full row.

    Raises:
        Unsupported: the server does not return full rows.
    """
    try:
        logprobs = await rows.top_logprobs(text.continuation("The")[:4])
    except ForwardError as error:
        raise Unsupported(
            f"{error}; full rows (steps) need a vLLM server started with --max-logprobs -1"
        ) from None
    mass = sum(map(math.exp, logprobs.values()))
    if (
        sorted(logprobs) != list(range(len(logprobs)))
        or len(logprobs) < text.n_vocab
        or abs(mass - 1) > 0.01
    ):
        raise Unsupported(
            f"{base} returns {len(logprobs)} logprobs of a row, with {mass:.3f} of its probability;"
            f" full rows (steps) have {text.n_vocab} or more: start it with --max-logprobs -1"
        )
    return len(logprobs)


def _capabilities_of(server: ServerInfo, *, steps: bool) -> Capabilities:
    """Return the engine's features for this server. steps: see `RemoteEngine.load`."""
    capabilities = server.capabilities
    return replace(
        OWN["remote"],
        steps=steps,
        raw_logits=False,
        scoring=steps or (capabilities.echo and capabilities.takes_ids),
        continues=capabilities.api == "completions" or server.dialect.may_continue,
        grammar="Weft" if steps else OWN["remote"].grammar if server.dialect.constraints else "",
    )


def _fingerprint(server: ServerInfo, text: Tokenizer) -> str:
    """Return a fingerprint of the model's name on the server and of the tokenizer.

    It does not depend on the address, because a server may move. Equal names on two servers may
    denote different models; this cannot be detected.
    """
    digest = hashlib.sha256(f"remote\0{server.model}\0{server.capabilities.api}\0".encode())
    if not isinstance(text, PieceTokenizer):
        for token_bytes in text.vocab_bytes:
            digest.update(token_bytes + b"\0")
    return f"remote-{digest.hexdigest()[:32]}"


def _retry_policy(given: dict[str, Any]) -> RetryPolicy:
    """Validate the options of `load` about timeouts and retries. given: options by name."""
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


def _parse_yes_no(text: str) -> bool:
    """Parse "yes" or "no". Raises: ValueError."""
    if text not in ("yes", "no"):
        raise ValueError(text)
    return text == "yes"


_OPTION_PARSERS: dict[str, Callable[[str], Any]] = {
    "n_ctx": int, "dialect": str, "api": str, "most": int, "together": _parse_yes_no,
    "steps": _parse_yes_no, "connect_s": float, "first_s": float, "between_s": float,
    "retries": int,
}  # fmt: skip


def _apply_address_options(given: dict[str, Any], texts: dict[str, str]) -> dict[str, Any]:
    """Return the options of `load`, updated by those in an address.

    given: options by name. texts: options of the address, as text.
    """
    options = dict(given)
    for name, text in texts.items():
        if name == "tokenizer":
            continue
        if name not in _OPTION_PARSERS:
            allowed = ", ".join(["tokenizer", *_OPTION_PARSERS])
            raise ConfigError(f"the address has the option {name!r}; allowed are {allowed}")
        try:
            options[name] = _OPTION_PARSERS[name](text)
        except ValueError:
            raise ConfigError(f"the address has {name}={text}, which is invalid") from None
    return options
