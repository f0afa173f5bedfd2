"""A caller that sends JSON to agents by name, and counts the replies after the first."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Self

from pydantic import JsonValue

from meshpoint.client.open_task import OpenTask
from meshpoint.client.reply_counter import ReplyCounter
from meshpoint.client.requests import check_request
from meshpoint.client.transport import Transport
from meshpoint.model.envelopes import fingerprint
from meshpoint.model.ids import TaskId, new_id
from meshpoint.model.messages import Message, validate_agent_name
from meshpoint.model.outcomes import Outcome
from meshpoint.ports.broker import Broker


@dataclass(frozen=True, slots=True)
class Reply:
    """The answer to a request, and the agent that sent it."""

    task_id: TaskId
    outcome: Outcome
    agent: str


class PlainClient:
    """Sends requests and returns futures of their replies. Opens and closes the broker itself."""

    def __init__(self, broker: Broker, name: str = "client") -> None:
        self._broker = broker
        self._counter = ReplyCounter()
        self._transport = Transport(broker, name, self._counter)
        self._waits: set[asyncio.Task[Reply]] = set()

    async def __aenter__(self) -> Self:
        await self._transport.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for wait in self._waits:
            wait.cancel()
        await self._transport.close()

    @property
    def duplicates(self) -> int:
        """Replies equal to the first reply to their request."""
        return self._counter.duplicates

    @property
    def conflicts(self) -> int:
        """Replies that differ from the first reply to their request."""
        return self._counter.conflicts

    async def send(
        self,
        agent: str,
        input_: JsonValue,
        *,
        timeout: timedelta | None = None,
        task_id: TaskId | None = None,
        context_id: str | None = None,
    ) -> asyncio.Future[Reply]:
        task_id = task_id or TaskId(new_id())
        reply = self.expect(agent, task_id)
        message = self.request(
            input_, task_id, agent=agent, timeout=timeout, context_id=context_id
        )
        await self._transport.publish_request(validate_agent_name(agent), message)
        return reply

    async def ask(self, agent: str, input_: JsonValue) -> Outcome:
        return (await (await self.send(agent, input_))).outcome

    def expect(self, agent: str, task_id: TaskId) -> asyncio.Future[Reply]:
        """Return a future of the reply to a task that is requested by other means."""
        self._counter.expect(agent, task_id)
        task = self._transport.expect(validate_agent_name(agent), task_id)
        wait = asyncio.ensure_future(_reply_of(task))
        self._waits.add(wait)
        wait.add_done_callback(self._waits.discard)
        return wait

    def request(
        self,
        input_: JsonValue,
        task_id: TaskId,
        *,
        agent: str,
        timeout: timedelta | None = None,
        context_id: str | None = None,
    ) -> Message:
        """Build the request for a task without sending it. This client is the reply address."""
        options = {"task_id": task_id, "timeout": timeout, "context_id": context_id}
        request = check_request(validate_agent_name(agent), input_, options)
        task, message = self._transport.prepare(request)
        task.add_request(fingerprint(message), None)  # no local time limit
        self._counter.expect(agent, task_id, fingerprint(message))
        return message

    async def cancel(self, agent: str, task_id: TaskId) -> None:
        await self._transport.cancel(agent, task_id)

    async def signal(
        self, agent: str, task_id: TaskId, name: str, signal_id: str, value: JsonValue
    ) -> None:
        await self._transport.signal(validate_agent_name(agent), task_id, name, signal_id, value)


async def _reply_of(task: OpenTask) -> Reply:
    return Reply(task.id, await task.wait_outcome(), task.agent)
