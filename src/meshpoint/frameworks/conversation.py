"""The conversation that a task continues: what earlier tasks with its `context_id` have added.

The start of a task records which turns there are, not their messages. Each segment loads the same
turns again. The end of the task adds one turn.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from pydantic import JsonValue
from pydantic_core import from_json, to_json

from meshpoint.errors import AgentFailed, IncompatibleState, MemoryUnavailable, StoreUnavailable
from meshpoint.frameworks.history import ConversationStart, History
from meshpoint.frameworks.steps import record_step
from meshpoint.model.calls import Done
from meshpoint.model.context import TaskExecutionContext
from meshpoint.ports.conversations import (
    ChecksStore,
    ConversationKey,
    Conversations,
    ConversationTurn,
)

_T = TypeVar("_T")


log = logging.getLogger("meshpoint.frameworks")


class ConversationLog:
    """The conversations of one agent.

    Args:
        store: Where they are. `None` without any.
        agent: The agent in the keys.
        library_name: Precedes the versions of the library in errors.
        find_damage: Says why a stored message is none of the framework's, or returns `None`.
    """

    def __init__(
        self,
        store: Conversations | None,
        agent: str,
        library_name: str,
        find_damage: Callable[[JsonValue], str | None],
    ) -> None:
        self._store, self._agent = store, agent
        self._library_name, self._find_damage = library_name, find_damage

    async def check(self) -> None:
        """Check that the store can be used.

        Raises:
            ConfigurationError: The store refuses, for example a wrong password.
        """
        if not isinstance(self._store, ChecksStore):
            return
        try:
            await self._store.check()
        except StoreUnavailable as error:
            log.warning("agent %s: tasks with a context_id wait: %s", self._agent, error)

    async def start(self, ctx: TaskExecutionContext, history: History) -> None:
        """Begin `history` with the conversation as it is now, if the task belongs to one.

        Raises:
            AgentFailed: The store no longer has what an earlier run of this segment began with.
            IncompatibleState: The store has a damaged turn.
            MemoryUnavailable: The store does not answer.
        """
        store, login = self._store, ctx._runtime.login
        key = self._key(ctx, login)
        if store is None or key is None:
            return
        turns = await _available(store.load(key))
        now = _start_after(turns, login)

        async def record() -> JsonValue:
            return asdict(now)

        recorded: Any = await record_step(ctx, "conversation", record)
        history.conversation = start = ConversationStart(**recorded)
        await self._enter(store, key, history, turns if start == now else None)

    async def restore(self, ctx: TaskExecutionContext, history: History) -> None:
        """Put the messages that the task began with in front of the `history` of its last pause.

        Raises:
            AgentFailed: The store no longer has them.
            IncompatibleState: The agent has no conversations now, or a turn is damaged.
            MemoryUnavailable: The store does not answer.
        """
        start = history.conversation
        if start is None:
            return
        key = self._key(ctx, start.login)
        if self._store is None or key is None:
            raise IncompatibleState(
                "it continues a conversation", "write durable(conversations=…) again"
            )
        if not start.is_rewritten:
            await self._enter(self._store, key, history)

    async def _enter(
        self,
        store: Conversations,
        key: ConversationKey,
        history: History,
        turns: Sequence[ConversationTurn] | None = None,
    ) -> None:
        start = history.conversation
        assert start is not None
        if turns is None and start.last:
            turns = await _available(store.load(key, (start.first, start.last)))
        found = list(turns or ())
        if _start_after(found, start.login) != start or len(found) != start.count:
            raise AgentFailed(
                f"turns {start.first} to {start.last} of its conversation, with which the task "
                "has started, were deleted"
            )
        replaced = max((each.replaces for each in found), default=0)
        read = [each for each in found if each.number > replaced]
        for each in read:
            self._check_turn(each)
        messages = [message for each in read for message in each.messages]
        history.prepend(messages, {each.library for each in read})

    def _check_turn(self, turn: ConversationTurn) -> None:
        for index, message in enumerate(turn.messages):
            if (damage := self._find_damage(message)) is not None:
                raise IncompatibleState(
                    f"turn {turn.number} of the conversation, of task {turn.task_id}, was written "
                    f"by {self._library_name}{turn.library}; message {index + 1} {damage}",
                    "delete the row, or restore it",
                )

    async def end(
        self, ctx: TaskExecutionContext, history: History, done: Done[object], library: str
    ) -> None:
        """Add what a task has added to its conversation, once.

        Raises:
            MemoryUnavailable: The store does not answer.
        """
        store, start = self._store, history.conversation
        if store is None or start is None or not _is_json(done.output):
            return
        key = self._key(ctx, start.login)
        assert key is not None
        messages, is_rewritten = history.added()
        replaces = start.last if is_rewritten else 0

        async def append() -> None:
            await _available(store.append(key, ctx.task_id, library, messages, replaces=replaces))

        await record_step(ctx, "conversation end", append)

    def _key(self, ctx: TaskExecutionContext, login: str | None) -> ConversationKey | None:
        origin = ctx.a2a_context
        if origin.context_id is None:
            return None
        return ConversationKey(
            self._agent, origin.requester, login, origin.user_id, origin.context_id
        )


def _start_after(turns: Sequence[ConversationTurn], login: str | None) -> ConversationStart:
    if not turns:
        return ConversationStart(login)
    return ConversationStart(login, turns[0].number, turns[-1].number, turns[-1].task_id)


async def _available(answer: Awaitable[_T]) -> _T:
    """Await the store. A task that it does not answer is released, and resumes after a delay."""
    try:
        return await answer
    except StoreUnavailable as error:
        raise MemoryUnavailable(str(error)) from error


def _is_json(output: object) -> bool:
    """Whether a task can end with this output. Otherwise it fails, and adds nothing."""
    try:
        from_json(to_json(output, inf_nan_mode="constants"), allow_inf_nan=False)
    except ValueError:
        return False
    return True
