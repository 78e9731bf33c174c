"""What a server is found to do, by a few small requests when it is loaded."""

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
from .responses import ChoiceDelta, ProtocolError, likeliest, read_deltas
from .transport import ReadTimeout, RetryPolicy, Transport, TransportError

_log = logging.getLogger("weft.engines.remote")
_TEXT = "The quick brown fox jumps over the lazy dog and"
_SURE = 1e-3  # logprobs of one token in two answers are level to that where they are of one kind
# What is left out of the first question, from trial to trial, until the server takes it.
_TRIALS = (
    {"ids", "echo", "logprobs"},
    {"ids", "logprobs"},
    {"echo", "logprobs"},
    {"logprobs"},
    set[str](),
)


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A server's model and manners. n_ctx: tokens a path may have; None where it does not say.

    root: what its list of models says the model was made from.
    """

    model: str
    dialect: Dialect
    capabilities: ServerCapabilities
    n_ctx: int | None = None
    root: str = ""


async def find(
    transport: Transport,
    model: str,
    text: Tokenizer | None,
    dialect: str,
    capabilities: ServerCapabilities | None,
    api: str,
) -> ServerInfo:
    """Return what a server is. Raises: EngineUnavailable, ModelLoadError, ConfigError, Unsupported.

    manners: what is known already; nothing is generated then. Cost: GET /models, then at most seven
    requests of one or two tokens, three as a rule; without a tokenizer at most four more.
    """
    found = await _listed(transport, model)
    if dialect != "auto":
        if dialect not in DIALECTS:
            raise ConfigError(
                f"dialect is {dialect!r}; allowed are auto, {', '.join(sorted(DIALECTS))}"
            )
        found = replace(found, dialect=DIALECTS[dialect])
    if capabilities is not None:
        return replace(found, capabilities=capabilities)
    if found.dialect is OLLAMA:
        _log.info("Ollama draws from the 40 likeliest tokens unless its Modelfile sets top_k")
    return replace(found, capabilities=await _Questions(transport, found, text).capabilities(api))


async def _listed(transport: Transport, model: str) -> ServerInfo:
    """Choose the model by the server's own list."""
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
    names = [each.model for each in listed]
    near = difflib.get_close_matches(model, names, 3) or names[:8]
    message = f"{transport.address.base} has no model {model!r}; it has {', '.join(near)}"
    if listed[0].dialect is OLLAMA:
        return ModelLoadError(message, hint=f"ollama pull {model}")
    return ModelLoadError(message, hint=f"weft models --at {transport.address.base} lists them")


def list_models(url: str, token: str | None = None) -> tuple[Address, list[ServerInfo]]:
    """Return a server's address, with /v1 if needed, and the models that the server lists.

    Raises: ConfigError for an invalid address; EngineUnavailable if the server does not answer.
    Cost: one or two requests.
    """
    address = Address.read(url)
    transport = Transport(address, address.key(token), RetryPolicy(retries=0))
    try:
        listed = transport.run(models_of(transport))
    except TransportError as fault:
        raise _unavailable(transport, fault) from None
    finally:
        transport.stop()
    return transport.address, listed


async def models_of(transport: Transport) -> list[ServerInfo]:
    """Return the models that a server lists, with their metadata. Raises: Fault."""
    data = await _list(transport)
    entries = data.get("data") if isinstance(data, dict) else None
    listed = [_info(e) for e in entries or () if isinstance(e, dict) and type(e.get("id")) is str]
    unknown = bool(listed) and all(each.dialect is PLAIN for each in listed)
    if unknown and all(":" in each.model for each in listed) and await _is_ollama(transport):
        listed = [replace(each, dialect=OLLAMA) for each in listed]
    return listed


def _info(entry: dict[str, Any]) -> ServerInfo:
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


async def _list(transport: Transport) -> Any:
    """Return the server's list of models; an address without /v1 may have it there."""
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
    """Ask again while the server says that it is busy, or still loading."""
    for tries in range(transport.retry_policy.retries + 1):
        try:
            return await ask()
        except TransportError as fault:
            is_busy = fault.may_pass and fault.status in (429, 503)
            if not is_busy or tries == transport.retry_policy.retries:
                raise
            await asyncio.sleep(transport.retry_policy.pause_s(tries, fault.asked_s))
    raise AssertionError("unreachable")


def _unavailable(transport: Transport, fault: TransportError) -> EngineUnavailable:
    hint = "is the server up, and is the address right, /v1 included?"
    if transport.address.host.endswith(f":{OLLAMA_PORT}"):
        hint = "ollama serve starts Ollama"
    if fault.status in (401, 403):
        hint = "give its key by token=… or WEFT_API_KEY; OPENAI_API_KEY is for https"
    return EngineUnavailable(f"{transport.address.base}: {fault}", hint=hint)


class _Questions:
    """The questions. What a server refuses it does not do."""

    def __init__(self, transport: Transport, found: ServerInfo, text: Tokenizer | None) -> None:
        self.transport = transport
        self.found = found
        self.text = text
        self.ids = [] if text is None else text.continuation(_TEXT)

    async def capabilities(self, api: str) -> ServerCapabilities:
        if self.found.dialect.chat_only:
            if api == "completions":
                raise Unsupported(
                    f"completions of {self.transport.address.base} go through the chat template, so"
                    " raw text cannot be continued there; leave api out"
                )
            api = "chat"
        if api != "chat":
            found = await self._completions()
            if found is not None:
                return found if api == "completions" else await self._beside(found)
            if api == "completions":
                raise Unsupported(
                    f"{self.transport.address.base} has no completions; try api='chat'"
                )
        if self.text is not None:
            raise Unsupported(
                f"{self.transport.address.base} speaks the chat protocol only, in which prompts are"
                " messages and no tokens: leave tokenizer= out; what grows is text then"
            )
        try:
            return await self._chat()
        except TransportError as fault:
            raise _unavailable(self.transport, fault) from None

    async def _beside(self, found: ServerCapabilities) -> ServerCapabilities:
        """Ask for the chat protocol beside completions: without a tokenizer messages go by it."""
        if self.text is not None:
            return found
        try:
            chat = await self._chat()
            # Its logprobs are made by the same code; chats are not asked hot once more.
            return replace(found, chat=replace(chat, raw=chat.logprobs and found.raw))
        except TransportError as fault:
            if fault.status is None or fault.status in (401, 403):
                raise _unavailable(self.transport, fault) from None
            return found  # it has none, or the model has no template

    async def _completions(self) -> ServerCapabilities | None:
        """Ask for one token, with all that may be asked for, then with less."""
        refused: TransportError | None = None
        for wants in _TRIALS:
            if "ids" in wants and not self.ids:
                continue
            try:
                told = await self._first(wants)
            except TransportError as fault:
                if fault.status in (404, 405) and not _names_model(fault, self.found.model):
                    return None
                is_final = isinstance(fault, ReadTimeout) or fault.status in (401, 403)
                if is_final or _names_model(fault, self.found.model):
                    raise _unavailable(self.transport, fault) from None
                refused = fault
                continue
            if told is not None:
                return await self._second(self._seen(wants, told), told)
        assert refused is not None
        raise _unavailable(self.transport, refused)

    async def _first(self, wants: set[str]) -> ChoiceDelta | None:
        """Return the one choice of an answer; None for what is no answer to this question."""
        body: dict[str, Any] = {
            "model": self.found.model,
            "prompt": self.ids if "ids" in wants else _TEXT,
            "max_tokens": 1,
            "temperature": 0,
        }
        if "echo" in wants:
            body["echo"] = True
        if "logprobs" in wants:
            body["logprobs"] = self.found.dialect.top
        if self.found.dialect.ask_ids:
            body[self.found.dialect.ask_ids] = True
        told = await self._ask("/completions", body)
        return told[0] if len(told) == 1 else None  # many: each id was taken for a prompt

    async def _ask(self, path: str, body: dict[str, Any]) -> list[ChoiceDelta]:
        return _choices(await self._data(path, body))

    async def _data(self, path: str, body: dict[str, Any]) -> Any:
        return await _with_retries(self.transport, lambda: self.transport.post(path, body))

    def _seen(self, wants: set[str], told: ChoiceDelta) -> ServerCapabilities:
        """Return what the first answer shows."""
        n_scored = len(told.logprobs or ())
        echoes = "echo" in wants and n_scored > len(self.ids) > 0 and "ids" in wants
        gives_ids = told.ids is not None and self.text is not None
        said = told.text
        if echoes and self.text is not None:
            asked = self.text.decode(self.ids).strip()
            named = b"".join((told.names or [])[: len(self.ids)]).decode(errors="replace")
            if _letters(named) != _letters(asked):
                self._wrong(self.ids, named, asked)
            said = said.strip().removeprefix(asked)  # some leave the prompt's text out
        if gives_ids:
            new = told.ids or []
            self._check(new[len(self.ids) :] if new[: len(self.ids)] == self.ids else new, said)
        return ServerCapabilities(
            takes_ids="ids" in wants,
            gives_ids=gives_ids,
            logprobs=n_scored > 0,
            echo=echoes,
        )

    def _check(self, new: list[int], said: str) -> None:
        """Refuse a tokenizer by which the new tokens are another text than the server's."""
        assert self.text is not None
        ours = self.text.decode(each for each in new if each not in self.text.special_ids)
        if "\ufffd" in said or "\ufffd" in ours or not said.strip():
            return
        if said.strip() not in ours.strip() and ours.strip() not in said.strip():
            self._wrong(new, said, ours)

    def _wrong(self, ids: list[int], said: str, ours: str) -> NoReturn:
        raise ConfigError(
            f"wrong tokenizer: tokens {ids} are {ours!r} by it, and {said!r:.200} for the server;"
            f" give the one made for {self.found.model}"
        )

    async def _second(
        self, capabilities: ServerCapabilities, first: ChoiceDelta
    ) -> ServerCapabilities:
        """Ask for two hot choices: is n honoured, and are logprobs of raw logits?"""
        body = {
            "model": self.found.model,
            "prompt": self.ids if capabilities.takes_ids else _TEXT,
            "max_tokens": 1,
            "temperature": 2.0,
            "seed": 1,
            **self.found.dialect.neutral,
        }
        if capabilities.logprobs:
            body["logprobs"] = 5
        trials: tuple[dict[str, Any], ...] = ({"n": 2}, {})
        for more in trials:
            try:
                data = await self._data("/completions", {**body, **more})
            except TransportError:
                continue
            told = _choices(data)
            raw = capabilities.logprobs and _is_raw(first, likeliest(data))
            return replace(capabilities, n=len(told) == 2, raw=raw)
        return capabilities

    async def _chat(self) -> ServerCapabilities:
        """Return what the chat protocol does. Raises: Fault where the server does not speak it."""
        body: dict[str, Any] = {
            "model": self.found.model,
            "messages": [{"role": "user", "content": "Say yes."}],
            "max_tokens": 1,
            "temperature": 1.0,
        }
        wants: list[dict[str, Any]]
        figures = {"logprobs": True, "top_logprobs": 1}
        wants = [{**figures, "n": 2}, figures, {"n": 2}, {}]
        refused: TransportError | None = None
        for more in wants:
            try:
                told = await self._ask("/chat/completions", {**body, **more})
            except TransportError as fault:
                if fault.status in (None, 401, 403, 404, 405):
                    raise
                refused = fault
                continue
            has_logprobs = any(each.logprobs for each in told)
            return ServerCapabilities(api="chat", n=len(told) == 2, logprobs=has_logprobs)
        assert refused is not None
        raise refused


def _letters(text: str) -> str:
    """Return a text without spaces, as which tokenizers write them in their own ways."""
    return "".join(text.replace("\u2581", " ").replace("\u0120", " ").split())


def _names_model(fault: TransportError, model: str) -> bool:
    return fault.status == 404 and model in str(fault)


def _choices(data: Any) -> list[ChoiceDelta]:
    try:
        return list(read_deltas(data))
    except ProtocolError as error:
        raise TransportError(str(error), status=200) from None


def _is_raw(cold: ChoiceDelta, hot: list[dict[str, float]]) -> bool:
    """Whether the token drawn at temperature 0 is told to be as likely at 2."""
    if not cold.names or not cold.logprobs or cold.logprobs[-1] is None:
        return False
    name, logprob = cold.names[-1].decode(errors="replace"), cold.logprobs[-1]
    return any(abs(each.get(name, math.inf) - logprob) < _SURE for each in hot)
