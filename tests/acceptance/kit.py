"""Real replicas, real brokers, real databases; peers that the test plays itself."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import JsonValue

from meshpoint import wiring
from meshpoint.client import Client
from meshpoint.model.bodies import RequestBody, parse
from meshpoint.model.envelopes import reply_bytes
from meshpoint.model.ids import AgentName, ReplicaId, TaskId, new_id
from meshpoint.model.messages import Address, Header, Message, MessageType, nested_of, requests_of, responses_of
from meshpoint.model.outcomes import Ok, Outcome
from meshpoint.ports.broker import Broker, Delivery
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.settings import Settings, load

from .nursery import Forked, Nursery

HERE = Path(__file__).parent
Told = dict[str, Any]
SHORT_LEASE: Mapping[str, Any] = {"lease_seconds": 2}
"""For tests that wait until the lease of a dead replica is over."""


@dataclass
class Rung:
    """Where a mesh runs: a broker and a database."""

    broker_url: str
    db_url: str
    namespace: str
    folder: Path

    def config(self, *agents: str, **options: Any) -> Path:
        """A configuration file that serves `agents` of the cast, quick to notice what time makes due."""
        quick = {
            "lease_seconds": 60,
            "renew_interval_seconds": 0.5,
            "sweep_interval_seconds": 0.2,
            "settle_time_seconds": 1,
            "dispatch_lease_seconds": 1,
            "drain_timeout_seconds": 5,
            "stateless_checkpointing": True,
            "session_service": "sql",
            "session_db_url": self.db_url,
        }
        mesh = {
            "namespace": self.namespace,
            "broker_url": self.broker_url,
            "publish_timeout_seconds": 60,  # the broker of a busy machine may answer late
        }
        config = {
            "mesh": mesh,
            "agents": [{"name": name, "entrypoint": f"cast:{name}", **quick, **options} for name in agents],
        }
        path = self.folder / f"{new_id()}.yaml"
        path.write_text(yaml.safe_dump(config))
        return path

    def settings(self, config: Path) -> Settings:
        return load([config])


class EndedBefore(AssertionError):
    """A replica is dead that was to come to an event."""


@dataclass
class Process:
    """One replica's process and the events it told."""

    process: Forked
    events: list[Told] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _reading: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, config: Path, *arguments: str, nursery: Nursery) -> Self:
        started = cls(await nursery.start([str(config), *arguments]))
        started._reading = asyncio.create_task(started._read())
        return started

    async def _read(self) -> None:
        async for line in self.process.stdout:
            self.events.append(json.loads(line))
            self._changed.set()
        await self.process.wait()
        self._changed.set()

    def of(self, at: str, **detail: Any) -> list[Told]:
        return [event for event in self.events if _is(event, at, detail)]

    async def wait(self, at: str, count: int = 1, **detail: Any) -> list[Told]:
        """The events of `step:phase`, once there are `count`."""
        found, seen = list[Told](), 0
        while True:
            found += [event for event in self.events[seen:] if _is(event, at, detail)]
            seen = len(self.events)
            if len(found) >= count:
                return found
            if self.process.returncode is not None:
                raise EndedBefore(f"the replica ended ({self.process.returncode}) before {at}")
            self._changed.clear()
            await self._changed.wait()

    async def ended(self) -> int:
        code = await self.process.wait()
        assert self._reading is not None
        await self._reading
        return code

    def signal(self, number: signal.Signals) -> None:
        if self.process.returncode is None:
            self.process.send_signal(number)

    async def kill(self) -> None:
        self.signal(signal.SIGKILL)
        await self.ended()


def _is(event: Told, at: str, detail: dict[str, Any]) -> bool:
    step, _, phase = at.partition(":")
    return (
        event["step"] == step
        and phase in {"", event["phase"]}
        and all(event["detail"].get(name, event.get(name)) == value for name, value in detail.items())
    )


@dataclass
class Asked:
    """A request that reached the peer played by the test."""

    delivery: Delivery
    peer: AgentName
    broker: Broker

    @property
    def input(self) -> JsonValue:
        return parse(RequestBody, self.delivery.message.body).input()

    @property
    def sub_task_id(self) -> TaskId:
        return TaskId(self.delivery.message.correlation_id)

    async def answer(self, value: JsonValue, *, sender: str | None = None) -> None:
        """Send a response, then ack the request."""
        await self.respond(Ok(value), sender=sender)
        await self.delivery.ack()

    async def respond(self, outcome: Outcome, *, sender: str | None = None) -> None:
        asked = self.delivery.message
        assert asked.reply_to is not None
        message = Message(
            type=MessageType.RESPONSE,
            body=reply_bytes(self.sub_task_id, None, outcome),
            message_id=new_id(),
            correlation_id=self.sub_task_id,
            app_id=sender or self.peer,
            headers={Header.PARENT_TASK.value: asked.headers[Header.PARENT_TASK.value]},
        )
        await self.broker.publish([(asked.reply_to, message)])


class PlayedPeer:
    """A peer whose every request and cancel the test sees, and answers when it likes.

    A request that comes again is acked and counted: who lost the mark that it was sent may send it again. That of a
    requester who was resumed is another one.
    """

    def __init__(self, broker: Broker, name: str = "peer") -> None:
        self.name = AgentName(name)
        self.broker = broker
        self.requests: asyncio.Queue[Asked] = asyncio.Queue()
        self.cancels: asyncio.Queue[Delivery] = asyncio.Queue()
        self.repeated = 0
        self._known: set[tuple[TaskId, object]] = set()
        self._acks: set[asyncio.Task[bool]] = set()

    async def open(self) -> None:
        await self.broker.open()
        await self.broker.declare(self.name, ReplicaId(new_id()))
        await self.broker.consume(requests_of(self.name), 1000, self._asked)
        await self.broker.consume(nested_of(self.name), 1000, self._asked)
        await self.broker.consume(responses_of(self.name), 1000, self.cancels.put_nowait)

    def _asked(self, delivery: Delivery) -> None:
        asked = Asked(delivery, self.name, self.broker)
        key = asked.sub_task_id, delivery.message.headers.get(Header.RESUME.value)
        if key in self._known:
            self.repeated += 1
            self._acks.add(asyncio.create_task(delivery.ack()))
            return
        self._known.add(key)
        self.requests.put_nowait(asked)

    async def asked(self, count: int = 1) -> list[Asked]:
        """The next `count` requests."""
        return [await self.requests.get() for _ in range(count)]

    async def answer_all(self, answer: Callable[[JsonValue], JsonValue] = lambda value: int(str(value)) * 10) -> None:
        """Answer every request as it comes, until cancelled."""
        while True:
            asked = await self.requests.get()
            await asked.answer(answer(asked.input))


class Mesh:
    """What one test runs; everything is ended with it."""

    def __init__(self, rung: Rung, nursery: Nursery) -> None:
        self.rung = rung
        self.nursery = nursery
        self.processes: list[Process] = []
        self.clients: list[Client] = []
        self.peers: list[PlayedPeer] = []

    async def replica(self, config: Path, *arguments: str, started: int = 1) -> Process:
        """A replica that consumes already. `started`: how many agents it serves; 0 to wait for none."""
        process = await Process.start(config, *arguments, nursery=self.nursery)
        self.processes.append(process)
        await process.wait("started", started)
        return process

    def broker(self) -> Broker:
        return wiring.make_broker(self.rung.settings(self.rung.config("root")).mesh)

    async def client(self) -> Client:
        client = await Client(self.broker()).__aenter__()
        self.clients.append(client)
        return client

    async def peer(self, name: str = "peer") -> PlayedPeer:
        peer = PlayedPeer(self.broker(), name)
        self.peers.append(peer)
        await peer.open()
        return peer

    async def declare(self, agent: str) -> None:
        """Make the queues of an agent exist before it runs for the first time."""
        broker = self.broker()
        try:
            await broker.open()
            await broker.declare(AgentName(agent))
        finally:
            await broker.close()

    async def rows(self) -> dict[str, int]:
        """How many rows the tables hold."""
        store = self.store()
        await store.open()
        try:
            return await count_rows(store)
        finally:
            await store.close()

    def store(self) -> CheckpointStore:
        """The tables, not yet open."""
        return wiring.make_store(self.rung.settings(self.rung.config("root")).agents[0], self.rung.namespace)

    async def close(self) -> None:
        for process in self.processes:
            process.signal(signal.SIGCONT)
            await process.kill()
        for client in self.clients:
            await client.__aexit__(None, None, None)
        for peer in self.peers:
            await peer.broker.close()


async def output_of(*command: str) -> tuple[int, bytes, bytes]:
    """The exit code of a command, its output and its errors. Cancelled, it leaves no process behind."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
    try:
        out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()
    assert process.returncode is not None
    return process.returncode, out, err


async def count_rows(store: CheckpointStore) -> dict[str, int]:
    """How many rows the tables hold."""
    tasks = await store.tasks(limit=10_000)
    calls = 0
    for task in tasks:
        shown = await store.task(task.task_id)
        calls += len(shown[1]) if shown else 0
    return {"tasks": len(tasks), "calls": calls, "open": sum(not task.state.ended for task in tasks)}


def queue_of(agent: str) -> Address:
    return requests_of(AgentName(agent))
