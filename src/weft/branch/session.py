"""`Session`: a chat over one branch, turn by turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

from ..errors import ConfigError
from .branch import Branch

if TYPE_CHECKING:
    from ..lm.lm import LM

Message = Mapping[str, Any]


class _SessionTurn(NamedTuple):
    """One turn of a chat; turns form a chain.

    previous: the turn before; None for the first.
    start: position where the answer begins.
    messages: the chat before the answer.
    """

    previous: _SessionTurn | None
    start: int  # position of the answer's first token
    messages: tuple[Message, ...]  # all before the answer


class Session:
    """A chat whose tokens are one branch, the trunk.

    Each call runs only the tokens that its turn adds, with the template's control tokens. The
    caller draws the answer from `trunk`, or from forks of it, and promotes the best fork.

        session = Session(lm, system="Be brief.", seed=1)
        session.prefill_user("Describe a fox.")

        text = "".join(piece.text for piece in session.trunk)
        session.prefill_user("And then?")
    """

    def __init__(
        self,
        lm: LM,
        *,
        system: str | None = None,
        tools: Sequence[Any] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Start a chat.

        Args:
            system: a system message.
            tools, template_kwargs: as for `LM.format_chat`.
            options: of the trunk, as for `Branch.create`.

        Raises: ConfigError, also for a model without a chat template.
        """
        self.lm = lm
        self.tools = None if tools is None else list(tools)
        self.template_kwargs = dict(template_kwargs or {})
        if lm.text.chat_template is None:
            raise ConfigError("this model has no chat template, so a session cannot write turns")
        lm.text.check_chat_options(self._template_variables())
        self._first = () if system is None else ({"role": "system", "content": system},)
        self._turns: WeakKeyDictionary[Branch, _SessionTurn] = WeakKeyDictionary()
        self._trunk = Branch.create(lm, **options)

    @property
    def trunk(self) -> Branch:
        """The branch whose tokens are the chat; the next turn continues it."""
        return self._trunk

    @property
    def messages(self) -> list[Message]:
        """The chat so far as messages, with the trunk's unfinished answer."""
        turn = self._turn_of(self._trunk)
        return list(self._first) if turn is None else self._messages_with_answer(turn)

    # Turns ------------------------------------------------------------------------------------

    def prefill_user(self, content: str) -> None:
        """Append a user message and run it, up to where the answer begins.

        Raises: ConfigError if the template rejects the messages; ContextOverflow.
        """
        self._run({"role": "user", "content": content})

    async def aprefill_user(self, content: str) -> None:
        """The async form of `prefill_user`."""
        await self._arun({"role": "user", "content": content})

    def prefill_tool_result(self, content: str, call_id: str | None = None) -> None:
        """Append the result of a tool that the answer called, and run it."""
        self._run(_tool_result(content, call_id))

    async def aprefill_tool_result(self, content: str, call_id: str | None = None) -> None:
        """The async form of `prefill_tool_result`."""
        await self._arun(_tool_result(content, call_id))

    def prefill_assistant(self, content: str) -> None:
        """Append a given text to the answer and run it, instead of drawing it."""
        self._trunk.prefill(self._encode_text(content))

    async def aprefill_assistant(self, content: str) -> None:
        """The async form of `prefill_assistant`."""
        await self._trunk.aprefill(self._encode_text(content))

    def commit_turn(self, query: str, response: str) -> None:
        """Append a question and its full answer, both given by the caller, and run them."""
        self._run({"role": "user", "content": query}, response)

    async def acommit_turn(self, query: str, response: str) -> None:
        """The async form of `commit_turn`."""
        await self._arun({"role": "user", "content": query}, response)

    # The trunk --------------------------------------------------------------------------------

    def swap(self, branch: Branch) -> Branch:
        """Make another branch, such as a fork, the trunk; return the previous one, still live.

        Raises: StaleHandle; ConfigError for a branch of another LM.
        """
        branch.check_open()
        if branch.lm is not self.lm:
            raise ConfigError(f"{branch!r} belongs to another LM; a session's branches are of one")
        previous, self._trunk = self._trunk, branch
        turn = self._turn_of(branch)
        if turn is not None:
            self._turns[branch] = turn
        return previous

    def promote(self, branch: Branch) -> None:
        """Make another branch the trunk, and end the previous trunk and all its other forks."""
        previous = self.swap(branch)
        if previous is not branch and not previous.disposed:
            branch.detach()
            previous.prune_subtree()

    def close(self) -> None:
        """End the trunk and its forks; idempotent."""
        self._trunk.prune_subtree()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Session of {len(self.messages)} messages, {self._trunk!r}>"

    def _run(self, message: Message, answer: str = "") -> None:
        """Append a message and the beginning of its answer, and run them on the trunk."""
        trunk, (ids, turn) = self._trunk, self._prepare(message)
        trunk.prefill([*ids, *self._encode_text(answer)])
        self._turns[trunk] = turn

    async def _arun(self, message: Message, answer: str = "") -> None:
        """Like `_run`, awaited."""
        trunk, (ids, turn) = self._trunk, self._prepare(message)
        await trunk.aprefill([*ids, *self._encode_text(answer)])
        self._turns[trunk] = turn

    def _prepare(self, message: Message) -> tuple[list[int], _SessionTurn]:
        """Return the tokens that a message adds to the trunk, and the turn that it starts."""
        trunk = self._trunk
        turn = self._turn_of(trunk)
        if turn is None and not trunk.position:
            messages: list[Message] = [*self._first, message]
            ids = self.lm.text.encode_chat(messages, **self._template_variables())
        else:
            history = None if turn is None else self._messages_with_answer(turn)
            messages = [*(self._first if history is None else history), message]
            ids = self.lm.turn_delta(
                [message], history=history, tools=self.tools, template_kwargs=self.template_kwargs
            )
        return ids, _SessionTurn(turn, trunk.position + len(ids), tuple(messages))

    def _turn_of(self, branch: Branch) -> _SessionTurn | None:
        """Return the current turn of a branch; a fork has the turn in which it was forked."""
        at, limit = branch, branch.position
        while (turn := self._turns.get(at)) is None and at.parent is not None:
            limit = min(limit, at.fork_head)
            at = at.parent
        while turn is not None and turn.start > limit:  # rewound, or forked before it
            turn = turn.previous
        return turn

    def _messages_with_answer(self, turn: _SessionTurn) -> list[Message]:
        """Return a turn's messages and the answer that the trunk has so far."""
        answer = self.lm.text.decode(self._trunk.tokens[turn.start :])
        return [*turn.messages, {"role": "assistant", "content": answer}]

    def _encode_text(self, content: str) -> list[int]:
        return self.lm.text.continuation(content) if content else []

    def _template_variables(self) -> dict[str, Any]:
        """Return the variables of the chat template: the caller's, and the tools."""
        given = {} if self.tools is None else {"tools": self.tools}
        return {**self.template_kwargs, **given}


def _tool_result(content: str, call_id: str | None) -> Message:
    """Return the chat message of a tool's result."""
    message = {"role": "tool", "content": content}
    return message if call_id is None else {**message, "tool_call_id": call_id}
