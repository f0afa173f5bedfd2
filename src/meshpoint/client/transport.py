"""Send requests, and route what agents answer to the tasks that this process started."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from itertools import chain, repeat
from time import monotonic
from types import TracebackType
from typing import Self, TypeAlias
from weakref import WeakValueDictionary

from pydantic import JsonValue

from meshpoint.client.followed_tasks import FollowedTasks
from meshpoint.client.found_agents import CardAnswers, FoundAgent
from meshpoint.client.open_task import OpenTask, task_with_other_input
from meshpoint.client.reply_slot import ReplySlot
from meshpoint.client.requests import Request, build_message
from meshpoint.client.starts import REPEAT_DELAYS, Start, Starts
from meshpoint.client.status_query import StatusQuery, StatusReply
from meshpoint.errors import (
    AnswerRefused,
    BrokerUnavailable,
    InvalidInput,
    MeshClosed,
    OtherRequester,
    PoisonMessage,
    QuestionNotOpen,
    QueueFull,
    SendInDoubt,
    SignalNotKept,
    SignalRefused,
    TaskExists,
    UnknownAgent,
)
from meshpoint.model.bodies import CompletedBody, ResponseBody, StatusBody, parse_body
from meshpoint.model.envelopes import (
    attach_message,
    cancel_message,
    complete_message,
    describe_message,
    fingerprint,
    read_message,
    reject_message,
    signal_message,
)
from meshpoint.model.ids import AgentName, ReplicaId, TaskId, new_id
from meshpoint.model.messages import (
    DESCRIBE_ALL,
    MAX_SHARDS,
    AttachStatus,
    CompletionStatus,
    Header,
    Message,
    MessageType,
    describe_topic,
    private_queue,
    request_queue,
    request_shard,
    response_queue,
    shard_for_sender,
    truncate_reason,
    validate_agent_name,
)
from meshpoint.model.outcomes import Failed, FailureKind, Ok
from meshpoint.model.questions import QuestionKey
from meshpoint.model.task_status import ENDED_STATES, TaskStatus
from meshpoint.ports.broker import Broker, Delivery, PublishResult

_Key: TypeAlias = tuple[str, str]
"""The name of an agent, and the id of its task."""

_PREFETCH = 100
COMPLETION_SECONDS = 10.0
"""How long an answer or a signal is repeated while its task is unknown, in seconds."""
COMPLETION_RETRY_SECONDS, _SILENCE_SECONDS = 0.5, 3.0
"""Delays before it is repeated, in seconds: after a reply, and without one."""
_REPLIED_TYPES = {MessageType.COMPLETE, MessageType.SIGNAL, MessageType.READ}
_SHARD_CACHE_SECONDS = 300.0
"""Seconds. RabbitMQ logs an error for each lookup of a missing queue, so lookups are cached."""
_MAX_SHARD_COUNTS = 1000
_CONNECTION_CHECK_SECONDS = 5.0
_QUESTIONS_PER_SECOND = 200
"""Maximum attaches per second after an outage."""
_MAX_USED_IDS = 1000
_USED_ID_SECONDS = 600.0
"""Seconds. A reply that was sent twice arrives well within this time."""


def utc_now() -> datetime:
    """The current time in UTC."""
    return datetime.now(UTC)


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
                self._remember(agent, count, now() + _SHARD_CACHE_SECONDS)
        return count

    def _remember(self, agent: AgentName, count: int, expires_at: float) -> None:
        """Cache a number as the last to expire. Only the last 1,000 are kept."""
        self._counts.pop(agent, None)
        self._counts[agent] = count, expires_at
        if len(self._counts) > _MAX_SHARD_COUNTS:
            del self._counts[next(iter(self._counts))]

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


_Reply: TypeAlias = tuple[CompletionStatus, CompletedBody]


def _decides(reply: _Reply) -> bool:
    return reply[0] is not CompletionStatus.NOT_OPEN


async def _until_silent(replies: ReplySlot[_Reply]) -> AsyncIterator[_Reply]:
    """Iterate over the replies until it is time to send the message again."""
    limit = _SILENCE_SECONDS
    while True:
        try:
            async with asyncio.timeout(limit):
                reply = await replies.take()
        except TimeoutError:
            return
        limit = COMPLETION_RETRY_SECONDS
        yield reply


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
        now: The time from which a task's `timeout` counts.
        open_task: Creates the record of a task from its agent, its id and the awaited tasks.
        current_traceparent: Returns the caller's current span, sent with each request.
    """

    def __init__(
        self,
        broker: Broker,
        name: str = "client",
        on_response: Callable[[Message], None] | None = None,
        *,
        now: Callable[[], datetime] = utc_now,
        open_task: Callable[[str, TaskId, set[object]], OpenTask] = OpenTask,
        current_traceparent: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._broker, self._current_traceparent = broker, current_traceparent
        self._now, self._open_task = now, open_task
        self.name: AgentName = validate_agent_name(name)
        self._id = ReplicaId(new_id())
        self.reply_to = private_queue(self.name, self._id)
        self._open: WeakValueDictionary[_Key, OpenTask] = WeakValueDictionary()
        self._awaited: set[object] = set()  # keeps the tasks for which someone waits
        self._followed = FollowedTasks()
        self._used_ids = UsedIds(monotonic)
        self._shards = ShardCounts(broker)
        self._on_response = on_response
        self._exchanges: dict[str, ReplySlot[_Reply]] = {}
        self._queries: dict[str, StatusQuery] = {}
        self._poll_token = new_id()  # for the status queries of tasks whose place was taken
        self._card_answers: dict[str, CardAnswers] = {}
        self._starts = Starts()
        self._ack_tasks: set[asyncio.Task[bool]] = set()
        self._is_closed = False
        self._watcher: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Connect and declare the queue for replies. A failure leaves nothing open.

        Raises:
            BrokerUnavailable: The broker does not answer.
        """
        try:
            await self._broker.open()
            await self._broker.declare(self.name, self._id)
            await self._broker.consume(self.reply_to, _PREFETCH, self._handle_delivery)
            self._watcher = asyncio.create_task(self._watch_connection())
        except BaseException:
            await self._broker.close()
            raise

    async def close(self) -> None:
        """Disconnect. Open tasks continue in the mesh, and waits for them raise `MeshClosed`."""
        self._is_closed = True
        if self._watcher is not None:
            self._watcher.cancel()
        error = MeshClosed("the connection to the mesh was closed")
        for replies in self._exchanges.values():
            replies.close(error)
        for query in self._queries.values():
            query.close(error)
        self._starts.close(error)
        for task in list(self._open.values()):
            task.close()
        await asyncio.gather(*self._ack_tasks, return_exceptions=True)
        await self._broker.close()

    async def _watch_connection(self) -> None:
        """Ask for the outcomes of open tasks after each outage.

        Agents retry a reply for 30 seconds. In a longer outage, the reply may be lost along with
        the private queue.
        """
        was_consuming = True
        while True:
            await asyncio.sleep(_CONNECTION_CHECK_SECONDS)
            is_consuming = self._broker.is_consuming(self.reply_to)
            if is_consuming and not was_consuming:
                self.ask_again()
            was_consuming = is_consuming

    def ask_again(self) -> None:
        """Ask for the outcomes of all open tasks with waiters, spread over time."""
        for number, task in enumerate(list(self._open.values())):
            task.ask_again(number / _QUESTIONS_PER_SECOND)

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
        if request.must_be_new:
            return await self._start(request)
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

    async def _start(self, request: Request) -> OpenTask:
        """Send a request for a task that must not exist, until a replica has accepted it."""
        key = request.agent, request.task_id
        known = self._open.get(key)
        if self._has_other_input(request):
            problem = f"task {request.task_id!r} exists with another input"
            raise TaskExists(*key, problem)
        is_open = known is not None and known.outcome is None
        is_known = known is not None and is_open and known.is_requested
        start = self._starts.begin(key, is_known=is_known, is_attached=is_open and not is_known)
        task = self.expect(*key)
        message = self._build_message(request, start.token)
        start.fingerprint = fingerprint(message)
        is_decided = False
        try:
            await self.publish_request(request.agent, message)
            await self._await_decision(start, request.agent, message)
            is_decided = True
        except TaskExists:
            is_decided = True
            raise
        except (QueueFull, UnknownAgent, InvalidInput):
            is_decided = not start.was_in_doubt
            raise
        except BrokerUnavailable as error:
            raise SendInDoubt(request.task_id, str(error)) from error
        finally:
            self._starts.end(key, in_doubt=not is_decided)
        task.digest = request.digest
        if request.digest is not None:
            self._used_ids.add(key, request.digest)
        task.add_request(start.fingerprint, request.timeout)
        return task

    async def _await_decision(self, start: Start, agent: AgentName, message: Message) -> None:
        """Wait until a replica has accepted or refused a request; repeat it meanwhile."""
        for delay in chain(REPEAT_DELAYS, repeat(REPEAT_DELAYS[-1])):
            try:
                async with asyncio.timeout(delay):
                    await asyncio.shield(start.decided)
                return
            except TimeoutError:
                with suppress(BrokerUnavailable, UnknownAgent, InvalidInput):
                    await self.publish_request(agent, message)

    def prepare(self, request: Request) -> tuple[OpenTask, Message]:
        """Build the message of a request without sending it, and open its task.

        Raises:
            MeshClosed: The connection was closed.
        """
        task = self.expect(request.agent, request.task_id)
        task.digest = request.digest
        message = self._build_message(request)
        task.add_request(fingerprint(message), request.timeout)
        return task, message

    def _build_message(self, request: Request, start_token: str | None = None) -> Message:
        return build_message(
            request,
            self.name,
            self.reply_to,
            self._now(),
            start_token,
            self._current_traceparent(),
        )

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
        self._check_open()
        task = self._open.get((agent, task_id))
        if task is None or task.outcome is not None:
            self._followed.discard(agent, task_id)
            task = self._open[agent, task_id] = self._open_task(agent, task_id, self._awaited)
            task.attachment.ask_by(
                partial(self._ask_for_outcome, agent, task_id),
                partial(self._poll_status, agent, task_id),
            )
        return task

    def attach(self, agent: AgentName, task_id: TaskId) -> OpenTask:
        """Return the task with this id. Nothing is sent until someone waits for it.

        A task whose updates were read here recently is the same object, even if it has completed.
        A failed task may have been resumed, so its agent is asked again.

        Raises:
            MeshClosed: The connection was closed.
        """
        self._check_open()
        known = self._followed.find(agent, task_id)
        outcome = None if known is None or not known.is_answered else known.outcome
        if known is not None and isinstance(outcome, Ok):
            return known
        task = self.expect(agent, task_id)
        if known is not None and outcome is not None:
            task.expect_at_least(known)
            self._followed.keep(known)
        if not task.is_requested:
            task.attachment.start()
        return task

    def keep_followed(self, task: OpenTask) -> None:
        """Keep a task after its last reader is gone, for a reader that comes later."""
        known = self._followed.find(task.agent, task.id)
        if task.outcome is None or known is None or known.outcome is not None:
            self._followed.keep(task)  # else a later attempt is open

    def forget_followed(self, task: OpenTask) -> None:
        """Drop a task: a reader has seen its end."""
        self._followed.forget(task)

    async def _ask_for_outcome(
        self, agent: AgentName, task_id: TaskId, wants_snapshot: bool = False
    ) -> None:
        message = attach_message(self.name, task_id, self.reply_to, wants_snapshot=wants_snapshot)
        await self._publish_control(agent, message, "message")

    async def _poll_status(self, agent: AgentName, task_id: TaskId) -> None:
        token = self._poll_token
        message = attach_message(self.name, task_id, self.reply_to, query=token)
        await self._publish_control(agent, message, "query")

    async def query_status(
        self, agent: AgentName, task_id: TaskId, *, requested: bool
    ) -> TaskStatus:
        """Ask for the status of a task. `requested`: this connection has requested it.

        Raises:
            MeshpointError: As for `TaskHandle.status`.
        """
        token = new_id()
        message = attach_message(self.name, task_id, self.reply_to, query=token)
        query = self._queries[token] = StatusQuery(agent, task_id, self.name)

        async def send() -> None:
            self._check_open()
            await self._publish_control(agent, message, "query")

        try:
            return await query.ask(send, requested=requested)
        finally:
            del self._queries[token]

    async def find_agents(
        self, names: Sequence[AgentName], wait_seconds: float
    ) -> list[FoundAgent]:
        """Ask the replicas of the agents in `names`, or of all agents, for their cards.

        Raises:
            BrokerUnavailable: The broker did not accept the question.
            MeshClosed: The connection was closed.
        """
        self._check_open()
        topics = [describe_topic(name) for name in names] or [DESCRIBE_ALL]
        message = describe_message(self.name, self.reply_to)
        answers = self._card_answers[message.correlation_id] = CardAnswers()
        try:
            for topic in topics:
                await self._broker.announce(topic, message)
            await answers.wait(wait_seconds, names)
        finally:
            del self._card_answers[message.correlation_id]
        return answers.agents()

    def _check_open(self) -> None:
        if self._is_closed:
            raise MeshClosed("the connection to the mesh was closed: connect again")

    async def _publish_control(self, agent: AgentName, message: Message, what: str) -> None:
        """Publish a message to the agent's own queue. `what` is its name in an error.

        Raises:
            UnknownAgent: No replica has ever served `agent` in this namespace.
            BrokerUnavailable: The broker did not confirm the message.
        """
        (result,) = await self._broker.publish([(response_queue(agent), message)])
        if result is PublishResult.UNROUTABLE:
            raise UnknownAgent(agent)
        if result is not PublishResult.ACCEPTED:
            raise BrokerUnavailable(f"the queue of agent {agent!r} did not accept the {what}")

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

    async def complete(self, question_id: str, value: JsonValue) -> None:
        """Answer a question. Retries for ten seconds while the question is not known.

        Raises:
            QuestionNotOpen: It is not open, or no replica has replied. In the latter case, the
                answer may still be recorded when a replica starts.
            AnswerRefused: It was answered before, the value does not fit, or its agent accepts no
                answer from this sender.
            UnknownAgent: No replica has ever served its agent in this namespace.
            BrokerUnavailable: The broker did not confirm the answer. Repeating it is safe.
            MeshClosed: The connection was closed.
        """
        key = QuestionKey.from_id(question_id)
        message = complete_message(self.name, question_id, key.task_id, value, self.reply_to)
        await self._send_completion(key, message)

    async def reject(self, question_id: str, reason: str) -> None:
        """Reject a question, as `complete` answers it.

        Raises:
            MeshpointError: As for `complete`.
        """
        key = QuestionKey.from_id(question_id)
        message = reject_message(self.name, question_id, key.task_id, reason, self.reply_to)
        await self._send_completion(key, message)

    async def _send_completion(self, key: QuestionKey, message: Message) -> None:
        status, body = await self._exchange(key.agent, message, "answer")
        if status is CompletionStatus.REFUSED:
            raise AnswerRefused(body.text)
        if status is not CompletionStatus.RECORDED:
            silence = (
                f"no reply: no replica of {key.agent!r} is running or has the question in memory, "
                "or the message was refused unread (see its dead letters); if the answer is still "
                "queued, a replica that starts may still record it"
            )
            raise QuestionNotOpen(
                f"question {key.name!r} of task {key.task_id!r}: {body.text or silence}"
            )

    async def signal(
        self,
        agent: AgentName,
        task_id: TaskId,
        signal: str,
        signal_id: str,
        value: JsonValue,
    ) -> None:
        """Send a signal to a task. Retries for ten seconds while the task is not known.

        Raises:
            SignalRefused: The task has ended, has too many signals, or is another requester's.
            SignalNotKept: No replica knows the task, or none has replied.
            UnknownAgent: No replica has ever served `agent` in this namespace.
            BrokerUnavailable: The broker did not confirm it. Repeating it with its id is safe.
            MeshClosed: The connection was closed.
        """
        message = signal_message(self.name, task_id, signal, signal_id, value, self.reply_to)
        status, body = await self._exchange(agent, message, "signal")
        if status is CompletionStatus.REFUSED:
            raise SignalRefused(f"signal {signal!r}: {body.text}")
        if status is not CompletionStatus.RECORDED:
            silence = (
                f"no reply: no replica of {agent!r} is running or has the task in memory; if the "
                "signal is still queued, a replica that starts may still store it"
            )
            raise SignalNotKept(
                f"signal {signal!r} to task {task_id!r} of {agent!r}: {body.text or silence}"
            )

    async def read(self, agent: AgentName, task_id: TaskId, key: str) -> tuple[bool, JsonValue]:
        """Read a value of a task: whether it is set, and the value.

        It counts as not set if no replica that has the task has replied for ten seconds.

        Raises:
            TaskNotFound: The task exists nowhere.
            OtherRequester: It was sent under another name.
            UnknownAgent: No replica has ever served `agent` in this namespace.
            BrokerUnavailable: The broker did not confirm the message.
            MeshClosed: The connection was closed.
        """
        message = read_message(self.name, task_id, key, self.reply_to)
        status, body = await self._exchange(agent, message, "message")
        if status is CompletionStatus.REFUSED and body.requester is not None:
            raise OtherRequester(task_id, body.requester, self.name)
        if status is not CompletionStatus.RECORDED:
            await self.query_status(agent, task_id, requested=False)  # raises if that is certain
        return bool(body.is_set), body.value

    async def _exchange(
        self, agent: AgentName, message: Message, what: str
    ) -> tuple[CompletionStatus | None, CompletedBody]:
        """Send a message until it is recorded or refused, for ten seconds at most.

        Returns the last reply; its status is `None` if there was none.
        """
        self._check_open()
        replies = self._exchanges[message.message_id] = ReplySlot(_decides)
        last: tuple[CompletionStatus | None, CompletedBody] = None, CompletedBody()
        try:
            async with asyncio.timeout(COMPLETION_SECONDS):
                while True:
                    await self._publish_control(agent, message, what)
                    async for reply in _until_silent(replies):
                        if _decides(reply):
                            return reply
                        last = reply
        except TimeoutError:
            return last
        finally:
            del self._exchanges[message.message_id]

    def _handle_completion(self, message: Message) -> None:
        replies = self._exchanges.get(message.correlation_id)
        try:
            status = CompletionStatus(str(message.headers.get(Header.COMPLETED)))
            body = parse_body(CompletedBody, message.body)
        except (ValueError, PoisonMessage):
            return  # of a later release
        if replies is not None:
            replies.add((status, body))

    async def cancel(self, agent: str, task_id: TaskId, reason: str = "") -> None:
        """Ask `agent` to end a task as cancelled; its requester receives the outcome.

        Raises:
            UnknownAgent: No replica has ever served `agent` in this namespace.
            BrokerUnavailable: The broker did not confirm the cancel. Repeating it is safe.
        """
        name = validate_agent_name(agent)
        message = cancel_message(self.name, task_id, reason=truncate_reason(reason))
        await self._publish_control(name, message, "cancel")

    def _handle_delivery(self, delivery: Delivery) -> None:
        message = delivery.message
        try:
            if message.type is MessageType.RESPONSE:
                self._handle_response(message)
            elif message.type is MessageType.STATUS:
                self._handle_status(message)
            elif message.type in _REPLIED_TYPES:
                self._handle_completion(message)
            elif message.type is MessageType.CARD:
                self._handle_card(message)
        finally:
            ack_task = asyncio.ensure_future(delivery.ack())
            self._ack_tasks.add(ack_task)
            ack_task.add_done_callback(self._ack_tasks.discard)

    def _handle_card(self, message: Message) -> None:
        if (answers := self._card_answers.get(message.correlation_id)) is not None:
            answers.add(message)

    def _handle_response(self, message: Message) -> None:
        if self._on_response is not None:
            self._on_response(message)
        key = message.app_id, message.correlation_id
        self._used_ids.record_reply(key)
        if (task := self._open.get(key)) is None or task.outcome is not None:
            return
        try:
            body = parse_body(ResponseBody, message.body)
            if self._starts.handle_response(key, body):
                return
            outcome, refused = body.outcome(), body.refused_fingerprint
        except PoisonMessage as error:
            problem = f"the response cannot be read: {truncate_reason(str(error))}"
            outcome, refused = Failed(FailureKind.INVALID, problem), None
        if refused is not None:
            if not task.is_refused_by(refused):
                return  # it refuses another sender's request with the same id
            self._used_ids.discard(key)
        task.end(outcome, size=len(message.body))
        self._followed.measure(task)
        del self._open[key]

    def _handle_query_reply(self, token: str, message: Message) -> None:
        try:
            known = AttachStatus(str(message.headers.get(Header.ATTACH)))
            data = _read_status_data(message)
        except (ValueError, PoisonMessage):
            return  # of a later release
        requester, certain = _read_requester(data), _is_certain(message)
        has_status = known in {AttachStatus.RECORDED, AttachStatus.RUNNING}
        try:
            status = TaskStatus.model_validate(data) if has_status else None
        except ValueError:
            status = None
        if token == self._poll_token:
            task = self._open.get((message.app_id, message.correlation_id))
            if task is not None and task.outcome is None:
                self._record_known(task, known, requester, certain=certain)
                if status is not None and status.state in ENDED_STATES:
                    task.record_end()
        elif (query := self._queries.get(token)) is not None:  # else an earlier query's
            query.add(StatusReply(known, status, requester, certain))

    def _handle_status(self, message: Message) -> None:
        if (token := message.headers.get(Header.START)) is not None:
            self._starts.accept((message.app_id, message.correlation_id), str(token))
            return
        if (token := message.headers.get(Header.QUERY)) is not None:
            self._handle_query_reply(str(token), message)
            return
        task = self._open.get((message.app_id, message.correlation_id))
        if task is None or task.outcome is not None:
            return
        if (status := message.headers.get(Header.ATTACH)) is not None:
            self._handle_attach_status(task, str(status), message)
        else:
            task.add_status(message)
            self._followed.measure(task)

    def _handle_attach_status(self, task: OpenTask, status: str, message: Message) -> None:
        try:
            known = AttachStatus(status)
            data = _read_status_data(message)
        except (ValueError, PoisonMessage):
            return  # of a later release
        if known is AttachStatus.DETACHED:
            task.detach()
            return
        self._record_known(task, known, _read_requester(data), certain=_is_certain(message))

    def _record_known(
        self, task: OpenTask, known: AttachStatus, requester: str, *, certain: bool
    ) -> None:
        if known is AttachStatus.REFUSED:
            task.refuse(partial(OtherRequester, task.id, requester, self.name))
        else:
            task.record_attach_status(known, certain=certain)


def _read_status_data(message: Message) -> dict[str, JsonValue]:
    """The object in a status message, or an empty one.

    Raises:
        PoisonMessage: The message cannot be read.
    """
    content = parse_body(StatusBody, message.body).status_update.status.message
    data = None if content is None else content.parts[0].data
    return data if isinstance(data, dict) else {}


def _is_certain(message: Message) -> bool:
    """Whether a reply that the task is unknown is certain. Earlier releases never are."""
    return message.headers.get(Header.CERTAIN) == 1


def _read_requester(data: dict[str, JsonValue]) -> str:
    return truncate_reason(str(data.get("requester", "another client")))
