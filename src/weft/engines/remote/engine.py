"""`RemoteEngine`: a model behind an address, with its KV, its sampling and its weights."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ...checks import number, whole_number
from ...errors import ConfigError, ForwardError, Unsupported
from ...tokens.tokenizer import Tokenizer
from ..abilities import OWN
from ..base import Abilities, Engine, EngineInfo, HostOutput, LateTokens, Row, Score
from ..source import resolve
from .address import Address
from .dialect import Manners
from .pieces import N_PIECES, PieceTokenizer
from .probe import ServerInfo, find
from .runs import RemoteRuns
from .said import Garbled, read_said
from .spelling import Spelling
from .wire import Fault, Patience, Wire
from .wording import Wording

N_POSITIONS = 1 << 20  # where the server does not say; it refuses what is too long for it
MOST = 64


class RemoteEngine(Engine):
    """A server of OpenAI's completions or chat protocol. Made by `load`."""

    fragments = None

    def __init__(
        self,
        wire: Wire,
        found: ServerInfo,
        text: Tokenizer,
        *,
        most: int,
        together: bool,
        n_ctx: int | None,
    ) -> None:
        is_pieces = isinstance(text, PieceTokenizer)
        self._wire = wire
        self._text = text
        self._wording = Wording(found.model, found.dialect, found.manners, text)
        n_vocab = N_PIECES if is_pieces else text.n_vocab
        self.info = EngineInfo(
            name="remote",
            model=wire.address.with_model(found.model),
            n_layers=0,
            n_vocab=n_vocab,
            n_positions=found.n_ctx or n_ctx or N_POSITIONS,
            kv_bytes_per_token=0,
            dtype="the server's",
            fingerprint=_fingerprint(found, text),
            device=wire.address.host,
            kv="hidden",
            abilities=_abilities(found),
            temperature_first=found.dialect.order == "first",
            extra={"server": found.dialect.name, "manners": found.manners},
        )
        spelling = Spelling(text, n_vocab)
        self.native: RemoteRuns = RemoteRuns(
            wire, self._wording, spelling, most=most, together=together
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
        manners: Manners | None = None,
        most: int = MOST,
        together: bool | None = None,
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
        share a request. connect_s, first_s, between_s, retries: see `Patience`.
        """
        address = Address.read(url, model)
        given: dict[str, Any] = {
            "n_ctx": n_ctx, "dialect": dialect, "api": api, "most": most, "together": together,
            "connect_s": connect_s, "first_s": first_s, "between_s": between_s, "retries": retries,
        }  # fmt: skip
        given = _with_texts(given, address.options)
        if tokenizer is None and "tokenizer" in address.options:
            tokenizer = Tokenizer.from_folder(resolve(address.options["tokenizer"]))
        if given["api"] not in ("auto", "completions", "chat"):
            raise ConfigError(f"api is {given['api']!r}; allowed are auto, completions and chat")
        patience = _patience(given)
        wire = Wire(address, address.key(token), patience, proxy)
        try:
            found = wire.run(
                find(wire, address.model, tokenizer, given["dialect"], manners, given["api"])
            )
            most = whole_number("most", given["most"], 1)
            if found.dialect.most is not None:
                most = min(most, found.dialect.most)
            shared = given["together"]
            if shared and not found.manners.n:
                raise Unsupported(f"{address.base} gives one choice a request: leave together out")
            if shared is None:  # where seeds count, each text must depend on its own alone
                shared = found.manners.n and not found.dialect.seeded
            is_chat = found.manners.api == "chat"
            return cls(
                wire,
                found,
                tokenizer or PieceTokenizer(is_chat=is_chat),
                most=most,
                together=bool(shared),
                n_ctx=None if given["n_ctx"] is None else whole_number("n_ctx", given["n_ctx"], 1),
            )
        except BaseException:
            wire.stop()
            raise

    def tokenizer(self) -> Tokenizer:
        return self._text

    def forward(self, rows: Sequence[Row]) -> HostOutput:
        """Score given tokens by echo; nothing else can be had of a row. See `Engine.forward`.

        Cost: a request a row, all at once; the server prefills what it has not cached.
        """
        if self._wire.is_closed:
            raise ForwardError("this engine is closed; load it again")
        if any(row.logits_at or row.adapter is not None for row in rows):
            raise Unsupported(f"{self.info.model} gives no logits rows and has no adapters")
        if not self.info.abilities.scoring:
            raise Unsupported(f"{self.info.model} does not score given text")
        return self._wire.run(self._scored(rows))

    async def _scored(self, rows: Sequence[Row]) -> HostOutput:
        scores = await asyncio.gather(*(self._row(row) for row in rows))
        return HostOutput(np.zeros((0, 0), dtype=np.float32), list(scores))

    async def _row(self, row: Row) -> list[Score]:
        assert not isinstance(row.tokens, LateTokens)  # of engines that overlap
        # A span's last target stands behind the row: each path is asked for whole, and once.
        paths = [(*row.tokens[: span.start + 1], *span.targets) for span in row.scores]
        found = {path: await self._logprobs(list(path)) for path in dict.fromkeys(paths)}
        return [
            _score(found[path], span.start + 1, len(span.targets))
            for path, span in zip(paths, row.scores, strict=True)
        ]

    async def _logprobs(self, tokens: list[int]) -> list[float | None]:
        """Return the logprob of each of a path's tokens; None for its first."""
        wire = self._wire
        for tries in range(wire.patience.retries + 1):
            try:
                data = await wire.post(self._wording.path, self._wording.scored(tokens))
                (told,) = read_said(data)
            except (Fault, Garbled, ValueError) as error:
                fault = error if isinstance(error, Fault) else Fault(str(error))
                if not fault.may_pass or tries == wire.patience.retries:
                    raise ForwardError(f"{wire.address.base}: {fault}") from None
                await asyncio.sleep(wire.patience.pause_s(tries, fault.asked_s))
                continue
            found = told.logprobs or []
            if len(tokens) <= len(found) <= len(tokens) + 1:
                return found
            raise ForwardError(
                f"{wire.address.base} scored {len(found)} tokens of a path of {len(tokens)}"
            )
        raise AssertionError("unreachable")

    def close(self) -> None:
        self._wire.stop()

    def __repr__(self) -> str:
        return f"<RemoteEngine {self.info.model}>"


def _score(logprobs: Sequence[float | None], first: int, n: int) -> Score:
    """Return the score of `n` tokens from `first` on; entropies and ranks are not known."""
    wanted = [each for each in logprobs[first : first + n] if each is not None]
    if len(wanted) != n:
        raise ForwardError("the server left out some of the logprobs that it was asked for")
    return Score(
        logprobs=np.array(wanted, dtype=np.float32),
        entropies=None,
        ranks=None,
        top_ids=np.empty((n, 0), dtype=np.int64),
        top_logprobs=np.empty((n, 0), dtype=np.float32),
    )


def _abilities(found: ServerInfo) -> Abilities:
    manners = found.manners
    return replace(
        OWN["remote"],
        scoring=manners.echo and manners.takes_ids,
        grammar=OWN["remote"].grammar if found.dialect.constraints else "",
    )


def _fingerprint(found: ServerInfo, text: Tokenizer) -> str:
    """Return what marks this server's model: its name there, and whose tokens paths are.

    The address is no part of it: a server may move. That two servers' models of one name are the
    same one cannot be seen from here.
    """
    mark = hashlib.sha256(f"remote\0{found.model}\0{found.manners.api}\0".encode())
    if not isinstance(text, PieceTokenizer):
        for each in text.vocab_bytes:
            mark.update(each + b"\0")
    return f"remote-{mark.hexdigest()[:32]}"


def _patience(given: dict[str, Any]) -> Patience:
    return Patience(
        **{
            name: number(name, given[name], low=0.0, open_low=True)
            for name in ("connect_s", "first_s", "between_s")
        },
        retries=whole_number("retries", given["retries"], 0),
    )


def _yes_or_no(text: str) -> bool:
    if text not in ("yes", "no"):
        raise ValueError(text)
    return text == "yes"


_READ: dict[str, Callable[[str], Any]] = {
    "n_ctx": int, "dialect": str, "api": str, "most": int, "together": _yes_or_no,
    "connect_s": float, "first_s": float, "between_s": float, "retries": int,
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
