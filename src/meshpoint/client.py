"""Ask an agent from outside the mesh: a script, a test, the command line."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from hashlib import blake2b
from types import TracebackType
from typing import Self

from pydantic import JsonValue

from meshpoint.errors import MeshpointError, PoisonMessage, QueueFull
from meshpoint.model.bodies import A2AMessage, Part, RequestBody, ResponseBody, parse
from meshpoint.model.calls import LONGEST
from meshpoint.model.envelopes import cancel_message, fingerprint
from meshpoint.model.ids import AgentName, ReplicaId, TaskId, agent_name, new_id
from meshpoint.model.json_values import check_json
from meshpoint.model.messages import (
    MOST_SHARDS,
    Header,
    HeaderValue,
    Message,
    MessageType,
    private_of,
    requests_of,
    responses_of,
    shard_for,
    shard_of,
)
from meshpoint.model.outcomes import Outcome, encode_outcome
from meshpoint.ports.broker import Broker, Delivery, Published, Subscription

_SHARDS_REMEMBERED = 300.0
"""Seconds. RabbitMQ logs an error for each lookup of a missing queue."""
_ANSWERED_KEPT = 10_000
"""Number of replies whose digests are kept."""


class UnknownAgent(MeshpointError):
    """No replica of the agent ever declared its queues in this namespace."""

    def __init__(self, agent: str) -> None:
        fix = "start one with `meshpoint run`, or correct the agent's name, the broker or the namespace"
        super().__init__(f"no agent {agent!r} in this mesh: {fix}")


@dataclass(frozen=True, slots=True)
class Reply:
    """The one answer to a request, and the agent that gave it."""

    task_id: TaskId
    outcome: Outcome
    agent: str


class Shards:
    """The number of request queues of each agent, checked with the broker every five minutes."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._asking = asyncio.Lock()
        self._counts: dict[AgentName, tuple[int, float]] = {}

    async def count(self, agent: AgentName) -> int:
        """The number of request queues of `agent`, at least 1."""
        if (known := self._known(agent)) is None:
            async with self._asking:
                if (known := self._known(agent)) is None:
                    known = await self._found(agent)
                    self._counts[agent] = known, asyncio.get_running_loop().time() + _SHARDS_REMEMBERED
        return known

    def _known(self, agent: AgentName) -> int | None:
        count, until = self._counts.get(agent, (None, 0.0))
        return count if until > asyncio.get_running_loop().time() else None

    def forget(self, agent: AgentName) -> None:
        """Check again before the next request."""
        self._counts.pop(agent, None)

    async def _found(self, agent: AgentName) -> int:
        number = 1
        while number < MOST_SHARDS and await self._broker.depth(shard_of(agent, number)) is not None:
            number += 1
        return number


@dataclass(frozen=True, slots=True)
class _Answered:
    """Identifies a reply, to distinguish a repeated reply from a conflicting one."""

    agent: str
    asked: str | None
    digest: bytes | None


class Client:
    """Sends requests and waits for their replies, on a broker that it opens and closes.

    Request queues are chosen by sender name: use different names for clients that should not wait behind each other.

    Replies come to a queue of this client's own; a reply to a client that is gone is dropped by the agent after
    `reply_retry_time`. Replies are matched by task id; the first one counts. A further one is dropped, and
    counted: in `duplicates` when it says the same (it was sent again), else in `conflicts`. The client keeps open
    requests, and digests of the last 10,000 replies.
    """

    def __init__(self, broker: Broker, name: str = "client") -> None:
        self._broker = broker
        self._name: AgentName = agent_name(name)
        self._id = ReplicaId(new_id())
        self._waiting: dict[TaskId, asyncio.Future[Reply]] = {}
        self._agents: dict[TaskId, str] = {}
        self._answered: dict[TaskId, _Answered] = {}  # the most recent ones
        self._shards = Shards(broker)
        self._asked: dict[TaskId, str] = {}  # the fingerprints of requests
        self._subscription: Subscription | None = None
        self._settling: set[asyncio.Task[bool]] = set()
        self.duplicates = 0
        self.conflicts = 0

    async def __aenter__(self) -> Self:
        try:
            await self._broker.open()
            await self._broker.declare(self._name, self._id)
            self._subscription = await self._broker.consume(private_of(self._name, self._id), 100, self._receive)
        except BaseException:
            await self._broker.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.gather(*self._settling, return_exceptions=True)
        await self._broker.close()

    async def send(
        self,
        agent: str,
        input_: JsonValue,
        *,
        timeout: timedelta | None = None,
        task_id: TaskId | None = None,
        context_id: str | None = None,
    ) -> asyncio.Future[Reply]:
        """Send a request; the future of its reply. `timeout` becomes the task's deadline.

        Raises:
            NotJson: `input_` is not JSON.
            UnknownAgent: nobody ever served `agent` here.
            QueueFull: the agent's request queue is full; try again later.
            BrokerUnavailable: the broker did not take the request; sending again with the same `task_id` is safe.
        """
        name = agent_name(agent)
        task_id = task_id or TaskId(new_id())
        reply = self.expect(agent, task_id)
        request = self.request(input_, task_id, timeout=timeout, context_id=context_id)
        match await self._publish(name, request):
            case Published.ACCEPTED:
                return reply
            case Published.UNROUTABLE:
                raise UnknownAgent(agent)
            case Published.OVERLOADED:
                raise QueueFull(f"the request queue of agent {agent!r} is full; try again later")
            case Published.REJECTED:
                raise ValueError(f"the request to agent {agent!r} is larger than the broker accepts")

    async def _publish(self, agent: AgentName, request: Message) -> Published:
        """Publish to the agent's request queue for this client."""
        address = shard_for(agent, self._name, await self._shards.count(agent))
        (word,) = await self._broker.publish([(address, request)])
        if word is Published.UNROUTABLE and address != requests_of(agent):
            self._shards.forget(agent)
            (word,) = await self._broker.publish([(requests_of(agent), request)])
        return word

    async def ask(self, agent: str, input_: JsonValue, *, timeout: timedelta | None = None) -> Outcome:
        """Send a request and wait for its outcome.

        Raises:
            TimeoutError: no reply within `timeout` and a little more; the task may still end.
        """
        waiting = await self.send(agent, input_, timeout=timeout)
        limit = None if timeout is None else (timeout + timedelta(seconds=5)).total_seconds()
        async with asyncio.timeout(limit):
            return (await waiting).outcome

    def expect(self, agent: str, task_id: TaskId) -> asyncio.Future[Reply]:
        """The future of the reply of `agent` to a task: one that is handed in with `request` by another way."""
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._waiting[task_id], self._agents[task_id] = reply, agent_name(agent)
        self._answered.pop(task_id, None)
        reply.add_done_callback(partial(self._closed, task_id))
        return reply

    def _closed(self, task_id: TaskId, reply: asyncio.Future[Reply]) -> None:
        """Forget a request without a waiting caller."""
        if self._waiting.get(task_id) is reply:
            del self._waiting[task_id], self._agents[task_id]
            self._asked.pop(task_id, None)

    async def cancel(self, agent: str, task_id: TaskId) -> None:
        """Ask `agent` to end a task as cancelled; its requester hears the outcome.

        Raises:
            UnknownAgent: nobody ever served `agent` here.
        """
        letter = (responses_of(agent_name(agent)), cancel_message(self._name, task_id))
        (word,) = await self._broker.publish([letter])
        if word is Published.UNROUTABLE:
            raise UnknownAgent(agent)

    def request(
        self,
        input_: JsonValue,
        task_id: TaskId,
        *,
        timeout: timedelta | None = None,
        context_id: str | None = None,
    ) -> Message:
        """Build the request for a task, with this client as the reply address. Does not send it.

        Raises:
            NotJson: `input_` is not JSON.
        """
        input_ = check_json(input_, "input")
        said = A2AMessage(
            message_id=new_id(),
            role="ROLE_USER",
            parts=[Part(text=input_) if isinstance(input_, str) else Part(data=input_)],
            task_id=task_id,
            context_id=context_id,
        )
        headers: dict[str, HeaderValue] = {Header.CALL_DEPTH.value: 0}
        if timeout is not None:
            if timeout > LONGEST:
                raise ValueError(f"timeout is {timeout}; the maximum is ten years")
            headers[Header.DEADLINE.value] = (datetime.now(UTC) + timeout).timestamp()
        message = Message(
            type=MessageType.REQUEST,
            body=RequestBody(message=said).to_bytes(),
            message_id=task_id,
            correlation_id=task_id,
            app_id=self._name,
            reply_to=private_of(self._name, self._id),
            headers=headers,
            timestamp=datetime.now(UTC),
        )
        self._asked[task_id] = fingerprint(message)
        return message

    def _receive(self, delivery: Delivery) -> None:
        message = delivery.message
        if message.type is MessageType.RESPONSE:
            task_id = TaskId(message.correlation_id)
            if (answered := self._answered.get(task_id)) is not None:
                self._answer_again(answered, message)
            elif (waiting := self._waiting.get(task_id)) is not None and message.app_id == self._agents[task_id]:
                self._answer(waiting, task_id, message)
        settling = asyncio.ensure_future(delivery.ack())
        self._settling.add(settling)
        settling.add_done_callback(self._settling.discard)

    def _answer(self, waiting: asyncio.Future[Reply], task_id: TaskId, message: Message) -> None:
        asked = self._asked.get(task_id)
        if waiting.done():
            return  # the caller has given up
        try:
            body = parse(ResponseBody, message.body)
            if asked is not None and body.refuses not in {None, asked}:
                return  # it refuses another sender's request with the same id
            outcome = body.outcome()
        except PoisonMessage as error:
            waiting.set_exception(error)
            self._remember(task_id, _Answered(message.app_id, asked, None))
            return
        waiting.set_result(Reply(task_id, outcome, message.app_id))
        self._remember(task_id, _Answered(message.app_id, asked, _digest(outcome)))

    def _remember(self, task_id: TaskId, answered: _Answered) -> None:
        self._answered[task_id] = answered
        if len(self._answered) > _ANSWERED_KEPT:
            del self._answered[next(iter(self._answered))]

    def _answer_again(self, answered: _Answered, message: Message) -> None:
        if message.app_id != answered.agent:
            return
        try:
            body = parse(ResponseBody, message.body)
            if answered.asked is not None and body.refuses not in {None, answered.asked}:
                return
            differs = answered.digest is not None and _digest(body.outcome()) != answered.digest
        except PoisonMessage:
            return
        self.conflicts += differs
        self.duplicates += not differs


def _digest(outcome: Outcome) -> bytes:
    return blake2b(encode_outcome(outcome), digest_size=16).digest()
