"""A peer that a test plays."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextvars import Context
from dataclasses import dataclass
from datetime import UTC, datetime
from inspect import isawaitable
from typing import Any, Generic, Literal, Self, TypeAlias, TypeVar

from pydantic import JsonValue

from meshpoint.adapters.inprocess.broker import InProcessExchange
from meshpoint.agents.cards import describe_peer
from meshpoint.agents.peer import Peer
from meshpoint.errors import AgentFailed
from meshpoint.model.bodies import RequestBody, parse_body
from meshpoint.model.call_attempts import failure_of
from meshpoint.model.cards import CardBody
from meshpoint.model.declared_type import TypeMismatch
from meshpoint.model.envelopes import card_message, encode_reply
from meshpoint.model.error_text import describe_exception, exception_message
from meshpoint.model.ids import AgentName, ReplicaId, TaskId, new_id
from meshpoint.model.messages import (
    CARDS,
    DESCRIBE_ALL,
    Header,
    Message,
    MessageType,
    describe_topic,
    nested_queue,
    private_queue,
    request_queue,
    response_queue,
)
from meshpoint.model.outcomes import Failed, FailureKind, Ok, Outcome
from meshpoint.model.usage import TokenUsage
from meshpoint.ports.broker import Delivery

In = TypeVar("In")
Out = TypeVar("Out")

Failure: TypeAlias = Literal["error", "timeout", "cancelled", "undeliverable", "invalid"]
"""Why a call to a stub has no result: the values of `FailureKind`."""

_PREFETCH = 1_000_000
_REPLICA = ReplicaId("stub")
_STARTED_AT = datetime.fromtimestamp(0, UTC)


@dataclass
class _OpenRequest(Generic[In]):
    """A request without an answer. `message` is the copy that arrived last."""

    value: In
    message: Message
    is_running: bool = False  # an async function works on its answer


@dataclass
class _Failures:
    """Answers with `failed` as often as `times` says, or always."""

    failed: Failed
    times: int | None


class Stub(Generic[In, Out]):
    """A peer played by the test; from `TestMesh.stub`.

        asked = mesh.stub(flights).returns(Quote(price=120))
        ...
        assert asked.requests == [Query(city="Rome")]

    A stub without instructions keeps its requests until the test answers them with `answer`. Like
    an agent, it gives the same answer to a request that is sent again after a crash. Agents that
    discover peers find it, with the types and the description of its `Peer`.

    Attributes:
        name: The agent's name.
        requests: The requests so far, oldest first. A request that was sent again counts once.
    """

    def __init__(
        self,
        peer: Peer[In, Out],
        exchange: InProcessExchange,
        wait: Callable[[Awaitable[Any]], Awaitable[Any]],
        on_change: Callable[[], None],
        context: Context,
    ) -> None:
        self.name = peer.name
        self.requests: list[In] = []
        self._peer, self._exchange, self._wait, self._on_change = peer, exchange, wait, on_change
        self._context = context
        self._reply: Callable[[In], Out | Awaitable[Out]] | None = None
        self._failures: list[_Failures] = []
        self._open: dict[str, _OpenRequest[In]] = {}
        self._answers: dict[str, Outcome] = {}
        self._calls: set[asyncio.Task[None]] = set()
        self._acks: set[asyncio.Task[bool]] = set()
        self._seen = 0
        self._changed = asyncio.Event()
        self._consume()

    def __repr__(self) -> str:
        return f"Stub({self.name!r}, {len(self.requests)} requests, {len(self._open)} open)"

    def returns(self, value: Out) -> Self:
        """Answer every request with `value`, including open requests.

        Raises:
            TypeMismatch: The value does not fit the peer's output.
        """
        self._write(value)
        return self.calls(lambda _: value)

    def calls(self, fn: Callable[[In], Out | Awaitable[Out]]) -> Self:
        """Answer every request with the result of `fn`, which may be async.

        An exception becomes a failed outcome, as in an agent. Raise `AgentFailed` to choose its
        message, and whether a caller with a `RetryPolicy` may try again.
        """
        self._reply = fn
        self._answer_open()
        return self

    def fails(
        self, kind: Failure = "error", message: str = "", *, times: int | None = None
    ) -> Self:
        """Fail every request, or the next `times`, before anything else answers.

        mesh.stub(flights).fails("timeout", times=2).returns(Quote(price=120))
        """
        try:
            failed = Failed(FailureKind(kind), message or f"stub {self.name!r} fails")
        except ValueError:
            known = ", ".join(FailureKind)
            raise ValueError(f"{kind!r}: there is no such failure; there are {known}") from None
        self._failures.append(_Failures(failed, times))
        self._answer_open()
        return self

    async def next_request(self) -> In:
        """Wait for the first request that this method has not returned yet.

        Raises:
            MeshIdle: The mesh is idle, and nothing is due that could lead to a request.
        """
        while len(self.requests) <= self._seen:
            self._changed.clear()
            await self._wait(self._changed.wait())
        self._seen += 1
        return self.requests[self._seen - 1]

    def answer(self, value: Out) -> None:
        """Answer the oldest request without an answer.

        Raises:
            TypeMismatch: The value does not fit the peer's output.
            ValueError: No request is open.
        """
        output = self._write(value)
        if not self._open:
            raise ValueError(f"no request to {self.name!r} waits for an answer")
        self._send(next(iter(self._open)), Ok(output))

    @property
    def is_running_code(self) -> bool:
        """Whether an async function of `calls` is running."""
        return bool(self._calls)

    @property
    def has_open_requests(self) -> bool:
        """Whether a request waits for an answer."""
        return bool(self._open)

    async def close(self) -> None:
        """Cancel the functions of `calls` that still run."""
        for task in self._calls:
            task.cancel()
        await asyncio.gather(*self._calls, *self._acks, return_exceptions=True)

    def _consume(self) -> None:
        name = AgentName(self.name)
        self._exchange.declare(name, None, self)
        self._exchange.subscribe(name, _REPLICA, self, [describe_topic(name), DESCRIBE_ALL])
        for address in (
            request_queue(name),
            nested_queue(name),
            response_queue(name),
            private_queue(name, _REPLICA),
        ):
            self._exchange.consume(address, _PREFETCH, self._receive)
        self._exchange.announce(CARDS, self._card())

    def _card(self, correlation_id: str | None = None) -> Message:
        body = CardBody(
            card=describe_peer(self._peer, "stub"), replica=_REPLICA, started_at=_STARTED_AT
        )
        return card_message(AgentName(self.name), body.to_bytes(), correlation_id)

    def _receive(self, delivery: Delivery) -> None:
        message = delivery.message
        ack = asyncio.ensure_future(delivery.ack())
        self._acks.add(ack)
        ack.add_done_callback(self._acks.discard)
        if message.type is MessageType.REQUEST:
            self._receive_request(message)
        elif message.type is MessageType.CANCEL and message.correlation_id in self._open:
            self._send(message.correlation_id, Failed(FailureKind.CANCELLED, "cancelled"))
        elif message.type is MessageType.DESCRIBE and message.reply_to is not None:
            self._exchange.publish(message.reply_to, self._card(message.correlation_id))
        self._changed.set()
        self._on_change()

    def _receive_request(self, message: Message) -> None:
        task_id = message.correlation_id
        if (answer := self._answers.get(task_id)) is not None:
            self._publish(message, answer)
        elif (known := self._open.get(task_id)) is not None:
            known.message = message
        else:
            try:
                value = self._peer._input.read(parse_body(RequestBody, message.body).input())
            except TypeMismatch as error:
                self._publish(message, Failed(FailureKind.INVALID, str(error)))
                return
            self.requests.append(value)
            self._open[task_id] = _OpenRequest(value, message)
            self._answer_open()

    def _answer_open(self) -> None:
        for task_id, request in list(self._open.items()):
            if request.is_running:
                continue
            if (failed := self._next_failure()) is not None:
                self._send(task_id, failed)
            elif self._reply is not None:
                self._run(task_id, request, self._reply)

    def _next_failure(self) -> Failed | None:
        while self._failures:
            failures = self._failures[0]
            if failures.times is None:
                return failures.failed
            if failures.times > 0:
                failures.times -= 1
                return failures.failed
            del self._failures[0]
        return None

    def _run(
        self, task_id: str, request: _OpenRequest[In], fn: Callable[[In], Out | Awaitable[Out]]
    ) -> None:
        try:
            result = fn(request.value)
        except Exception as error:
            self._send(task_id, _failure(error))
            return
        if isawaitable(result):
            request.is_running = True
            task = asyncio.get_running_loop().create_task(
                self._finish(task_id, result), context=self._context.copy()
            )
            self._calls.add(task)
            task.add_done_callback(self._forget_call)
        else:
            self._send_result(task_id, result)

    def _forget_call(self, task: asyncio.Task[None]) -> None:
        self._calls.discard(task)
        self._on_change()

    async def _finish(self, task_id: str, result: Awaitable[Any]) -> None:
        try:
            self._send_result(task_id, await result)
        except Exception as error:
            self._send(task_id, _failure(error))

    def _send_result(self, task_id: str, value: Any) -> None:
        try:
            self._send(task_id, Ok(self._write(value)))
        except TypeMismatch as error:
            self._send(task_id, Failed(FailureKind.ERROR, str(error)))

    def _write(self, value: Any) -> JsonValue:
        try:
            return self._peer._output.write(value)
        except TypeMismatch as error:
            raise TypeMismatch(f"stub {self.name!r}: {error}") from error.__cause__

    def _send(self, task_id: str, outcome: Outcome) -> None:
        if (request := self._open.pop(task_id, None)) is not None:
            self._answers[task_id] = outcome
            self._publish(request.message, outcome)

    def _publish(self, request: Message, outcome: Outcome) -> None:
        self._on_change()
        if request.reply_to is None:
            return
        parent = request.headers.get(Header.PARENT_TASK.value)
        reply = Message(
            type=MessageType.RESPONSE,
            body=encode_reply(TaskId(request.correlation_id), None, outcome),
            message_id=new_id(),
            correlation_id=request.correlation_id,
            app_id=self.name,
            headers={} if parent is None else {Header.PARENT_TASK.value: parent},
        )
        self._exchange.publish(request.reply_to, reply)


def _failure(error: Exception) -> Failed:
    if isinstance(error, AgentFailed):
        return failure_of(error, exception_message(error), FailureKind.ERROR, TokenUsage())
    return Failed(FailureKind.ERROR, describe_exception(error))
