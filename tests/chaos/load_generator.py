"""The requester sends at a steady rate, through outages, and records every answer."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from meshpoint.errors import PoisonMessage, Unavailable
from meshpoint.model.bodies import A2AMessage, Part, RequestBody, ResponseBody, parse_body
from meshpoint.model.ids import AgentName, TaskId, new_id
from meshpoint.model.messages import Header, Message, MessageType, request_queue, response_queue
from meshpoint.model.outcomes import Failed, FailureKind
from meshpoint.ports.broker import Broker, Delivery, PublishResult

from .agents import Work
from .ledger import Answer, Ledger, RequestRecord

_LEDGER = AgentName("ledger")
REPLIES = response_queue(_LEDGER)
_FIRST_EXTRA_NUMBER = 1_000_000
"""Requests sent by faults have larger numbers."""
_RETRY_PAUSE = 0.3
"""Seconds before a request that the broker did not accept is sent again."""


def make_work(number: int, rng: random.Random) -> Work:
    """Input of request `number`: most call five leaves once; some use several rounds, nesting,
    other joins, subtasks or working memory.
    """
    draw = rng.random()
    if draw < 0.10:
        return Work(number=number, rounds=2, nested=True)
    if draw < 0.20:
        return Work(number=number, needed=1)
    if draw < 0.30:
        return Work(number=number, needed=3, rounds=1 + rng.randrange(2))
    if draw < 0.55:
        return Work(number=number, rounds=1 + rng.randrange(2), recorded=True)
    if draw < 0.80:
        return Work(
            number=number, rounds=1 + rng.randrange(3), recorded=draw < 0.65, remembered=True
        )
    return Work(number=number)


class LoadGenerator:
    """Async context manager that sends requests at a steady rate.

    It sends `rate` requests a second, with at most `in_flight` unanswered. Replies go to a quorum
    queue, which survives every restart of the broker. The `agents` are called in turn. With
    `login`, only messages from that broker login count as answers.
    """

    def __init__(
        self,
        broker: Broker,
        ledger: Ledger,
        *,
        seed: int,
        rate: float,
        in_flight: int,
        agents: Sequence[str] = ("root",),
        make_input: Callable[[int, random.Random], Work] = make_work,
        login: str | None = None,
    ) -> None:
        self._broker, self._ledger, self._rate = broker, ledger, rate
        self._agents, self._make_input, self._login = agents, make_input, login
        self._rng = random.Random(f"{seed} stream")
        self._capacity = asyncio.Semaphore(in_flight)
        self._tasks: set[asyncio.Task[object]] = set()
        self._answer_received = asyncio.Event()
        self.doubled_requests = 0
        self._extra_count = 0

    async def __aenter__(self) -> LoadGenerator:
        await self._broker.open()
        await self._broker.declare(_LEDGER)
        await self._broker.consume(REPLIES, 200, self._receive)
        return self

    async def __aexit__(self, *failure: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._broker.close()

    async def run(self, seconds: float) -> None:
        """Send for `seconds`. Requests delayed by an outage follow, up to `in_flight` at once."""
        loop = asyncio.get_running_loop()
        start, number = loop.time(), 0
        while (now := loop.time()) < start + seconds:
            due = start + number / self._rate
            if now < due:
                await asyncio.sleep(due - now)
            await self._capacity.acquire()
            number += 1
            self._spawn(number)

    async def wait_until_answered(self, limit: float) -> bool:
        """Wait until no request is open.

        Returns False when no answer arrived for `limit` seconds.
        """
        while self._ledger.open_requests:
            self._answer_received.clear()
            try:
                async with asyncio.timeout(limit):
                    await self._answer_received.wait()
            except TimeoutError:
                return False
        return True

    async def send_extra(self, agent: str) -> None:
        """Send one request to `agent`, in addition to the steady ones."""
        self._extra_count += 1
        await self._capacity.acquire()
        record = RequestRecord(
            TaskId(new_id()),
            Work(number=_FIRST_EXTRA_NUMBER + self._extra_count),
            time.time(),
            agent,
        )
        self._ledger.record_request(record)
        self._track(asyncio.create_task(self._send(record, 0.0)))

    def _spawn(self, number: int) -> None:
        agent = self._agents[number % len(self._agents)]
        record = RequestRecord(
            TaskId(new_id()), self._make_input(number, self._rng), time.time(), agent
        )
        self._ledger.record_request(record)
        pauses = [0.0]
        # send the same request twice: at once, or when it may have ended
        if self._rng.random() < 0.03:
            record.copies, self.doubled_requests = 1, self.doubled_requests + 1
            pauses.append(self._rng.choice((0.0, self._rng.uniform(0.0, 5.0))))
        for pause in pauses:
            self._track(asyncio.create_task(self._send(record, pause)))

    async def _send(self, record: RequestRecord, pause: float) -> None:
        await asyncio.sleep(pause)
        addressed_request = (request_queue(AgentName(record.agent)), _make_request(record))
        while True:
            try:
                (result,) = await self._broker.publish([addressed_request])
            except Unavailable:
                result = None  # in doubt: send it again
            if result is PublishResult.ACCEPTED:
                record.accepted = True
                return
            await asyncio.sleep(_RETRY_PAUSE)

    def _receive(self, delivery: Delivery) -> None:
        message = delivery.message
        if message.type is MessageType.RESPONSE and self._login in {None, message.user_id}:
            record = self._ledger.record_answer(
                TaskId(message.correlation_id), _parse_answer(message)
            )
            if record is not None:
                self._capacity.release()
                self._answer_received.set()
        self._track(asyncio.ensure_future(delivery.ack()))

    def _track(
        self, task: asyncio.Future[object] | asyncio.Task[None] | asyncio.Task[bool]
    ) -> None:
        assert isinstance(task, asyncio.Task)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _make_request(record: RequestRecord) -> Message:
    request_message = A2AMessage(
        message_id=record.task_id,
        role="ROLE_USER",
        parts=[Part(data=record.work.model_dump())],
        task_id=record.task_id,
    )
    return Message(
        type=MessageType.REQUEST,
        body=RequestBody(message=request_message).to_bytes(),
        message_id=record.task_id,
        correlation_id=record.task_id,
        app_id=_LEDGER,
        reply_to=REPLIES,
        headers={Header.CALL_DEPTH.value: 0},
        timestamp=datetime.now(UTC),
    )


def _parse_answer(message: Message) -> Answer:
    try:
        outcome = parse_body(ResponseBody, message.body).outcome()
    except PoisonMessage as error:
        outcome = Failed(FailureKind.INVALID, str(error))
    return Answer(time.time(), message.app_id, outcome, message.body)
