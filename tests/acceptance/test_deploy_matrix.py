"""Deploys under steady load, with replicas as real processes: nothing is lost, nothing is wrong.

Each deploy replaces two replicas, one after the other. `meshpoint doctor` says before each what
will happen. `make deploys` runs a longer form, which also kills replicas and starts from earlier
releases.
"""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, redirect_stdout
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import yaml

from meshpoint.adapters.sql import SqlStore
from meshpoint.adapters.sql.tables import REVISION, VERSION_TABLE
from meshpoint.cli import main
from meshpoint.cli.exits import ExitCode
from meshpoint.client import Client, Reply
from meshpoint.model.outcomes import Ok

from . import deploy_agents
from .mesh import HERE, SHORT_LEASE, FakePeer, Mesh, PeerRequest, Process

LONG = bool(os.environ.get("MESHPOINT_DEPLOYS"))
HELD = 30 if LONG else 4
"""Requests for each deploy whose calls the peer answers only after it."""
STEADY = 8 if LONG else 2
PAUSE = 0.02 if LONG else 0.1
"""Steady senders, and the seconds between an answer and the next request of each."""


@dataclass(frozen=True)
class Release:
    """What one replica serves, and which results its code gives."""

    code: tuple[str, ...] = ("first",)
    options: Mapping[str, Any] = field(default_factory=dict)
    mesh: Mapping[str, Any] = field(default_factory=dict)

    def config(self, mesh: Mesh) -> Path:
        entrypoints = [f"deploy_agents:{name}" for name in self.code]
        options = {
            **SHORT_LEASE,
            "drain_timeout_seconds": 0.5,
            "entrypoint": entrypoints if len(entrypoints) > 1 else entrypoints[0],
            "app_version": "+".join(self.code),
            **self.options,
        }
        path = mesh.backends.config("root", **options)
        config = yaml.safe_load(path.read_text())
        config["mesh"] |= self.mesh
        path.write_text(yaml.safe_dump(config))
        return path


ON, OFF = Release(), Release(options={"stateless_checkpointing": False})
MEMORY = Release(options={"stateless_checkpointing": False, "session_service": "memory"})
TUNED = Release(
    options={
        "lease_seconds": 5,
        "renew_interval_seconds": 1,
        "max_concurrency": 3,
        "response_prefetch": 7,
        "request_shards": 3,
    },
    mesh={"max_queue_length": 5000, "delivery_limit": 30},
)


@dataclass(frozen=True)
class Deploy:
    """Two replicas that replace those before them.

    Attributes:
        exit_code: of the doctor before it.
        warnings: the checks of the doctor's warnings and errors.
        notes: checks that must be among its notes.
        parks: whether all tasks that wait across the deploy are parked by it.
        revision: what the tables say of themselves from now on, as after an upgrade by a later
            release.
    """

    releases: tuple[Release, Release]
    exit_code: ExitCode = ExitCode.OK
    warnings: frozenset[str] = frozenset()
    notes: frozenset[str] = frozenset()
    parks: bool = False
    revision: str | None = None


def deploy(*releases: Release, warn: str = "", notes: str = "", **values: Any) -> Deploy:
    """A deploy of one release, or of two different ones."""
    warnings = frozenset(warn.split())
    code = ExitCode.WARNINGS if warnings else ExitCode.OK
    both = (releases[0], releases[-1])
    return Deploy(both, code, warnings, frozenset(notes.split()), **values)


FIRST = deploy(ON)
V2, BOTH = Release(("second",)), Release(("first", "second"))
EDITED = Release(("edited_path",))
PARKING = deploy(EDITED, notes="tasks.other_code", parks=True)
MATRIX: dict[str, list[Deploy]] = {
    "checkpointing switched on": [deploy(OFF), deploy(ON)],
    "checkpointing switched off": [FIRST, deploy(OFF, notes="checkpointing.off")],
    "checkpointing mixed": [deploy(ON, OFF), deploy(OFF, ON), deploy(ON, OFF)],
    "session_service from memory to sql": [deploy(MEMORY), deploy(ON, warn="marker.new")],
    "lease, prefetch and queues": [FIRST, deploy(TUNED), FIRST],
    "subtask edited": [
        FIRST,
        deploy(Release(("edited_subtask",)), notes="tasks.other_code"),
    ],
    "path edited and rolled back": [FIRST, PARKING, deploy(ON, notes="tasks.retried")],
    "path edited and fixed": [
        FIRST,
        PARKING,
        deploy(Release(("fixed_path",)), notes="tasks.retried"),
    ],
    "version raised, rolled back, both": [
        FIRST,
        deploy(V2, warn="tasks.unread"),
        deploy(ON, warn="tasks.unread"),
        deploy(BOTH, notes="tasks.older"),
    ],
    "version raised next to the old one": [
        FIRST,
        deploy(Release(("second", "first")), notes="tasks.older"),
    ],
    "tables upgraded and downgraded": [
        FIRST,
        deploy(ON, notes="schema.newer", revision="9999"),
        deploy(ON, revision=REVISION),
    ],
}


class Load:
    """Steady requests, and requests whose calls are held until the next deploy is done."""

    def __init__(self, client: Client, peer: FakePeer, extra: FakePeer) -> None:
        self._client, self._peer, self._extra = client, peer, extra
        self._numbers = count(1)
        self._held: set[int] = set()
        self._holding: list[PeerRequest] = []
        self._arrived = asyncio.Event()
        self._waiting: dict[int, asyncio.Future[Reply]] = {}
        self._sending = [asyncio.Lock() for _ in range(STEADY)]
        self.outcomes: dict[int, Any] = {}
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

    async def send_steadily(self, sending: asyncio.Lock) -> None:
        """Send a request after each answer, until the test stops."""
        while not self.stopping:
            async with sending:
                await self.send()
            await asyncio.sleep(PAUSE)

    async def send(self) -> None:
        """Send a request and wait for its outcome."""
        number = next(self._numbers)
        reply = await self._client.send("root", number)
        self.outcomes[number] = (await reply).outcome

    @asynccontextmanager
    async def paused(self) -> AsyncIterator[None]:
        """Keep the steady senders from sending while the block runs."""
        async with AsyncExitStack() as stack:
            for sending in self._sending:
                await stack.enter_async_context(sending)
            yield

    async def hold(self) -> list[int]:
        """Send requests, and wait until their calls are held."""
        numbers = [next(self._numbers) for _ in range(HELD)]
        self._held |= set(numbers)
        for number in numbers:
            self._waiting[number] = await self._client.send("root", number)
        while {int(str(request.input)) for request in self._holding} < self._held:
            self._arrived.clear()
            await self._arrived.wait()
        return numbers

    async def release(self) -> None:
        """Answer all held calls."""
        self._held.clear()
        holding, self._holding = self._holding, []
        for request in holding:
            await request.answer(10 * int(str(request.input)))

    async def finish(self) -> None:
        """Wait until every request has its outcome."""
        await self.release()
        for number, reply in self._waiting.items():
            self.outcomes[number] = (await reply).outcome
        self.stopping = True
        assert self._client.conflicts == 0


@asynccontextmanager
async def steady_load(mesh: Mesh) -> AsyncIterator[Load]:
    load = Load(await mesh.client(), await mesh.peer(), await mesh.peer("extra"))
    async with asyncio.TaskGroup() as senders:
        answering = [senders.create_task(load.answer(peer)) for peer in mesh.peers]
        steady = [senders.create_task(load.send_steadily(lock)) for lock in load._sending]
        try:
            yield load
        finally:
            load.stopping = True
        await asyncio.wait(steady)
        for task in answering:
            task.cancel()


def run_doctor(config: Path) -> Any:
    """The report of `meshpoint doctor`, whose exit code it repeats."""
    printed = io.StringIO()
    with redirect_stdout(printed), pytest.raises(SystemExit) as exited:
        main(["doctor", str(config), "--json"])
    report = json.loads(printed.getvalue())
    assert report["exit_code"] == int(exited.value.code or 0)
    return report


async def check_doctor(mesh: Mesh, planned: Deploy) -> None:
    """What the doctor says of the first release of a deploy."""
    config = planned.releases[0].config(mesh)
    report = await asyncio.to_thread(run_doctor, config)
    found: dict[str, set[str]] = {"note": set(), "other": set()}
    for finding in report["findings"]:
        found["note" if finding["severity"] == "note" else "other"].add(finding["check"])
    assert (report["exit_code"], found["other"]) == (planned.exit_code, {*planned.warnings}), (
        report
    )
    assert planned.notes <= found["note"], report


async def set_revision(mesh: Mesh, revision: str) -> None:
    """Let the tables say that a release with this revision has upgraded them."""
    store = mesh.store()
    assert isinstance(store, SqlStore)
    await store.open()
    try:
        statement = f"UPDATE {VERSION_TABLE} SET version_num = :revision"
        await store._database.transact(lambda tx: tx.execute(statement, revision=revision))
    finally:
        await store.close()


async def wait_parked(replicas: list[Process], numbers: int) -> None:
    """Wait until these replicas have parked so many tasks."""
    while sum(len(e["task_ids"]) for r in replicas for e in r.matching_events("parked")) < numbers:
        changes = [asyncio.create_task(replica.wait_changed()) for replica in replicas]
        await asyncio.wait(changes, return_when=asyncio.FIRST_COMPLETED)
        for change in changes:
            change.cancel()
        await asyncio.wait(changes)


async def replace(
    mesh: Mesh, running: list[Process], planned: Deploy, number: signal.Signals
) -> list[Process]:
    """Start each new replica, then end an old one."""
    started = []
    for release in planned.releases:
        started.append(await mesh.replica(release.config(mesh)))
        if running:
            old = running.pop()
            old.signal(number)
            await old.wait_ended()
    return started


@pytest.mark.parametrize("number", [signal.SIGTERM, *([signal.SIGKILL] if LONG else [])])
@pytest.mark.parametrize("deploys", MATRIX.values(), ids=MATRIX)
async def test_nothing_is_lost_or_wrong(
    mesh: Mesh, deploys: list[Deploy], number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    replicas: list[Process] = []
    first_code: dict[int, str] = {}  # by number of a held task, the code that ran its subtask
    await mesh.declare("root")
    async with steady_load(mesh) as load, AsyncExitStack() as pause:
        for index, planned in enumerate(deploys):
            if planned.revision is not None:
                await set_revision(mesh, planned.revision)
            if index:
                await check_doctor(mesh, planned)
            if planned.parks:  # a roll-back would park tasks that the edited code began
                await pause.enter_async_context(load.paused())
            replicas = await replace(mesh, replicas, planned, number)
            await load.release()
            if planned.parks:
                await wait_parked(replicas, HELD)
                await asyncio.gather(*[load.send() for _ in range(HELD)])
                continue
            await pause.aclose()
            code = planned.releases[0].code[0]
            first_code |= dict.fromkeys(await load.hold(), code)
        await load.finish()
    codes = {code for planned in deploys for each in planned.releases for code in each.code}
    for task, outcome in load.outcomes.items():
        allowed = [Ok(deploy_agents.results(code, task)) for code in codes]
        assert outcome in allowed, (task, outcome)
        if first_code.get(task) == "first":
            assert outcome != Ok(deploy_agents.results("edited_subtask", task))
    may_park = any(planned.parks for planned in deploys)
    for process in mesh.processes:
        assert process.matching_events("dead_letter:info") == []
        assert may_park or process.matching_events("parked") == []
    for replica in replicas:
        replica.signal(signal.SIGTERM)
        await replica.wait_ended()
    assert (await mesh.row_counts())["open"] == 0
