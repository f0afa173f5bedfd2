"""Real replicas, brokers and databases, and peers that the test plays itself."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import yaml
from pydantic import JsonValue

from meshpoint import wiring
from meshpoint.errors import StoreUnavailable
from meshpoint.model.bodies import RequestBody, parse_body
from meshpoint.model.envelopes import encode_reply, status_envelope
from meshpoint.model.ids import AgentName, ReplicaId, TaskId, new_id
from meshpoint.model.messages import (
    Address,
    Header,
    Message,
    MessageType,
    nested_queue,
    request_queue,
    response_queue,
)
from meshpoint.model.outcomes import Ok, Outcome
from meshpoint.model.tasks import CallState, Requester
from meshpoint.ports.broker import Broker, Delivery
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.settings import Settings, load
from plain_client import PlainClient

from .fork_server import ForkedProcess, ForkServer

HERE = Path(__file__).parent
EventRecord = dict[str, Any]
SHORT_LEASE: Mapping[str, Any] = {"lease_seconds": 2}
"""Options for tests that wait until a dead replica's lease expires."""
_MAX_CONNECT_ATTEMPTS = 10


@dataclass
class Backends:
    """Broker and database of a mesh."""

    broker_url: str
    db_url: str
    namespace: str
    folder: Path

    def config(self, *agents: str, **options: Any) -> Path:
        """Write a configuration file that serves `agents`, with short sweep intervals."""
        fast_options = {
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
        mesh: dict[str, Any] = {
            "namespace": self.namespace,
            "broker_url": self.broker_url,
            "publish_timeout_seconds": 60,  # the broker of a busy machine may respond late
        }
        if self.broker_url.startswith("postgresql"):
            mesh["queue_lease_seconds"] = 5  # bounds how long a dead replica keeps its messages
        config = {
            "mesh": mesh,
            "agents": [
                {
                    "name": name,
                    "entrypoint": f"acceptance_agents:{name}",
                    **fast_options,
                    **options,
                }
                for name in agents
            ],
        }
        path = self.folder / f"{new_id()}.yaml"
        path.write_text(yaml.safe_dump(config))
        return path

    def settings(self, config: Path) -> Settings:
        return load([config])


class EndedEarly(AssertionError):
    """A replica ended before the event that the test waits for."""


@dataclass
class Process:
    """One replica process and the events it has emitted."""

    process: ForkedProcess
    events: list[EventRecord] = field(default_factory=list)
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _reading: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, config: Path, *arguments: str, fork_server: ForkServer) -> Self:
        started = cls(await fork_server.start([str(config), *arguments]))
        started._reading = asyncio.create_task(started._read())
        return started

    async def _read(self) -> None:
        async for line in self.process.stdout:
            self.events.append(json.loads(line))
            self._changed.set()
        await self.process.wait()
        self._changed.set()

    def matching_events(self, at: str, **detail: Any) -> list[EventRecord]:
        return [event for event in self.events if _matches(event, at, detail)]

    async def wait(self, at: str, count: int = 1, **detail: Any) -> list[EventRecord]:
        """Wait for `count` events of `step:phase`, and return them."""
        matches, checked = list[EventRecord](), 0
        while True:
            matches += [event for event in self.events[checked:] if _matches(event, at, detail)]
            checked = len(self.events)
            if len(matches) >= count:
                return matches
            if self.process.returncode is not None:
                raise EndedEarly(f"the replica ended ({self.process.returncode}) before {at}")
            self._changed.clear()
            await self._changed.wait()

    async def wait_changed(self) -> None:
        """Wait for the next event, or for the end of the process."""
        self._changed.clear()
        await self._changed.wait()

    async def wait_ended(self) -> int:
        code = await self.process.wait()
        assert self._reading is not None
        await self._reading
        return code

    def signal(self, number: signal.Signals) -> None:
        if self.process.returncode is None:
            self.process.send_signal(number)

    async def kill(self) -> None:
        self.signal(signal.SIGKILL)
        await self.wait_ended()


def _matches(event: EventRecord, at: str, detail: dict[str, Any]) -> bool:
    step, _, phase = at.partition(":")
    return (
        event["step"] == step
        and phase in {"", event["phase"]}
        and all(
            event["detail"].get(name, event.get(name)) == value for name, value in detail.items()
        )
    )


@dataclass
class PeerRequest:
    """A request received by the peer that the test plays."""

    delivery: Delivery
    peer: AgentName
    broker: Broker

    @property
    def input(self) -> JsonValue:
        return parse_body(RequestBody, self.delivery.message.body).input()

    @property
    def sub_task_id(self) -> TaskId:
        return TaskId(self.delivery.message.correlation_id)

    async def update(self, value: JsonValue) -> None:
        """Send a status update."""
        message = self.delivery.message
        parent = str(message.headers[Header.PARENT_TASK.value])
        requester = Requester(message.reply_to, parent_task_id=parent)
        envelope = status_envelope(self.peer, self.sub_task_id, requester, value)
        assert envelope is not None
        await self.broker.publish([envelope])

    async def answer(self, value: JsonValue, *, sender: str | None = None) -> None:
        """Send a response, then ack the request."""
        await self.respond(Ok(value), sender=sender)
        await self.delivery.ack()

    async def respond(self, outcome: Outcome, *, sender: str | None = None) -> None:
        request_message = self.delivery.message
        assert request_message.reply_to is not None
        message = Message(
            type=MessageType.RESPONSE,
            body=encode_reply(self.sub_task_id, None, outcome),
            message_id=new_id(),
            correlation_id=self.sub_task_id,
            app_id=sender or self.peer,
            headers={Header.PARENT_TASK.value: request_message.headers[Header.PARENT_TASK.value]},
        )
        await self.broker.publish([(request_message.reply_to, message)])


class FakePeer:
    """A peer that exposes every request and cancel to the test, which answers when it likes.

    A redelivered request is acked and counted, because a replica that lost the record that it was
    sent may send it again. A request from a resumed requester is a new request.
    """

    def __init__(self, broker: Broker, name: str = "peer") -> None:
        self.name = AgentName(name)
        self.broker = broker
        self.requests: asyncio.Queue[PeerRequest] = asyncio.Queue()
        self.cancels: asyncio.Queue[Delivery] = asyncio.Queue()
        self.redelivered_count = 0
        self._seen: set[tuple[TaskId, object]] = set()
        self._acks: set[asyncio.Task[bool]] = set()

    async def open(self) -> None:
        await self.broker.open()
        await self.broker.declare(self.name, ReplicaId(new_id()))
        await self.broker.consume(request_queue(self.name), 1000, self._on_request)
        await self.broker.consume(nested_queue(self.name), 1000, self._on_request)
        await self.broker.consume(response_queue(self.name), 1000, self.cancels.put_nowait)

    def _on_request(self, delivery: Delivery) -> None:
        request = PeerRequest(delivery, self.name, self.broker)
        key = request.sub_task_id, delivery.message.headers.get(Header.RESUME.value)
        if key in self._seen:
            self.redelivered_count += 1
            self._acks.add(asyncio.create_task(delivery.ack()))
            return
        self._seen.add(key)
        self.requests.put_nowait(request)

    async def next_requests(self, count: int = 1) -> list[PeerRequest]:
        """The next `count` requests."""
        return [await self.requests.get() for _ in range(count)]

    async def answer_all(
        self, answer: Callable[[JsonValue], JsonValue] = lambda value: int(str(value)) * 10
    ) -> None:
        """Answer every request as it arrives, until cancelled."""
        while True:
            request = await self.requests.get()
            await request.answer(answer(request.input))


class Mesh:
    """Everything one test runs; `close` ends all of it."""

    def __init__(self, backends: Backends, fork_server: ForkServer) -> None:
        self.backends = backends
        self.fork_server = fork_server
        self.processes: list[Process] = []
        self.clients: list[PlainClient] = []
        self.peers: list[FakePeer] = []

    async def replica(self, config: Path, *arguments: str, started: int = 1) -> Process:
        """Start a replica and wait until `started` of its agents consume (0: do not wait)."""
        process = await Process.start(config, *arguments, fork_server=self.fork_server)
        self.processes.append(process)
        await process.wait("started", started)
        return process

    def broker(self) -> Broker:
        return wiring.make_broker(self.backends.settings(self.backends.config("root")).mesh)

    async def client(self) -> PlainClient:
        client = await PlainClient(self.broker()).__aenter__()
        self.clients.append(client)
        return client

    async def peer(self, name: str = "peer") -> FakePeer:
        peer = FakePeer(self.broker(), name)
        self.peers.append(peer)
        await peer.open()
        return peer

    async def declare(self, agent: str) -> None:
        """Declare an agent's queues before its first start."""
        broker = self.broker()
        try:
            await broker.open()
            await broker.declare(AgentName(agent))
        finally:
            await broker.close()

    async def row_counts(self) -> dict[str, int]:
        """Row counts of the tables."""
        async with self.store() as store:
            return await count_rows(store)

    @asynccontextmanager
    async def store(self) -> AsyncIterator[CheckpointStore]:
        """A store on the tables. On a busy machine, it may need several attempts to connect."""
        store = wiring.make_store(
            self.backends.settings(self.backends.config("root")).agents[0].store_settings(),
            self.backends.namespace,
        )
        for attempt in range(_MAX_CONNECT_ATTEMPTS):
            try:
                await store.open()
                break
            except StoreUnavailable:
                if attempt + 1 == _MAX_CONNECT_ATTEMPTS:
                    raise
        try:
            yield store
        finally:
            await store.close()

    async def close(self) -> None:
        for process in self.processes:
            process.signal(signal.SIGCONT)
            await process.kill()
        for client in self.clients:
            await client.__aexit__(None, None, None)
        for peer in self.peers:
            await peer.broker.close()


async def output_of(*command: str) -> tuple[int, bytes, bytes]:
    """Run a command; return its exit code, output and errors.

    A cancelled call kills the process.
    """
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
    """Row counts of the tables, and the number of open tasks.

    Calls that an ended operation has kept with its last pause do not count.
    """
    tasks = await store.tasks(limit=10_000)
    calls = 0
    for task in tasks:
        details = await store.task(task.task_id)
        calls += sum(
            not (task.state.is_final and call.state is CallState.DONE)
            for call in (details[1] if details else ())
        )
    return {
        "tasks": len(tasks),
        "calls": calls,
        "open": sum(not task.state.is_final for task in tasks),
    }


def queue_of(agent: str) -> Address:
    return request_queue(AgentName(agent))
