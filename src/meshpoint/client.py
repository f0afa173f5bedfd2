"""A client for programs outside the mesh: scripts, tests, the command line."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from hashlib import blake2b
from types import TracebackType
from typing import Self

from pydantic import JsonValue

from meshpoint.errors import MeshpointError, PoisonMessage, QueueFull
from meshpoint.model.bodies import A2AMessage, Part, RequestBody, ResponseBody, parse_body
from meshpoint.model.calls import MAX_DURATION
from meshpoint.model.envelopes import cancel_message, fingerprint
from meshpoint.model.ids import AgentName, ReplicaId, TaskId, new_id
from meshpoint.model.json_values import check_json
from meshpoint.model.messages import (
    MAX_SHARDS,
    Header,
    HeaderValue,
    Message,
    MessageType,
    private_queue,
    request_queue,
    request_shard,
    response_queue,
    shard_for_sender,
    validate_agent_name,
)
from meshpoint.model.outcomes import Outcome, encode_outcome
from meshpoint.ports.broker import Broker, Delivery, PublishResult

_SHARD_CACHE_SECONDS = 300.0
"""Seconds. RabbitMQ logs an error for each lookup of a missing queue, so lookups are cached."""
_MAX_KEPT_REPLIES = 10_000
"""Number of replies whose digests are kept."""
_MAX_DIGESTS = 8
"""Number of digests kept for a task."""


class UnknownAgent(MeshpointError):
    """No replica of the agent has ever declared its queues in this namespace."""

    def __init__(self, agent: str) -> None:
        fix = (
            "start one with `meshpoint run`, "
            "or correct the agent's name, the broker or the namespace"
        )
        super().__init__(f"no agent {agent!r} in this mesh: {fix}")


@dataclass(frozen=True, slots=True)
class Reply:
    """The single answer to a request, and the agent that sent it."""

    task_id: TaskId
    outcome: Outcome
    agent: str


class ShardCounts:
    """The number of request queues of each agent, refreshed from the broker every five minutes."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._lookup_lock = asyncio.Lock()
        self._counts: dict[AgentName, tuple[int, float]] = {}

    async def count(self, agent: AgentName) -> int:
        """Return the number of request queues of `agent`, at least 1."""
        now = asyncio.get_running_loop().time
        count, expires_at = self._counts.get(agent, (1, 0.0))
        if expires_at > now():
            return count
        async with self._lookup_lock:  # another request may have looked it up meanwhile
            count, expires_at = self._counts.get(agent, (1, 0.0))
            if expires_at <= now():
                count = await self._query_broker(agent)
                self._counts[agent] = count, now() + _SHARD_CACHE_SECONDS
        return count

    def invalidate(self, agent: AgentName) -> None:
        """Query the broker again before the next request."""
        self._counts.pop(agent, None)

    async def _query_broker(self, agent: AgentName) -> int:
        number = 1
        while (
            number < MAX_SHARDS
            and await self._broker.depth(request_shard(agent, number)) is not None
        ):
            number += 1
        return number


@dataclass(frozen=True, slots=True)
class _ReceivedReply:
    """Distinguishes a repeated reply from a conflicting one."""

    agent: str
    request_fingerprint: str | None
    digests: frozenset[bytes]


class Client:
    """Sends requests and waits for their replies.

    It opens and closes the broker itself, as an async context manager.

    The sender's name decides which request queue is used: give clients different names if they
    must not wait behind each other.

    Replies go to a private queue of this client. If the client is gone, the agent drops the reply
    after `reply_retry_time`. Replies are matched by task id, and the first one counts. Later ones
    are dropped and counted: in `duplicates` if they are equal to an earlier one (it was sent
    again), otherwise in `conflicts`. The client keeps open requests, and digests of the last
    10,000 replies.
    """

    def __init__(self, broker: Broker, name: str = "client") -> None:
        self._broker = broker
        self._name: AgentName = validate_agent_name(name)
        self._id = ReplicaId(new_id())
        self._reply_to = private_queue(self._name, self._id)
        self._pending: dict[TaskId, asyncio.Future[Reply]] = {}
        self._agents: dict[TaskId, str] = {}
        self._received_replies: dict[TaskId, _ReceivedReply] = {}  # up to _MAX_KEPT_REPLIES
        self._shards = ShardCounts(broker)
        self._request_fingerprints: dict[TaskId, str] = {}
        self._ack_tasks: set[asyncio.Task[bool]] = set()
        self.duplicates = 0
        self.conflicts = 0

    async def __aenter__(self) -> Self:
        try:
            await self._broker.open()
            await self._broker.declare(self._name, self._id)
            await self._broker.consume(self._reply_to, 100, self._handle_delivery)
        except BaseException:
            await self._broker.close()
            raise
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await asyncio.gather(*self._ack_tasks, return_exceptions=True)
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
        """Send a request and return a future of its reply.

        `timeout` sets the deadline of the task.

        Raises:
            NotJson: `input_` is not JSON.
            UnknownAgent: No replica has ever served `agent` in this namespace.
            QueueFull: The agent's request queue is full; try again later.
            BrokerUnavailable: The broker did not accept the request. Sending again with the same
                `task_id` is safe.
        """
        name = validate_agent_name(agent)
        task_id = task_id or TaskId(new_id())
        reply = self.expect(agent, task_id)
        request = self.request(input_, task_id, timeout=timeout, context_id=context_id)
        address = shard_for_sender(name, self._name, await self._shards.count(name))
        (result,) = await self._broker.publish([(address, request)])
        if result is PublishResult.UNROUTABLE and address != request_queue(name):
            self._shards.invalidate(name)
            (result,) = await self._broker.publish([(request_queue(name), request)])
        match result:
            case PublishResult.ACCEPTED:
                return reply
            case PublishResult.UNROUTABLE:
                raise UnknownAgent(agent)
            case PublishResult.OVERLOADED:
                raise QueueFull(f"the request queue of agent {agent!r} is full; try again later")
            case PublishResult.REJECTED:
                raise ValueError(
                    f"the request to agent {agent!r} is larger than the broker accepts"
                )

    async def ask(
        self, agent: str, input_: JsonValue, *, timeout: timedelta | None = None
    ) -> Outcome:
        """Send a request and wait for its outcome.

        Raises:
            TimeoutError: No reply within `timeout` plus five seconds. The task may still complete.
        """
        reply = await self.send(agent, input_, timeout=timeout)
        limit = None if timeout is None else (timeout + timedelta(seconds=5)).total_seconds()
        async with asyncio.timeout(limit):
            return (await reply).outcome

    def expect(self, agent: str, task_id: TaskId) -> asyncio.Future[Reply]:
        """Return a future of the reply of `agent` to a task.

        For requests that are built with `request` and sent by other means.
        """
        reply: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._pending[task_id], self._agents[task_id] = reply, validate_agent_name(agent)
        self._received_replies.pop(task_id, None)
        reply.add_done_callback(partial(self._discard_pending, task_id))
        return reply

    def _discard_pending(self, task_id: TaskId, reply: asyncio.Future[Reply]) -> None:
        """Discard a request that no caller waits for any more."""
        if self._pending.get(task_id) is reply:
            del self._pending[task_id], self._agents[task_id]
            self._request_fingerprints.pop(task_id, None)

    async def cancel(self, agent: str, task_id: TaskId) -> None:
        """Ask `agent` to end a task as cancelled; its requester receives the outcome.

        Raises:
            UnknownAgent: No replica has ever served `agent` in this namespace.
        """
        envelope = (
            response_queue(validate_agent_name(agent)),
            cancel_message(self._name, task_id),
        )
        (result,) = await self._broker.publish([envelope])
        if result is PublishResult.UNROUTABLE:
            raise UnknownAgent(agent)

    def request(
        self,
        input_: JsonValue,
        task_id: TaskId,
        *,
        timeout: timedelta | None = None,
        context_id: str | None = None,
    ) -> Message:
        """Build the request for a task without sending it. This client is the reply address.

        Raises:
            NotJson: `input_` is not JSON.
        """
        input_ = check_json(input_, "input")
        a2a_message = A2AMessage(
            message_id=new_id(),
            role="ROLE_USER",
            parts=[Part(text=input_) if isinstance(input_, str) else Part(data=input_)],
            task_id=task_id,
            context_id=context_id,
        )
        headers: dict[str, HeaderValue] = {Header.CALL_DEPTH.value: 0}
        if timeout is not None:
            if timeout > MAX_DURATION:
                raise ValueError(f"timeout is {timeout}; the maximum is ten years")
            headers[Header.DEADLINE.value] = (datetime.now(UTC) + timeout).timestamp()
        message = Message(
            type=MessageType.REQUEST,
            body=RequestBody(message=a2a_message).to_bytes(),
            message_id=task_id,
            correlation_id=task_id,
            app_id=self._name,
            reply_to=self._reply_to,
            headers=headers,
            timestamp=datetime.now(UTC),
        )
        self._request_fingerprints[task_id] = fingerprint(message)
        return message

    def _handle_delivery(self, delivery: Delivery) -> None:
        message = delivery.message
        if message.type is MessageType.RESPONSE:
            task_id = TaskId(message.correlation_id)
            if (received := self._received_replies.get(task_id)) is not None:
                self._count_repeated(received, message)
            elif (
                reply := self._pending.get(task_id)
            ) is not None and message.app_id == self._agents[task_id]:
                self._resolve(reply, task_id, message)
        ack_task = asyncio.ensure_future(delivery.ack())
        self._ack_tasks.add(ack_task)
        ack_task.add_done_callback(self._ack_tasks.discard)

    def _resolve(self, reply: asyncio.Future[Reply], task_id: TaskId, message: Message) -> None:
        if reply.done():
            return  # the caller has given up
        request_fingerprint = self._request_fingerprints.get(task_id)
        digests = frozenset[bytes]()
        try:
            outcome = _read_outcome(message, request_fingerprint)
            if outcome is None:
                return
            reply.set_result(Reply(task_id, outcome, message.app_id))
            digests = frozenset({_digest(outcome)})
        except PoisonMessage as error:
            reply.set_exception(error)
        self._received_replies[task_id] = _ReceivedReply(
            message.app_id, request_fingerprint, digests
        )
        if len(self._received_replies) > _MAX_KEPT_REPLIES:
            del self._received_replies[next(iter(self._received_replies))]

    def _count_repeated(self, received: _ReceivedReply, message: Message) -> None:
        if message.app_id != received.agent:
            return
        try:
            outcome = _read_outcome(message, received.request_fingerprint)
        except PoisonMessage:
            return
        if outcome is not None:
            digest = _digest(outcome)
            differs = bool(received.digests) and digest not in received.digests
            self.conflicts += differs
            self.duplicates += not differs
            if differs and len(received.digests) < _MAX_DIGESTS:  # it may be repeated too
                self._received_replies[TaskId(message.correlation_id)] = replace(
                    received, digests=received.digests | {digest}
                )


def _read_outcome(response: Message, request_fingerprint: str | None) -> Outcome | None:
    """The outcome in `response`.

    Returns `None` if it refuses another sender's request with the same id.
    """
    body = parse_body(ResponseBody, response.body)
    if request_fingerprint is not None and body.refused_fingerprint not in {
        None,
        request_fingerprint,
    }:
        return None
    return body.outcome()


def _digest(outcome: Outcome) -> bytes:
    return blake2b(encode_outcome(outcome), digest_size=16).digest()
