"""Earlier releases of Meshpoint next to this one, under steady load: `make deploys`.

Each is taken from the history of the repository, with its own migrations, and runs on the
libraries of this environment.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from earlier_sources import extract_release
from meshpoint.adapters.sql import migrations
from meshpoint.adapters.sql.tables import REVISION
from meshpoint.cli.exits import ExitCode
from meshpoint.errors import OperationRunning
from meshpoint.model.ids import TaskId, new_id
from meshpoint.model.outcomes import Failed, Ok, Outcome
from meshpoint.operations import Operations

from .deploy_agents import result
from .deploy_load import LONG, Load, Release, run_doctor, steady_load
from .earlier_replica import EARLIER_BACKENDS, EarlierReplica, run_earlier
from .mesh import HERE, Mesh

pytestmark = [
    pytest.mark.skipif(not LONG, reason="`make deploys` runs it"),
    pytest.mark.parametrize("backends", EARLIER_BACKENDS, indirect=True),
]
RELEASES = {"e09230b": "0005", "821818e": "0004"}
"""Commits, and the revision of their tables."""


@pytest.fixture(params=RELEASES)
def revision(request: pytest.FixtureRequest) -> str:
    """The commit of an earlier release."""
    commit: str = request.param
    return commit


@pytest.fixture
def sources(revision: str, tmp_path: Path) -> Path:
    """A folder with the sources and migrations of an earlier release."""
    folder = extract_release(revision, tmp_path / revision, "src", "alembic")
    assert folder is not None
    return folder


@pytest.fixture
async def earlier(sources: Path) -> AsyncIterator[list[EarlierReplica]]:
    """The running replicas of the earlier release, all of which end with the test."""
    replicas: list[EarlierReplica] = []
    yield replicas
    for replica in replicas:
        await replica.stop()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_upgrade_and_roll_back_lose_nothing(
    mesh: Mesh,
    revision: str,
    sources: Path,
    earlier: list[EarlierReplica],
    number: signal.Signals,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Tables first, then the replicas; and back in the reverse order."""
    monkeypatch.syspath_prepend(str(HERE))
    # What an earlier release cannot continue on the newer tables, it soon tries again.
    release = Release(options={"incompatible_pause_seconds": 1})
    db_url, config = mesh.backends.db_url, release.config(mesh)
    if db_url.startswith("sqlite"):
        await asyncio.to_thread(migrations.upgrade, db_url)
    await asyncio.to_thread(migrations.downgrade, db_url, RELEASES[revision])
    for _ in range(2):
        earlier.append(await EarlierReplica.start(sources, config))
    async with steady_load(mesh) as load:
        load.serving.append(frozenset({"first"}))
        await load.hold("first")
        await check(config, ExitCode.UNDEPLOYABLE, {"schema.behind", "marker.new"})
        await asyncio.to_thread(migrations.upgrade, db_url)
        await check(config, ExitCode.WARNINGS, {"marker.new"})
        await answer_held(load)
        current = []
        for _ in range(2):  # after the first, both releases serve
            current.append(await mesh.replica(config))
            await earlier.pop().stop(number)
            await answer_held(load)
            await check(config, ExitCode.OK, set())
        for each in current:
            earlier.append(await EarlierReplica.start(sources, config))
            each.signal(number)
            await each.wait_ended()
        await load.release()
        await load.hold("first")
        await asyncio.to_thread(migrations.downgrade, db_url, RELEASES[revision])
        await load.finish()
    with capsys.disabled():
        print(
            f"\nupgrade from {revision} and back, {number.name}, "
            f"{mesh.backends.broker_url.partition(':')[0]}: {len(load.requests)} requests, "
            f"{len(load.lost())} lost, {len(load.wrong())} wrong"
        )
    assert (load.lost(), load.wrong()) == ([], [])
    for process in mesh.processes:
        assert process.matching_events("dead_letter:info") == []
        assert process.matching_events("parked") == []
    await asyncio.to_thread(migrations.upgrade, db_url)
    assert (await mesh.row_counts())["open"] == 0
    assert (await asyncio.to_thread(migrations.check, db_url))[0] == REVISION


async def answer_held(load: Load) -> None:
    """Let all tasks that were held end, and hold others."""
    await load.release()
    await load.settle()
    await load.hold("first")


class FailedOperation:
    """An operation that fails under this release, and is then resumed."""

    def __init__(self, mesh: Mesh, sources: Path, operations: Operations) -> None:
        self._mesh, self._sources, self._operations = mesh, sources, operations
        self._id = TaskId(new_id())

    def _config(self, code: str) -> Path:
        options = {"app_version": "1", "incompatible_pause_seconds": 1}
        return Release((code,), options).config(self._mesh)

    async def fail(self, code: str) -> None:
        """Let it fail in a replica of this release."""
        replica = await self._mesh.replica(self._config(code))
        client = await self._mesh.client()
        reply = await client.send("root", 1, task_id=self._id)
        assert isinstance((await reply).outcome, Failed)
        replica.signal(signal.SIGTERM)
        await replica.wait_ended()

    @asynccontextmanager
    async def resume_in_earlier(self, code: str) -> AsyncIterator[EarlierReplica]:
        """Resume it with an earlier release, while a replica of that runs."""
        config = self._config(code)
        replica = await EarlierReplica.start(self._sources, config)
        try:
            resume = ("tasks", "resume", self._id, "--config", str(config))
            command = await run_earlier(self._sources, *resume)
            _, errors = await command.communicate()
            assert command.returncode == ExitCode.OK, errors.decode()
            yield replica
        finally:
            await replica.stop()

    async def outcome(self) -> Outcome:
        """Wait for its end."""
        return await self._operations.wait(self._id)

    async def resume(self, code: str) -> Outcome:
        """Resume it in a replica of this release, if it has ended, and wait for its outcome."""
        with suppress(OperationRunning):
            await self._operations.resume(self._id)
        await self._mesh.replica(self._config(code))
        return await self.outcome()


@pytest.fixture
async def operation(
    mesh: Mesh, sources: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[FailedOperation]:
    """Its peer answers everything. An earlier release accepts only queues that it has declared."""
    monkeypatch.syspath_prepend(str(HERE))
    db_url, namespace = mesh.backends.db_url, mesh.backends.namespace
    if db_url.startswith("sqlite"):
        await asyncio.to_thread(migrations.upgrade, db_url)
    earlier = await EarlierReplica.start(sources, Release().config(mesh))
    await earlier.stop()
    peer = await mesh.peer()
    await mesh.declare("root")
    async with Operations(db_url, namespace=namespace) as operations:
        answering = asyncio.create_task(peer.answer_all())
        yield FailedOperation(mesh, sources, operations)
        answering.cancel()


async def test_a_failed_operation_with_a_log_repeats_no_write(operation: FailedOperation) -> None:
    """An earlier release finds the notes in the checkpoint. After it, those in the log are old."""
    await operation.fail("counts_and_fails")
    async with operation.resume_in_earlier("counts_and_fails"):
        assert isinstance(await operation.outcome(), Failed)
    assert await operation.resume("counts_once_more") == Ok(3)


async def test_a_failed_operation_with_records_waits_for_a_release_that_reads_them(
    operation: FailedOperation,
) -> None:
    await operation.fail("records_and_fails")
    async with operation.resume_in_earlier("first") as earlier:
        await earlier.wait_for("no migration leads from 1+records to 1")
    assert await operation.resume("first") == Ok(result("first", 1))


async def check(config: Path, code: ExitCode, warnings: set[str]) -> None:
    """Compare what the doctor says."""
    report = await asyncio.to_thread(run_doctor, config)
    found = {each["check"] for each in report["findings"] if each["severity"] != "note"}
    assert (report["exit_code"], found) == (code, warnings), report
