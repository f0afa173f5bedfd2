"""Conversations across tasks: what one task has said, for the next one with its `context_id`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from pydantic import JsonValue


@dataclass(frozen=True, slots=True)
class ConversationKey:
    """Identifies a conversation.

    Attributes:
        agent: Name and version of the agent, and its framework.
        requester: The name of the agent or client that sends the tasks.
        login: The login that the broker has verified for it, if any.
        user_id: On whose behalf, as the requester says.
        context_id: The id that the requester has chosen.
    """

    agent: str
    requester: str | None
    login: str | None
    user_id: str | None
    context_id: str


@dataclass(frozen=True, slots=True)
class ConversationTurn:
    """What one task has added to a conversation.

    Attributes:
        number: Its place in the conversation, starting at 1.
        task_id: The task.
        library: The version of the framework that wrote the messages.
        messages: In the framework's own JSON form.
        replaces: The messages contain all turns up to this one, for example as a summary. 0 if
            they contain none.
    """

    number: int
    task_id: str
    library: str
    messages: list[JsonValue]
    replaces: int = 0


class Conversations(Protocol):
    """Stores conversations. Every method may raise `StoreUnavailable`."""

    async def load(
        self, key: ConversationKey, numbers: tuple[int, int] | None = None
    ) -> list[ConversationTurn]:
        """Return turns of a conversation in their order. None for a new conversation.

        Args:
            key: The conversation.
            numbers: The first and the last turn to return. Default: the latest turns, as many as
                the store gives to a task. Turns that the store no longer has are left out.

        Raises:
            IncompatibleState: A turn is damaged.
        """

    async def append(
        self,
        key: ConversationKey,
        task_id: str,
        library: str,
        messages: list[JsonValue],
        *,
        replaces: int = 0,
    ) -> None:
        """Add a turn, durably. Does nothing if the conversation has a turn of this task."""


@runtime_checkable
class ChecksStore(Protocol):
    """A store that each replica checks before its first task."""

    async def check(self) -> None:
        """Check that the store can be used.

        Raises:
            ConfigurationError: It refuses, for example a wrong password. The replica ends.
            StoreUnavailable: It does not answer. The replica starts, because it may answer later.
        """
