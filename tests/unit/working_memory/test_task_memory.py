"""The memory of one segment: when it asks L1, and what its checkpoints contain."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import pytest

from meshpoint.adapters.inprocess.working_memory import InProcessWorkingMemory
from meshpoint.errors import MemoryUnavailable
from meshpoint.model.memory import Command, Item, MemoryContents, MemoryRecovery, Owner
from meshpoint.model.subtasks import MemoryWrite
from meshpoint.model.tasks import L1Snapshot
from meshpoint.testing.clock import FakeClock
from meshpoint.working_memory.digests import EMPTY_FINGERPRINT, fingerprint
from meshpoint.working_memory.snapshots import MemoryRef, MemoryServices
from meshpoint.working_memory.task_memory import TaskMemory
from meshpoint.working_memory.write_log import encode_writes

from .items import AGENT_ID, ITEMS, create_owner

OWNER = create_owner("run", 2)
SET = [Command("SET", "x", (b"1",))]
GET = [Command("GET", "x")]


class FailingReplaces(InProcessWorkingMemory):
    """An L1 that outlives its process, and can lose the answers of `replace`."""

    def __init__(self) -> None:
        super().__init__(FakeClock())
        self.replaces_in_doubt = 0

    @property
    def durable(self) -> bool:
        return True

    async def replace(
        self,
        owner: Owner,
        items: Sequence[Item],
        *,
        expected_version: int | None = None,
        force: bool = False,
    ) -> MemoryContents:
        if self.replaces_in_doubt:
            self.replaces_in_doubt -= 1
            raise MemoryUnavailable("the answer was lost")
        return await super().replace(owner, items, expected_version=expected_version, force=force)


@dataclass
class Replica:
    """Memory services that count the recoveries, and segments that use them."""

    l1: FailingReplaces = field(default_factory=FailingReplaces)
    recoveries: list[MemoryRecovery] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.services = MemoryServices(
            self.l1,
            None,
            max_bytes=1_000_000,
            keep_completed=False,
            report_problem=lambda *_: None,
            on_recovered=lambda _, recovery: self.recoveries.append(recovery),
        )

    def segment(self, ref: MemoryRef) -> TaskMemory:
        return create_memory(lambda: self.services, ref)


def create_memory(
    services: Callable[[], MemoryServices], ref: MemoryRef, notes: Sequence[bytes] = ()
) -> TaskMemory:
    async def nothing() -> None:
        pass

    async def no_snapshot() -> L1Snapshot | None:
        return None

    async def is_owner() -> bool:
        return True

    def on_lost() -> NoReturn:
        raise AssertionError("not lost")

    return TaskMemory(
        services,
        ref,
        notes,
        owner=lambda: OWNER,
        position=lambda: (0, 0),
        ensure_operation=nothing,
        fetch_sql=no_snapshot,
        is_owner=is_owner,
        on_lost=on_lost,
    )


def unavailable_services() -> MemoryServices:
    raise AssertionError("a memory that is not used needs no services")


@pytest.fixture
def replica() -> Replica:
    return Replica()


async def stored_memory(replica: Replica) -> MemoryRef:
    """Store ITEMS in L1 as of a checkpoint, and return its reference."""
    contents = await replica.l1.replace(create_owner("earlier", 1), ITEMS)
    digest = fingerprint(contents.items)
    return MemoryRef(digest, digest, order=1)


@pytest.mark.parametrize("used", [True, False])
async def test_the_last_checkpoint_of_a_failed_task_has_the_writes_of_its_log(
    replica: Replica, used: bool
) -> None:
    logged = MemoryWrite(digest="d", calls=1, subtasks=0, seq=1)
    ref = await stored_memory(replica)
    memory = create_memory(lambda: replica.services, ref, [encode_writes([logged])])
    if used:
        await memory.execute(SET)
        assert len((await memory.prepare_ref(2, durable=True)).writes) == 1, "the log has the rest"
    final = await memory.final_ref(3)
    assert final.writes[0] == logged
    assert len(final.writes) == 1 + used
    resumed = create_memory(lambda: replica.services, final, [encode_writes([logged])])
    again = await resumed.final_ref(4)
    assert again.writes == final.writes, "the writes in the log no longer count"
    assert (final.writes_replace_log, final.finished_in_log) == (True, frozenset())


async def test_an_unused_memory_uses_no_services() -> None:
    memory, ref = create_memory(unavailable_services, MemoryRef()), MemoryRef()
    assert not memory.changed
    assert await memory.prepare_ref(1, durable=True) == ref
    assert await memory.final_ref(1) == ref
    await memory.on_stored(ref)
    await memory.on_paused()
    await memory.on_completed()
    await memory.close()
    assert memory.recovery is None


async def test_an_unused_memory_is_in_the_next_checkpoint_as_it_was() -> None:
    ref = MemoryRef("1:00", "1:00", order=1)
    assert await create_memory(unavailable_services, ref).prepare_ref(2, durable=True) == ref


async def test_a_memory_that_was_only_read_is_unchanged(replica: Replica) -> None:
    memory = replica.segment(await stored_memory(replica))
    await memory.execute(GET)
    assert not memory.changed
    assert replica.recoveries == [memory.recovery]


async def test_a_memory_is_changed_until_its_checkpoint_is_stored(replica: Replica) -> None:
    memory = replica.segment(MemoryRef())
    await memory.execute(SET)
    assert memory.changed
    ref = await memory.prepare_ref(1, durable=True)
    assert memory.changed
    await memory.on_stored(ref)
    assert not memory.changed


async def test_a_failed_clear_of_an_unused_memory_changes_no_checkpoint(replica: Replica) -> None:
    ref = await stored_memory(replica)
    memory, replica.l1.replaces_in_doubt = replica.segment(ref), 1
    with pytest.raises(MemoryUnavailable):
        await memory.clear()
    assert memory.recovery is None
    assert not memory.changed
    assert await memory.prepare_ref(2, durable=True) == ref


async def test_a_memory_recovered_after_a_failed_clear_gets_a_new_snapshot(
    replica: Replica,
) -> None:
    """The clear may reach L1 later, so an unchanged version proves nothing."""
    memory = replica.segment(await stored_memory(replica))
    replica.l1.replaces_in_doubt = 1
    with pytest.raises(MemoryUnavailable):
        await memory.clear()
    await memory.execute(GET)
    assert memory.changed
    await memory.on_stored(await memory.prepare_ref(2, durable=True))
    assert not memory.changed


async def test_a_repeated_clear_empties_the_memory(replica: Replica) -> None:
    memory = replica.segment(await stored_memory(replica))
    replica.l1.replaces_in_doubt = 1
    with pytest.raises(MemoryUnavailable):
        await memory.clear()
    await memory.clear()
    assert (await replica.l1.read(AGENT_ID)).items == ()
    assert (await memory.prepare_ref(2, durable=True)).digest == EMPTY_FINGERPRINT
    assert replica.recoveries == []


async def test_a_refused_write_leaves_the_memory_in_doubt(replica: Replica) -> None:
    memory = replica.segment(MemoryRef())
    await memory.execute(SET)
    await memory.on_stored(await memory.prepare_ref(1, durable=True))
    with pytest.raises(Exception, match="x"):
        await memory.execute([Command("RPUSH", "x", (b"1",))])
    assert memory.changed
    await memory.execute([Command("DEL", "x")])
    assert (await memory.prepare_ref(2, durable=True)).digest == EMPTY_FINGERPRINT


async def resumed_after_writes(replica: Replica, *keys: str) -> TaskMemory:
    """The memory of a segment whose code makes these writes again."""
    memory = replica.segment(MemoryRef())
    for key in keys:
        await memory.execute(set_command(key))
    ref = await memory.prepare_ref(1, durable=True)
    await memory.on_stored(ref)
    return replica.segment(ref)


def set_command(key: str) -> list[Command]:
    return [Command("SET", key, (b"1",))]


async def test_a_repeated_write_returns_without_suspending(replica: Replica) -> None:
    memory = await resumed_after_writes(replica, "x", "y")
    await memory.execute(set_command("x"))  # recovers the memory
    with pytest.raises(StopIteration) as returned:
        memory.execute(set_command("y")).send(None)
    assert returned.value.value == [b"OK"]


async def test_a_repeated_write_waits_for_a_new_one_before_it(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = await resumed_after_writes(replica, "x", "y")
    await memory.execute(set_command("x"))
    is_writing, may_end, execute = asyncio.Event(), asyncio.Event(), replica.l1.execute

    async def wait_and_execute(*args: Any, **options: Any) -> Any:
        is_writing.set()
        await may_end.wait()
        return await execute(*args, **options)

    monkeypatch.setattr(replica.l1, "execute", wait_and_execute)
    new = asyncio.create_task(memory.execute(set_command("z")))
    await is_writing.wait()
    repeated = asyncio.create_task(memory.execute(set_command("y")))
    await asyncio.sleep(0)
    assert not repeated.done()
    may_end.set()
    assert [await new, await repeated] == [[b"OK"], [b"OK"]]
