"""Releases of one agent, and the load under which tests replace one with another."""

from __future__ import annotations

import asyncio
import io
import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshpoint.cli import main
from meshpoint.model.outcomes import Ok, Outcome
from plain_client import PlainClient, Reply

from . import deploy_agents
from .mesh import SHORT_LEASE, FakePeer, Mesh, PeerRequest

LONG = bool(os.environ.get("MESHPOINT_DEPLOYS"))
HELD = 30 if LONG else 4
"""Requests for each deploy whose calls the peer answers only after it."""
STEADY = 16 if LONG else 2
PAUSE = 0 if LONG else 0.1
"""Steady senders, and the seconds between an answer and the next request of each."""


@dataclass(frozen=True)
class Release:
    """What one replica serves.

    Attributes:
        code: functions of `deploy_agents`; the first takes new tasks.
        options: of the agent.
        mesh: options of the mesh.
    """

    code: tuple[str, ...] = ("first",)
    options: Mapping[str, Any] = field(default_factory=dict)
    mesh: Mapping[str, Any] = field(default_factory=dict)

    def config(self, mesh: Mesh) -> Path:
        """Write the configuration of this release."""
        entrypoints = [f"deploy_agents:{name}" for name in self.code]
        options = {
            **SHORT_LEASE,
            "drain_timeout_seconds": 0.5 if LONG else 0.2,
            "entrypoint": entrypoints if len(entrypoints) > 1 else entrypoints[0],
            "app_version": "+".join(self.code),
            **self.options,
        }
        path = mesh.backends.config("root", **options)
        config = yaml.safe_load(path.read_text())
        config["mesh"] |= self.mesh
        path.write_text(yaml.safe_dump(config))
        return path

    @property
    def is_checkpointing(self) -> bool:
        """Whether its new tasks pause in the database."""
        return bool(self.options.get("stateless_checkpointing", True))


@dataclass
class SentRequest:
    """A request and its outcome.

    Attributes:
        begun: the code that ran its first segment, if known.
        first, last: the first and the last entry of `Load.serving` while it was open.
    """

    number: int
    begun: str | None
    first: int
    last: int = -1
    outcome: Outcome | None = None

    def allowed(self, codes: frozenset[str]) -> list[Outcome]:
        """The right outcomes if `codes` served when it ended."""
        return [
            Ok([*result])
            for code in codes
            for result in [deploy_agents.result(code, self.number, begun=self.begun)]
            if result is not None
        ]


class Load:
    """Steady requests, and requests whose calls are held until the next deploy is done.

    Attributes:
        serving: the code that has served, from one change of it to the next.
    """

    def __init__(self, client: PlainClient) -> None:
        self._client = client
        self._held: set[int] = set()
        self._holding: list[PeerRequest] = []
        self._arrived = asyncio.Event()
        self._waiting: list[asyncio.Future[Reply]] = []
        self._sending = [asyncio.Lock() for _ in range(STEADY)]
        self.requests: list[SentRequest] = []
        self.serving: list[frozenset[str]] = [frozenset()]
        self.stopping = False

    async def answer(self, peer: FakePeer) -> None:
        """Answer a peer's requests until cancelled, unless its task is held."""
        while True:
            (request,) = await peer.next_requests()
            if int(str(request.input)) in self._held:
                self._holding.append(request)
                self._arrived.set()
            else:
                await request.answer(10 * int(str(request.input)))

    def start(self, tasks: asyncio.TaskGroup) -> list[asyncio.Task[None]]:
        """Start the steady senders. Each sends a request after each answer."""
        return [tasks.create_task(self._send_steadily(lock)) for lock in self._sending]

    async def _send_steadily(self, sending: asyncio.Lock) -> None:
        while not self.stopping:
            async with sending:
                await self.send()
            await asyncio.sleep(PAUSE)

    async def send(self) -> None:
        """Send a request and wait for its outcome."""
        await (await self._start(begun=None))

    async def _start(self, begun: str | None) -> asyncio.Future[Reply]:
        request = SentRequest(len(self.requests) + 1, begun, len(self.serving) - 1)
        self.requests.append(request)
        if begun is not None:
            self._held.add(request.number)
        reply = await self._client.send("root", request.number)

        def record(done: asyncio.Future[Reply]) -> None:
            if not done.cancelled():
                request.outcome, request.last = done.result().outcome, len(self.serving) - 1

        reply.add_done_callback(record)
        return reply

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Keep the steady senders from sending while the block runs."""
        async with AsyncExitStack() as stack:
            for sending in self._sending:
                await stack.enter_async_context(sending)
            yield

    async def hold(self, begun: str) -> None:
        """Send requests that this code begins, and wait until their calls are held."""
        self._waiting += [await self._start(begun) for _ in range(HELD)]
        while {int(str(request.input)) for request in self._holding} < self._held:
            self._arrived.clear()
            await self._arrived.wait()

    async def release(self) -> None:
        """Answer all held calls."""
        self._held.clear()
        holding, self._holding = self._holding, []
        for request in holding:
            await request.answer(10 * int(str(request.input)))

    async def settle(self) -> None:
        """Wait until all requests have their outcomes that were held, or that are open now."""
        waiting, self._waiting = self._waiting, []
        for reply in waiting:
            await reply
        await self.settle_steady()

    async def settle_steady(self) -> None:
        """Wait until the requests that the steady senders have open now have their outcomes."""
        for sending in self._sending:
            async with sending:
                pass

    async def finish(self) -> None:
        """Wait until every request has its outcome."""
        await self.release()
        self.stopping = True
        await self.settle()
        async with self.paused():
            assert self._client.conflicts == 0

    def lost(self) -> list[SentRequest]:
        """Requests without an outcome."""
        return [request for request in self.requests if request.outcome is None]

    def wrong(self) -> list[SentRequest]:
        """Requests whose outcome no release in force would give.

        A held request ends in the release that serves when its calls are answered. Of others, only
        the releases while they were open are known.
        """
        return [each for each in self.requests if each.outcome not in self._allowed(each)]

    def _allowed(self, request: SentRequest) -> list[Outcome]:
        first = request.first if request.begun is None else request.last
        codes = frozenset[str]().union(*self.serving[first : request.last + 1])
        return request.allowed(codes)


@asynccontextmanager
async def steady_load(mesh: Mesh) -> AsyncIterator[Load]:
    """Send requests steadily while the block runs, and play the peers."""
    load = Load(await mesh.client())
    await mesh.peer()
    await mesh.peer("extra")
    async with asyncio.TaskGroup() as tasks:
        answering = [tasks.create_task(load.answer(peer)) for peer in mesh.peers]
        senders = load.start(tasks)
        try:
            yield load
        finally:
            load.stopping = True
        await asyncio.wait(senders)
        for task in answering:
            task.cancel()


def run_doctor(config: Path, *arguments: str) -> Any:
    """The report of `meshpoint doctor`, whose exit code it repeats."""
    printed = io.StringIO()
    with redirect_stdout(printed), pytest.raises(SystemExit) as exited:
        main(["doctor", str(config), "--json", *arguments])
    report = json.loads(printed.getvalue())
    assert report["exit_code"] == int(exited.value.code or 0)
    return report
