"""One worker in this process on real servers, a requester played by the test, and all its events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from typing import Any

from pydantic import JsonValue

from meshpoint.adapters.inprocess.store import InProcessStore
from meshpoint.adapters.inprocess.working_memory import InProcessWorkingMemory
from meshpoint.adapters.rabbitmq import RabbitMqBroker
from meshpoint.adapters.sql import SqlStore
from meshpoint.adapters.system_clock import SystemClock
from meshpoint.engine.worker import Worker
from meshpoint.model.bodies import A2AMessage, Part, RequestBody, ResponseBody, parse, response_body
from meshpoint.model.envelopes import cancel_message
from meshpoint.model.events import Event, Phase, Step
from meshpoint.model.ids import AgentName, ReplicaId, TaskId, new_id
from meshpoint.model.messages import Address, Header, Message, MessageType, nested_of, requests_of, responses_of
from meshpoint.model.options import Options
from meshpoint.model.outcomes import Ok, Outcome
from meshpoint.ports.broker import Delivery, Published
from meshpoint.testing.conformance.build import Timings

_CLOCK = SystemClock()
QUICK = {
    "sweep_interval": timedelta(seconds=0.1),
    "settle_time": timedelta(seconds=0.2),
    "lease": timedelta(seconds=5),
    "renew_interval": timedelta(seconds=1),
}
TIMINGS = Timings(
    dispatch_lease=timedelta(seconds=0.5),
    tombstone_ttl=timedelta(hours=1),
    incompatible_limit=timedelta(hours=1),
    checkpoint_ttl=timedelta(hours=1),
    checkpoint_history=3,
    checkpoint_archive=False,
)


class Events:
    """Collects all events; tests can await one."""

    def __init__(self) -> None:
        self.all: list[Event] = []
        self._changed = asyncio.Event()

    def emit(self, event: Event) -> None:
        self.all.append(event)
        self._changed.set()

    def of(self, step: Step, phase: Phase, task_id: str | None = None) -> list[Event]:
        wanted = [each for each in self.all if each.step is step and each.phase is phase]
        return [each for each in wanted if task_id is None or task_id in each.task_ids]

    async def until(self, happened: Callable[[], bool]) -> None:
        while not happened():
            self._changed.clear()
            await self._changed.wait()

    async def wait(self, step: Step, phase: Phase, count: int = 1, task_id: str | None = None) -> list[Event]:
        await self.until(lambda: len(self.of(step, phase, task_id)) >= count)
        return self.of(step, phase, task_id)


class Desk:
    """Sends requests as `name`, and keeps the replies."""

    def __init__(self, broker: RabbitMqBroker, name: str) -> None:
        self.name, self._broker = name, broker
        self.letters: list[Message] = []
        self.changed = asyncio.Event()
        self._acks: set[asyncio.Task[bool]] = set()

    async def open(self) -> Desk:
        await self._broker.declare(AgentName(self.name))
        for address_of in (responses_of, requests_of, nested_of):
            address = address_of(AgentName(self.name))
            await self._broker.consume(address, 1000, self._take)
        return self

    def _take(self, delivery: Delivery) -> None:
        self.letters.append(delivery.message)
        self.changed.set()
        ack = asyncio.ensure_future(delivery.ack())
        self._acks.add(ack)
        ack.add_done_callback(self._acks.discard)

    async def ask(
        self, agent: str, input_: JsonValue, reply_to: str | None = None, task_id: str | None = None, **headers: Any
    ) -> TaskId:
        """Send one request and return its task id."""
        task_id = task_id or new_id()
        said = A2AMessage(message_id=new_id(), role="ROLE_USER", parts=[Part(data=input_)], task_id=task_id)
        message = Message(
            type=MessageType.REQUEST,
            body=RequestBody(message=said, metadata={}).to_bytes(),
            message_id=new_id(),
            correlation_id=task_id,
            app_id=self.name,
            reply_to=Address(reply_to or responses_of(AgentName(self.name))),
            headers={Header[key.upper()].value: value for key, value in headers.items()},
        )
        assert await self._broker.publish([(requests_of(AgentName(agent)), message)]) == [Published.ACCEPTED]
        return TaskId(task_id)

    def replies(self, task_id: str) -> list[Outcome]:
        return [
            parse(ResponseBody, letter.body).outcome()
            for letter in self.letters
            if letter.type is MessageType.RESPONSE and letter.correlation_id == task_id
        ]

    async def reply(self, task_id: str) -> Outcome:
        """Wait for the reply to `task_id`."""
        await self.until(lambda: bool(self.replies(task_id)))
        return self.replies(task_id)[0]

    @property
    def cancels(self) -> list[str]:
        """Ids of the tasks for which a cancel was received."""
        return [letter.correlation_id for letter in self.letters if letter.type is MessageType.CANCEL]

    async def depth(self, address: Address) -> int | None:
        """Number of messages waiting at an address."""
        return await self._broker.depth(address)

    async def answer(self, request: Message, value: JsonValue) -> None:
        """Reply to a received request."""
        assert request.reply_to is not None
        body = response_body(TaskId(request.correlation_id), None, Ok(value)).to_bytes()
        parent = {Header.PARENT_TASK.value: request.headers[Header.PARENT_TASK.value]}
        message = Message(MessageType.RESPONSE, body, new_id(), request.correlation_id, self.name, headers=parent)
        assert await self._broker.publish([(request.reply_to, message)]) == [Published.ACCEPTED]

    async def cancel(self, agent: str, task_id: str) -> None:
        """Cancel a task."""
        message = cancel_message(AgentName(self.name), TaskId(task_id))
        assert await self._broker.publish([(responses_of(AgentName(agent)), message)]) == [Published.ACCEPTED]

    async def until(self, happened: Callable[[], bool]) -> None:
        while not happened():
            self.changed.clear()
            await self.changed.wait()


class Live:
    """A worker that serves one agent."""

    def __init__(self, worker: Worker, broker: RabbitMqBroker, store: SqlStore | None, events: Events) -> None:
        self.worker, self.broker, self.store, self.events = worker, broker, store, events
        self.stop = asyncio.Event()
        self.task = asyncio.create_task(worker.run(self.stop))


BUSY = timedelta(minutes=1)
"""Time that the broker of a busy machine may take to respond."""


@asynccontextmanager
async def a_broker(url: str, namespace: str, **options: Any) -> AsyncIterator[RabbitMqBroker]:
    broker = RabbitMqBroker(url, namespace=namespace, **{"publish_timeout": BUSY, **options})
    await broker.open()
    try:
        yield broker
    finally:
        await broker.close()


@asynccontextmanager
async def serving(
    agent: Any, url: str, namespace: str, database: str | None, replica_id: str | None = None, **options: Any
) -> AsyncIterator[Live]:
    """Serve `agent`; its tasks live in `database`, or in the process without one."""
    events = Events()

    def store() -> SqlStore:
        assert database is not None
        timings = {"dispatch_lease": TIMINGS.dispatch_lease, "tombstone_ttl": TIMINGS.tombstone_ttl}
        return SqlStore(database, namespace=namespace, **timings)

    async with a_broker(url, namespace) as broker:
        durable = None if database is None else store()
        worker = Worker(
            agent,
            broker=broker,
            memory=InProcessStore(_CLOCK, timings=TIMINGS),
            durable=durable,
            lease_store=store if database else None,
            clock=_CLOCK,
            observer=events,
            options=Options(**{**QUICK, "stateless_checkpointing": database is not None, **options}),
            local=InProcessWorkingMemory(_CLOCK),
            replica_id=ReplicaId(replica_id) if replica_id else None,
        )
        live = Live(worker, broker, durable, events)
        try:
            started = asyncio.create_task(events.wait(Step.STARTED, Phase.NOTED))
            await asyncio.wait({started, live.task}, return_when=asyncio.FIRST_COMPLETED)
            if live.task.done():
                started.cancel()
                await live.task
            await started
            yield live
        finally:
            live.stop.set()
            await asyncio.gather(live.task, return_exceptions=True)
