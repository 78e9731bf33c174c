"""Detection of a server's features by a few small requests at load."""

from __future__ import annotations

import asyncio
import difflib
import logging
import math
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from ..._core.tokens.tokenizer import Tokenizer
from ...errors import ConfigError, EngineUnavailable, ModelLoadError, Unsupported
from .address import OLLAMA_PORT, Address
from .dialect import DIALECTS, OLLAMA, PLAIN, Dialect, ServerCapabilities, dialect_of
from .responses import ChoiceDelta, ProtocolError, read_deltas, top_logprobs
from .transport import ReadTimeout, RetryPolicy, Transport, TransportError

_log = logging.getLogger("weft.engines.remote")
_TEXT = "The quick brown fox jumps over the lazy dog and"
_SURE = 1e-3  # maximum difference of equal logprobs in two responses
# Features in the first request, from try to try, until the server accepts one.
_TRIALS = (
    {"ids", "echo", "logprobs"},
    {"ids", "logprobs"},
    {"echo", "logprobs"},
    {"logprobs"},
    set[str](),
)


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A server's model and features.

    Args:
        model: the server's name of the model.
        dialect: kind of server.
        capabilities: features of the server.
        n_ctx: context length; None if the server does not report it.
        root: base model in the server's list of models.
    """

    model: str
    dialect: Dialect
    capabilities: ServerCapabilities
    n_ctx: int | None = None
    root: str = ""


async def probe_server(
    transport: Transport,
    model: str,
    text: Tokenizer | None,
    dialect: str,
    capabilities: ServerCapabilities | None,
    api: str,
) -> ServerInfo:
    """Return the model and the features of a server.

    Cost: GET /models, then up to seven requests of one or two tokens, usually three. Without a
    tokenizer, up to four more.

    Args:
        transport: connection to the server.
        model: the server's name of the model; "" for its only model.
        text: the model's tokenizer, or None.
        dialect: kind of server, or "auto".
        capabilities: known features; nothing is generated then.
        api: "completions", "chat" or "auto".

    Raises:
        EngineUnavailable, ModelLoadError, ConfigError, Unsupported: the server cannot be used.
    """
    server = await _find_listed_model(transport, model)
    if dialect != "auto":
        if dialect not in DIALECTS:
            raise ConfigError(
                f"dialect is {dialect!r}; allowed are auto, {', '.join(sorted(DIALECTS))}"
            )
        server = replace(server, dialect=DIALECTS[dialect])
    if capabilities is not None:
        return replace(server, capabilities=capabilities)
    if server.dialect is OLLAMA:
        _log.info("Ollama draws from the 40 likeliest tokens unless its Modelfile sets top_k")
    return replace(server, capabilities=await _Prober(transport, server, text).capabilities(api))


async def _find_listed_model(transport: Transport, model: str) -> ServerInfo:
    """Return the entry of `model` in the server's list; the only entry if `model` is ""."""
    try:
        listed = await models_of(transport)
    except TransportError as fault:
        if fault.status == 404 and model:  # it has no list
            return ServerInfo(model, PLAIN, ServerCapabilities())
        raise _unavailable(transport, fault) from None
    names = [each.model for each in listed]
    if not model:
        if len(listed) != 1:
            some = f"it has {', '.join(names[:8])}" if names else "it lists none"
            raise ConfigError(
                f"which model of {transport.address.base}? {some}; give model=…, or address#model",
                hint=f"weft models --at {transport.address.base} lists them",
            )
        return listed[0]
    by_name = {each.model: each for each in listed}
    info = by_name.get(model) or by_name.get(f"{model}:latest")  # Ollama's tag of bare names
    if info is None and listed:
        raise _no_such_model(transport, model, listed)
    return info or ServerInfo(model, PLAIN, ServerCapabilities())


def _no_such_model(transport: Transport, model: str, listed: list[ServerInfo]) -> ModelLoadError:
    """Return the error for a model that the server does not list, with similar names."""
    names = [each.model for each in listed]
    near = difflib.get_close_matches(model, names, 3) or names[:8]
    message = f"{transport.address.base} has no model {model!r}; it has {', '.join(near)}"
    if listed[0].dialect is OLLAMA:
        return ModelLoadError(message, hint=f"ollama pull {model}")
    return ModelLoadError(message, hint=f"weft models --at {transport.address.base} lists them")


def list_models(url: str, token: str | None = None) -> tuple[Address, list[ServerInfo]]:
    """Return a server's address, with /v1 if needed, and the models that the server lists.

    Cost: one or two requests.

    Raises:
        ConfigError: the address is invalid.
        EngineUnavailable: the server does not answer.
    """
    address = Address.parse(url)
    transport = Transport(address, address.key(token), RetryPolicy(retries=0))
    try:
        listed = transport.run(models_of(transport))
    except TransportError as fault:
        raise _unavailable(transport, fault) from None
    finally:
        transport.stop()
    return transport.address, listed


async def models_of(transport: Transport) -> list[ServerInfo]:
    """Return the models that a server lists, with their metadata.

    Raises:
        TransportError: the request failed.
    """
    data = await _get_model_list(transport)
    entries = data.get("data") if isinstance(data, dict) else None
    listed = [
        _parse_model_entry(e)
        for e in entries or ()
        if isinstance(e, dict) and type(e.get("id")) is str
    ]
    unknown = bool(listed) and all(each.dialect is PLAIN for each in listed)
    if unknown and all(":" in each.model for each in listed) and await _is_ollama(transport):
        listed = [replace(each, dialect=OLLAMA) for each in listed]
    return listed


def _parse_model_entry(entry: dict[str, Any]) -> ServerInfo:
    """Return the metadata in one entry of a server's list of models."""
    n_ctx = entry.get("max_model_len") or (entry.get("meta") or {}).get("n_ctx")
    return ServerInfo(
        entry["id"],
        dialect_of(str(entry.get("owned_by"))),
        ServerCapabilities(),
        n_ctx if type(n_ctx) is int and n_ctx > 0 else None,
        str(entry.get("root") or ""),
    )


async def _is_ollama(transport: Transport) -> bool:
    """Return True if the server is Ollama: only its names of models all have tags."""
    try:
        return "version" in (await transport.get(transport.address.root + "/api/version") or ())
    except TransportError:
        return False


async def _get_model_list(transport: Transport) -> Any:
    """Return the server's list of models; try the address with /v1 if there is none."""
    try:
        return await _with_retries(
            transport, lambda: transport.get(transport.address.base + "/models")
        )
    except TransportError as fault:
        given = transport.address
        if fault.status != 404 or given.base.endswith("/v1"):
            raise
        transport.address = replace(given, base=given.base + "/v1")
        try:
            return await _with_retries(
                transport, lambda: transport.get(transport.address.base + "/models")
            )
        except TransportError:
            transport.address = given
        raise


async def _with_retries(transport: Transport, ask: Any) -> Any:
    """Return the result of `ask()`; call it again while the server is busy or loading.

    ask: a coroutine function without arguments. Raises: TransportError of the last try.
    """
    for tries in range(transport.retry_policy.retries + 1):
        try:
            return await ask()
        except TransportError as fault:
            is_busy = fault.is_transient and fault.status in (429, 503)
            if not is_busy or tries == transport.retry_policy.retries:
                raise
            await asyncio.sleep(transport.retry_policy.pause_s(tries, fault.retry_after_s))
    raise AssertionError("unreachable")


def _unavailable(transport: Transport, fault: TransportError) -> EngineUnavailable:
    """Return the error for a server that does not answer, with a hint for this kind of server."""
    hint = "is the server up, and is the address right, /v1 included?"
    if transport.address.host.endswith(f":{OLLAMA_PORT}"):
        hint = "ollama serve starts Ollama"
    if fault.status in (401, 403):
        hint = "give its key by token=… or WEFT_API_KEY; OPENAI_API_KEY is for https"
    return EngineUnavailable(f"{transport.address.base}: {fault}", hint=hint)


class _Prober:
    """Detects a server's features by small requests. A feature that it rejects is not used.

    Args:
        transport: connection to the server.
        server: the model and its dialect.
        text: the model's tokenizer; None to probe without token ids.
    """

    def __init__(self, transport: Transport, server: ServerInfo, text: Tokenizer | None) -> None:
        self.transport = transport
        self.server = server
        self.text = text
        self.ids = [] if text is None else text.continuation(_TEXT)

    async def capabilities(self, api: str) -> ServerCapabilities:
        """Return the features of the server. api: "completions", "chat" or "auto"."""
        if self.server.dialect.chat_only:
            if api == "completions":
                raise Unsupported(
                    f"completions of {self.transport.address.base} go through the chat template, so"
                    " raw text cannot be continued there; leave api out"
                )
            api = "chat"
        if api != "chat":
            completions = await self._probe_completions()
            if completions is not None:
                return completions if api == "completions" else await self._with_chat(completions)
            if api == "completions":
                raise Unsupported(
                    f"{self.transport.address.base} has no completions; try api='chat'"
                )
        if self.text is not None:
            raise Unsupported(
                f"{self.transport.address.base} has only the chat protocol, whose prompts are"
                " messages, not tokens: leave out tokenizer= to grow text"
            )
        try:
            return await self._probe_chat()
        except TransportError as fault:
            raise _unavailable(self.transport, fault) from None

    async def _with_chat(self, completions: ServerCapabilities) -> ServerCapabilities:
        """Probe the chat protocol, too: without a tokenizer, messages use it."""
        if self.text is not None:
            return completions
        try:
            chat = await self._probe_chat()
            # The server computes logprobs of both protocols alike: no further request.
            raw = chat.logprobs and completions.raw
            return replace(completions, chat=replace(chat, raw=raw))
        except TransportError as fault:
            if fault.status is None or fault.status in (401, 403):
                raise _unavailable(self.transport, fault) from None
            return completions  # no chat protocol, or the model has no template

    async def _probe_completions(self) -> ServerCapabilities | None:
        """Probe the completions protocol: request one token with all features, then with fewer.

        Returns None if the server does not support the protocol.
        """
        last_error: TransportError | None = None
        for wants in _TRIALS:
            if "ids" in wants and not self.ids:
                continue
            try:
                delta = await self._probe_first(wants)
            except TransportError as fault:
                if fault.status in (404, 405) and not _names_model(fault, self.server.model):
                    return None
                is_final = isinstance(fault, ReadTimeout) or fault.status in (401, 403)
                if is_final or _names_model(fault, self.server.model):
                    raise _unavailable(self.transport, fault) from None
                last_error = fault
                continue
            if delta is not None:
                return await self._probe_second(self._capabilities_from(wants, delta), delta)
        assert last_error is not None
        raise _unavailable(self.transport, last_error)

    async def _probe_first(self, wants: set[str]) -> ChoiceDelta | None:
        """Request one token; return the choice of the response.

        None if the server returns several choices: it read each id as a prompt.
        wants: features to request, of "ids", "echo" and "logprobs".
        """
        body: dict[str, Any] = {
            "model": self.server.model,
            "prompt": self.ids if "ids" in wants else _TEXT,
            "max_tokens": 1,
            "temperature": 0,
        }
        if "echo" in wants:
            body["echo"] = True
        if "logprobs" in wants:
            body["logprobs"] = self.server.dialect.top
        if self.server.dialect.ask_ids:
            body[self.server.dialect.ask_ids] = True
        deltas = await self._request_choices("/completions", body)
        return deltas[0] if len(deltas) == 1 else None  # many: each id was taken for a prompt

    async def _request_choices(self, path: str, body: dict[str, Any]) -> list[ChoiceDelta]:
        """Send a request, with retries; return the choices of the response."""
        return _choices(await self._post(path, body))

    async def _post(self, path: str, body: dict[str, Any]) -> Any:
        """Send a request, with retries; return the JSON response."""
        return await _with_retries(self.transport, lambda: self.transport.post(path, body))

    def _capabilities_from(self, wants: set[str], delta: ChoiceDelta) -> ServerCapabilities:
        """Return the features that the first response shows."""
        n_scored = len(delta.logprobs or ())
        echoes = "echo" in wants and n_scored > len(self.ids) > 0 and "ids" in wants
        gives_ids = delta.ids is not None and self.text is not None
        text = delta.text
        if echoes and self.text is not None:
            prompt = self.text.decode(self.ids).strip()
            named = b"".join((delta.names or [])[: len(self.ids)]).decode(errors="replace")
            if _without_spaces(named) != _without_spaces(prompt):
                self._raise_wrong_tokenizer(self.ids, named, prompt)
            text = text.strip().removeprefix(prompt)  # some servers omit the prompt's text
        if gives_ids:
            new = delta.ids or []
            self._check(new[len(self.ids) :] if new[: len(self.ids)] == self.ids else new, text)
        return ServerCapabilities(
            takes_ids="ids" in wants,
            gives_ids=gives_ids,
            logprobs=n_scored > 0,
            echo=echoes,
        )

    def _check(self, new: list[int], text: str) -> None:
        """Reject a tokenizer whose text for the new tokens differs from the server's."""
        assert self.text is not None
        decoded = self.text.decode(each for each in new if each not in self.text.special_ids)
        if "\ufffd" in text or "\ufffd" in decoded or not text.strip():
            return
        if text.strip() not in decoded.strip() and decoded.strip() not in text.strip():
            self._raise_wrong_tokenizer(new, text, decoded)

    def _raise_wrong_tokenizer(self, ids: list[int], text: str, decoded: str) -> NoReturn:
        """Raise the error for a tokenizer that decodes the server's ids to another text."""
        raise ConfigError(
            f"wrong tokenizer: it decodes tokens {ids} as {decoded!r}, the server as"
            f" {text!r:.200}; pass the tokenizer of {self.server.model}"
        )

    async def _probe_second(
        self, capabilities: ServerCapabilities, first: ChoiceDelta
    ) -> ServerCapabilities:
        """Request two choices at a high temperature to detect `n` and raw logprobs.

        first: the token drawn at temperature 0, to compare its logprob.
        """
        body = {
            "model": self.server.model,
            "prompt": self.ids if capabilities.takes_ids else _TEXT,
            "max_tokens": 1,
            "temperature": 2.0,
            "seed": 1,
            **self.server.dialect.neutral,
        }
        if capabilities.logprobs:
            body["logprobs"] = 5
        trials: tuple[dict[str, Any], ...] = ({"n": 2}, {})
        for more in trials:
            try:
                data = await self._post("/completions", {**body, **more})
            except TransportError:
                continue
            deltas = _choices(data)
            raw = capabilities.logprobs and _is_raw(first, top_logprobs(data))
            return replace(capabilities, n=len(deltas) == 2, raw=raw)
        return capabilities

    async def _probe_chat(self) -> ServerCapabilities:
        """Return the features of the chat protocol.

        Raises:
            TransportError: the server does not support it.
        """
        body: dict[str, Any] = {
            "model": self.server.model,
            "messages": [{"role": "user", "content": "Say yes."}],
            "max_tokens": 1,
            "temperature": 1.0,
        }
        wants: list[dict[str, Any]]
        with_logprobs = {"logprobs": True, "top_logprobs": 1}
        wants = [{**with_logprobs, "n": 2}, with_logprobs, {"n": 2}, {}]
        last_error: TransportError | None = None
        for more in wants:
            try:
                deltas = await self._request_choices("/chat/completions", {**body, **more})
            except TransportError as fault:
                if fault.status in (None, 401, 403, 404, 405):
                    raise
                last_error = fault
                continue
            has_logprobs = any(each.logprobs for each in deltas)
            return ServerCapabilities(api="chat", n=len(deltas) == 2, logprobs=has_logprobs)
        assert last_error is not None
        raise last_error


def _without_spaces(text: str) -> str:
    """Return a text without spaces, which tokenizers write differently."""
    return "".join(text.replace("\u2581", " ").replace("\u0120", " ").split())


def _names_model(fault: TransportError, model: str) -> bool:
    """Return True for a 404 error whose text contains the model's name."""
    return fault.status == 404 and model in str(fault)


def _choices(data: Any) -> list[ChoiceDelta]:
    """Parse the choices of a response. Raises: TransportError if it is invalid."""
    try:
        return list(read_deltas(data))
    except ProtocolError as error:
        raise TransportError(str(error), status=200) from None


def _is_raw(cold: ChoiceDelta, hot: list[dict[str, float]]) -> bool:
    """Return True if the token drawn at temperature 0 has the same logprob at 2."""
    if not cold.names or not cold.logprobs or cold.logprobs[-1] is None:
        return False
    name, logprob = cold.names[-1].decode(errors="replace"), cold.logprobs[-1]
    return any(abs(each.get(name, math.inf) - logprob) < _SURE for each in hot)
