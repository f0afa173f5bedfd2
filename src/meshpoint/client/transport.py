"""Send requests, and route what agents answer to the tasks that this process started."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from time import monotonic
from types import TracebackType
from typing import Literal, Self, TypeAlias
from weakref import WeakValueDictionary

from meshpoint.client.open_task import OpenTask, task_with_other_input
from meshpoint.client.requests import Request, build_message
from meshpoint.client.updates import StatusUpdate
from meshpoint.errors import (
    BrokerUnavailable,
    InvalidInput,
    MeshClosed,
    PoisonMessage,
    QueueFull,
    SendInDoubt,
    UnknownAgent,
)
from meshpoint.model.bodies import A2ATaskState, ResponseBody, StatusBody, parse_body
from meshpoint.model.envelopes import KEEP_ALIVE, cancel_message, fingerprint
from meshpoint.model.ids import AgentName, ReplicaId, TaskId, new_id
from meshpoint.model.messages import (
    MAX_SHARDS,
    Message,
    MessageType,
    private_queue,
    request_queue,
    request_shard,
    response_queue,
    shard_for_sender,
    truncate_reason,
    validate_agent_name,
)
from meshpoint.model.outcomes import Failed, FailureKind
from meshpoint.ports.broker import Broker, Delivery, PublishResult

_Key: TypeAlias = tuple[str, str]
"""The name of an agent, and the id of its task."""

_PREFETCH = 100
_SHARD_CACHE_SECONDS = 300.0
"""Seconds. RabbitMQ logs an error for each lookup of a missing queue, so lookups are cached."""
_MAX_USED_IDS = 1000
_USED_ID_SECONDS = 600.0
"""Seconds. A reply that was sent twice arrives well within this time."""


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
class _UsedId:
    digest: str
    expires_at: float = math.inf
    before: _UsedId | None = None  # the entry before the last request


class UsedIds:
    """Digests of the inputs that were sent under ids that callers chose.

    A reply does not say which input it answers. So until ten minutes after its reply, an id is not
    used for another input: a late or repeated reply to the first would look like the answer to the
    second.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        """Create the collection. `clock` returns seconds."""
        self._clock = clock
        self._digests: dict[_Key, _UsedId] = {}

    def add(self, key: _Key, digest: str) -> None:
        """Remember an input that is being sent. Only the last 1,000 are kept."""
        before = self._digests.pop(key, None)
        self._digests[key] = _UsedId(digest, before=before and replace(before, before=None))
        if len(self._digests) > _MAX_USED_IDS:
            del self._digests[next(iter(self._digests))]

    def withdraw(self, key: _Key) -> None:
        """Forget the last `add`: the broker has refused the request."""
        if (used := self._digests.pop(key, None)) is not None and used.before is not None:
            self._digests[key] = used.before

    def record_reply(self, key: _Key) -> None:
        """Let the id be used for another input in ten minutes."""
        if (used := self._digests.get(key)) is not None:
            expires_at = self._clock() + _USED_ID_SECONDS
            self._digests[key] = replace(used, expires_at=expires_at)

    def discard(self, key: _Key) -> None:
        """Forget an input that its agent refused."""
        self._digests.pop(key, None)

    def digest(self, key: _Key) -> str | None:
        """The digest of the last input under this id, or `None` if none is known."""
        used = self._digests.get(key)
        return None if used is None else used.digest

    def has_other(self, key: _Key, digest: str) -> bool:
        """Whether another input was sent under this id recently."""
        used = self._digests.get(key)
        if used is None or used.digest == digest:
            return False
        return used.expires_at > self._clock()


class Transport:
    """One connection of a caller: publishes requests and cancels, receives replies and status.

    It opens and closes the broker itself, as an async context manager or with `open` and `close`.
    Replies go to a private queue of this connection. If the connection is gone, the agent drops
    the reply after `reply_retry_time`.

    Args:
        broker: A broker that is not open.
        name: The sender's name. It decides which request queue is used: give callers different
            names if they must not wait behind each other.
        on_response: Called with each response, before it is routed.
    """

    def __init__(
        self,
        broker: Broker,
        name: str = "client",
        on_response: Callable[[Message], None] | None = None,
    ) -> None:
        self._broker = broker
        self.name: AgentName = validate_agent_name(name)
        self._id = ReplicaId(new_id())
        self.reply_to = private_queue(self.name, self._id)
        self._open: WeakValueDictionary[_Key, OpenTask] = WeakValueDictionary()
        self._awaited: set[object] = set()  # keeps the tasks for which someone waits
        self._used_ids = UsedIds(monotonic)
        self._shards = ShardCounts(broker)
        self._on_response = on_response
        self._ack_tasks: set[asyncio.Task[bool]] = set()
        self._is_closed = False

    async def open(self) -> None:
        """Connect and declare the queue for replies. A failure leaves nothing open.

        Raises:
            BrokerUnavailable: The broker does not answer.
        """
        try:
            await self._broker.open()
            await self._broker.declare(self.name, self._id)
            await self._broker.consume(self.reply_to, _PREFETCH, self._handle_delivery)
        except BaseException:
            await self._broker.close()
            raise

    async def close(self) -> None:
        """Disconnect. Open tasks continue in the mesh, and waits for them raise `MeshClosed`."""
        self._is_closed = True
        for task in list(self._open.values()):
            task.close()
        await asyncio.gather(*self._ack_tasks, return_exceptions=True)
        await self._broker.close()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def send(self, request: Request) -> OpenTask:
        """Send a request.

        A task whose id was used for another input is returned as ended, and nothing is sent.

        Raises:
            UnknownAgent: No replica has ever served the agent in this namespace.
            QueueFull: The agent's request queue is full; try again later.
            SendInDoubt: The broker did not confirm the request.
            InvalidInput: The request is larger than the broker accepts.
            MeshClosed: The connection was closed.
        """
        if self._has_other_input(request):
            return task_with_other_input(request.agent, request.task_id)
        task, message = self.prepare(request)
        key = task.agent, task.id
        if request.digest is not None:
            self._used_ids.add(key, request.digest)
        try:
            await self.publish_request(request.agent, message)
        except (UnknownAgent, QueueFull, InvalidInput):
            self._used_ids.withdraw(key)
            task.digest = self._used_ids.digest(key)
            raise
        except BrokerUnavailable as error:
            raise SendInDoubt(request.task_id, str(error)) from error
        return task

    def prepare(self, request: Request) -> tuple[OpenTask, Message]:
        """Build the message of a request without sending it, and open its task.

        Raises:
            MeshClosed: The connection was closed.
        """
        task = self.expect(request.agent, request.task_id)
        task.digest = request.digest
        message = build_message(request, self.name, self.reply_to)
        task.add_request(fingerprint(message), request.timeout)
        return task, message

    def _has_other_input(self, request: Request) -> bool:
        """Whether the request's id was recently used for another input, or is open with one."""
        key, digest = (request.agent, request.task_id), request.digest
        if digest is None:
            return False
        task = self._open.get(key)
        if task is not None and task.outcome is None and task.digest is not None:
            return task.digest != digest
        return self._used_ids.has_other(key, digest)

    def expect(self, agent: AgentName, task_id: TaskId) -> OpenTask:
        """Return the open task with this id, created if needed. Nothing is sent.

        Raises:
            MeshClosed: The connection was closed.
        """
        if self._is_closed:
            raise MeshClosed("the connection to the mesh was closed: connect again")
        task = self._open.get((agent, task_id))
        if task is None or task.outcome is not None:
            task = self._open[agent, task_id] = OpenTask(agent, task_id, self._awaited)
        return task

    async def publish_request(self, agent: AgentName, message: Message) -> None:
        """Publish a prepared request. Raises the errors of `send`, or `BrokerUnavailable`."""
        address = shard_for_sender(agent, self.name, await self._shards.count(agent))
        (result,) = await self._broker.publish([(address, message)])
        if result is PublishResult.UNROUTABLE and address != request_queue(agent):
            self._shards.invalidate(agent)
            (result,) = await self._broker.publish([(request_queue(agent), message)])
        match result:
            case PublishResult.ACCEPTED:
                return
            case PublishResult.UNROUTABLE:
                raise UnknownAgent(agent)
            case PublishResult.OVERLOADED:
                raise QueueFull(f"the request queue of agent {agent!r} is full; try again later")
            case PublishResult.REJECTED:
                raise InvalidInput(
                    f"the request to agent {agent!r} is larger than the broker accepts"
                )

    async def cancel(self, agent: str, task_id: TaskId, reason: str = "") -> None:
        """Ask `agent` to end a task as cancelled; its requester receives the outcome.

        Raises:
            UnknownAgent: No replica has ever served `agent` in this namespace.
            BrokerUnavailable: The broker did not confirm the cancel. Repeating it is safe.
        """
        address = response_queue(validate_agent_name(agent))
        message = cancel_message(self.name, task_id, reason=truncate_reason(reason))
        (result,) = await self._broker.publish([(address, message)])
        if result is PublishResult.UNROUTABLE:
            raise UnknownAgent(agent)
        if result is not PublishResult.ACCEPTED:
            raise BrokerUnavailable(f"the queue of agent {agent!r} did not accept the cancel")

    def _handle_delivery(self, delivery: Delivery) -> None:
        message = delivery.message
        try:
            if message.type is MessageType.RESPONSE:
                self._handle_response(message)
            elif message.type is MessageType.STATUS:
                self._handle_status(message)
        finally:
            ack_task = asyncio.ensure_future(delivery.ack())
            self._ack_tasks.add(ack_task)
            ack_task.add_done_callback(self._ack_tasks.discard)

    def _handle_response(self, message: Message) -> None:
        if self._on_response is not None:
            self._on_response(message)
        key = message.app_id, message.correlation_id
        self._used_ids.record_reply(key)
        if (task := self._open.get(key)) is None or task.outcome is not None:
            return
        try:
            body = parse_body(ResponseBody, message.body)
            outcome, refused = body.outcome(), body.refused_fingerprint
        except PoisonMessage as error:
            problem = f"the response cannot be read: {truncate_reason(str(error))}"
            outcome, refused = Failed(FailureKind.INVALID, problem), None
        if refused is not None:
            if not task.is_refused_by(refused):
                return  # it refuses another sender's request with the same id
            self._used_ids.discard(key)
        task.end(outcome)
        del self._open[key]

    def _handle_status(self, message: Message) -> None:
        task = self._open.get((message.app_id, message.correlation_id))
        if task is None or task.outcome is not None:
            return
        try:
            status = parse_body(StatusBody, message.body).status_update.status
        except PoisonMessage:
            return  # status updates are advisory
        if (state := _STATES.get(status.state)) is None:
            return
        part = status.message.parts[0] if status.message else None
        data = None if part is None else part.data if part.text is None else part.text
        if data != KEEP_ALIVE:
            at = _parse_time(status.timestamp)
            task.add_update(StatusUpdate(at=at, state=state, message=data))


_STATES: dict[A2ATaskState, Literal["submitted", "working"]] = {
    A2ATaskState.SUBMITTED: "submitted",
    A2ATaskState.WORKING: "working",
}


def _parse_time(text: str | None) -> datetime:
    """The time of a message; now if it is missing or has no time zone."""
    try:
        time = datetime.fromisoformat(text or "")
    except ValueError:
        return datetime.now(UTC)
    return time if time.tzinfo is not None else datetime.now(UTC)
