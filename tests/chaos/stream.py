"""The requester: sends at a steady rate, through outages, and records every answer in the ledger."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

from meshpoint.errors import PoisonMessage, Unavailable
from meshpoint.model.bodies import A2AMessage, Part, RequestBody, ResponseBody, parse
from meshpoint.model.ids import AgentName, TaskId, new_id
from meshpoint.model.messages import Header, Message, MessageType, requests_of, responses_of
from meshpoint.model.outcomes import Failed, FailureKind
from meshpoint.ports.broker import Broker, Delivery, Published

from .cast import Work
from .ledger import Answer, Entry, Ledger

_LEDGER = AgentName("ledger")
REPLIES = responses_of(_LEDGER)
_EXTRA = 1_000_000
"""Requests sent by faults have larger numbers."""
_PAUSE = 0.3
"""Seconds before a request that the broker did not accept is sent again."""


def work(number: int, chance: random.Random) -> Work:
    """Input of request `number`: most call five leaves once; some use several rounds, nesting,
    other joins, subtasks or working memory.
    """
    dice = chance.random()
    if dice < 0.10:
        return Work(number=number, rounds=2, nested=True)
    if dice < 0.20:
        return Work(number=number, needed=1)
    if dice < 0.30:
        return Work(number=number, needed=3, rounds=1 + chance.randrange(2))
    if dice < 0.55:
        return Work(number=number, rounds=1 + chance.randrange(2), recorded=True)
    if dice < 0.80:
        return Work(number=number, rounds=1 + chance.randrange(3), recorded=dice < 0.65, remembered=True)
    return Work(number=number)


class Stream:
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
        wanted: Callable[[int, random.Random], Work] = work,
        login: str | None = None,
    ) -> None:
        self._broker, self._ledger, self._rate = broker, ledger, rate
        self._agents, self._wanted, self._login = agents, wanted, login
        self._chance = random.Random(f"{seed} stream")
        self._room = asyncio.Semaphore(in_flight)
        self._tasks: set[asyncio.Task[object]] = set()
        self._answered = asyncio.Event()
        self.doubled = 0
        self._extra = 0

    async def __aenter__(self) -> Stream:
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
        """Send for `seconds`; requests held up by an outage follow, as far as `in_flight` allows."""
        loop = asyncio.get_running_loop()
        start, number = loop.time(), 0
        while (now := loop.time()) < start + seconds:
            due = start + number / self._rate
            if now < due:
                await asyncio.sleep(due - now)
            await self._room.acquire()
            number += 1
            self._spawn(number)

    async def all_answered(self, limit: float) -> bool:
        """Wait until no request is open. Returns False when no answer arrived for `limit` seconds."""
        while self._ledger.open:
            self._answered.clear()
            try:
                async with asyncio.timeout(limit):
                    await self._answered.wait()
            except TimeoutError:
                return False
        return True

    async def ask(self, agent: str) -> None:
        """Send one request to `agent`, in addition to the steady ones."""
        self._extra += 1
        await self._room.acquire()
        entry = Entry(TaskId(new_id()), Work(number=_EXTRA + self._extra), time.time(), agent)
        self._ledger.asked(entry)
        self._keep(asyncio.create_task(self._send(entry, 0.0)))

    def _spawn(self, number: int) -> None:
        agent = self._agents[number % len(self._agents)]
        entry = Entry(TaskId(new_id()), self._wanted(number, self._chance), time.time(), agent)
        self._ledger.asked(entry)
        pauses = [0.0]
        # send the same request twice: at once, or when it may have ended
        if self._chance.random() < 0.03:
            entry.copies, self.doubled = 1, self.doubled + 1
            pauses.append(self._chance.choice((0.0, self._chance.uniform(0.0, 5.0))))
        for pause in pauses:
            self._keep(asyncio.create_task(self._send(entry, pause)))

    async def _send(self, entry: Entry, pause: float) -> None:
        await asyncio.sleep(pause)
        letter = (requests_of(AgentName(entry.agent)), _request(entry))
        while True:
            try:
                (word,) = await self._broker.publish([letter])
            except Unavailable:
                word = None  # in doubt: send it again
            if word is Published.ACCEPTED:
                entry.accepted = True
                return
            await asyncio.sleep(_PAUSE)

    def _receive(self, delivery: Delivery) -> None:
        message = delivery.message
        if message.type is MessageType.RESPONSE and self._login in {None, message.user_id}:
            entry = self._ledger.answer(TaskId(message.correlation_id), _answer(message))
            if entry is not None:
                self._room.release()
                self._answered.set()
        self._keep(asyncio.ensure_future(delivery.ack()))

    def _keep(self, task: asyncio.Future[object] | asyncio.Task[None] | asyncio.Task[bool]) -> None:
        assert isinstance(task, asyncio.Task)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _request(entry: Entry) -> Message:
    said = A2AMessage(
        message_id=entry.task_id, role="ROLE_USER", parts=[Part(data=entry.work.model_dump())], task_id=entry.task_id
    )
    return Message(
        type=MessageType.REQUEST,
        body=RequestBody(message=said).to_bytes(),
        message_id=entry.task_id,
        correlation_id=entry.task_id,
        app_id=_LEDGER,
        reply_to=REPLIES,
        headers={Header.CALL_DEPTH.value: 0},
        timestamp=datetime.now(UTC),
    )


def _answer(message: Message) -> Answer:
    try:
        outcome = parse(ResponseBody, message.body).outcome()
    except PoisonMessage as error:
        outcome = Failed(FailureKind.INVALID, str(error))
    return Answer(time.time(), message.app_id, outcome, message.body)
