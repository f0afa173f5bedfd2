"""Checkpoints of one operation that share the records of its subtasks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from meshpoint.model.subtasks import AgentCheckpoint, SaveCommitted, SubtaskRecord
from meshpoint.model.tasks import Run, TaskState
from meshpoint.model.transitions import Save
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.testing.conformance.build import (
    a_cancel,
    a_checkpoint,
    a_pause,
    a_record,
    an_end,
    operating,
    resumed,
)

FETCHED, WEIGHING, WEIGHED = a_record("fetch", '"x"'), a_record("weigh"), a_record("weigh", "7")
WRITTEN = a_record("write", '"report"')


def sharing(
    run: Run, seq: int, *records: SubtaskRecord, changed: Sequence[str] = (), since: int = 1
) -> AgentCheckpoint:
    """A checkpoint that shares its records with those since `since`, except for the changed."""
    checkpoint = a_checkpoint(run, seq, *records, records_from=since)
    return checkpoint.model_copy(update={"changed": frozenset(changed)})


async def write(store: CheckpointStore, run: Run, *checkpoints: AgentCheckpoint) -> None:
    """Save these checkpoints, which must succeed."""
    for checkpoint in checkpoints:
        assert await store.save(Save(run, checkpoint)) == SaveCommitted()


async def records_of(store: CheckpointStore, run: Run) -> dict[int, tuple[SubtaskRecord, ...]]:
    """The records of each stored checkpoint of the operation."""
    return {each.seq: each.subtasks for each in await store.history(run.task_id)}


class RecordSuite:
    """Each checkpoint has all records of its time, also if only a few changed with it."""

    async def test_each_checkpoint_has_the_records_of_its_time(
        self, store: CheckpointStore
    ) -> None:
        run = await operating(store)
        await write(
            store,
            run,
            a_checkpoint(run, 1, FETCHED, WEIGHING),
            sharing(run, 2, FETCHED, WEIGHED, changed=["weigh"]),
            sharing(run, 3, FETCHED, WEIGHED, WRITTEN, changed=["write"]),
        )
        assert await records_of(store, run) == {
            1: (FETCHED, WEIGHING),
            2: (FETCHED, WEIGHED),
            3: (FETCHED, WEIGHED, WRITTEN),
        }
        latest = await store.latest(run.task_id)
        assert latest is not None
        assert latest.subtasks == (FETCHED, WEIGHED, WRITTEN)
        assert (latest.records_from, latest.agent_version) == (1, "7")

    async def test_records_are_in_the_order_of_the_checkpoint(
        self, store: CheckpointStore
    ) -> None:
        run = await operating(store)
        await write(
            store,
            run,
            a_checkpoint(run, 1, WRITTEN, WEIGHING),
            sharing(run, 2, WRITTEN, WEIGHED, FETCHED, changed=["weigh", "fetch"]),
        )
        assert (await records_of(store, run))[2] == (WRITTEN, WEIGHED, FETCHED)

    async def test_a_skipped_number_leaves_no_gap(self, store: CheckpointStore) -> None:
        """The write of a checkpoint was given up, so the next one has its records too."""
        run = await operating(store)
        await write(
            store,
            run,
            a_checkpoint(run, 1, FETCHED),
            sharing(run, 3, FETCHED, WEIGHED, WRITTEN, changed=["weigh", "write"]),
        )
        assert (await records_of(store, run))[3] == (FETCHED, WEIGHED, WRITTEN)

    @pytest.mark.parametrize("in_own_row", [True, False])
    async def test_a_checkpoint_can_start_anew(
        self, store: CheckpointStore, in_own_row: bool
    ) -> None:
        """As after a migration, or if an earlier release wrote it."""
        run = await operating(store)
        values = {"records_from": None} if in_own_row else {}
        await write(
            store,
            run,
            a_checkpoint(run, 1, FETCHED, WEIGHED),
            a_checkpoint(run, 2, WRITTEN, **values),
            a_checkpoint(run, 3, WRITTEN, WEIGHING),
        )
        assert await records_of(store, run) == {
            1: (FETCHED, WEIGHED),
            2: (WRITTEN,),
            3: (WRITTEN, WEIGHING),
        }

    async def test_a_pause_shares_records(self, store: CheckpointStore) -> None:
        run, other = await operating(store), await operating(store)
        await write(store, run, a_checkpoint(run, 1, FETCHED, WEIGHING))
        pauses = [
            replace(
                a_pause(run=run),
                checkpoint=sharing(run, 2, FETCHED, WEIGHED, changed=["weigh"]),
            ),
            replace(a_pause(run=other), checkpoint=a_checkpoint(other, 1, WRITTEN)),
        ]
        for _ in range(2):  # the second is a repeat
            await store.pause(pauses)
        task = await resumed(store, pauses[0])
        assert (task.checkpoint, (await records_of(store, run))[2]) == (2, (FETCHED, WEIGHED))
        assert await records_of(store, other) == {1: (WRITTEN,)}

    async def test_the_final_checkpoint_shares_records(self, store: CheckpointStore) -> None:
        run = await operating(store)
        await write(store, run, a_checkpoint(run, 1, FETCHED), sharing(run, 2, FETCHED))
        # The save of checkpoint 2 was lost to its run, which gave its number to the last one too.
        last = sharing(run, 2, FETCHED, WEIGHED, changed=["weigh"])
        await store.end([an_end(run, TaskState.FAILED, checkpoint=last)])
        assert (await records_of(store, run))[3] == (FETCHED, WEIGHED)

    @pytest.mark.parametrize("in_own_row", [True, False])
    async def test_a_cancelled_operation_keeps_its_records(
        self, store: CheckpointStore, in_own_row: bool
    ) -> None:
        counted = FETCHED.model_copy(
            update={"context": '{"token_usage": {"total": {"input": 100}}}'}
        )
        run = await operating(store)
        if in_own_row:
            await write(store, run, a_checkpoint(run, 2, counted, WEIGHED, records_from=None))
        else:
            await write(
                store,
                run,
                a_checkpoint(run, 1, counted),
                sharing(run, 2, counted, WEIGHED, changed=["weigh"]),
            )
        await store.pause([a_pause(run=run)])
        await store.cancel([a_cancel(run.task_id)])
        records = await records_of(store, run)
        assert records[2] == (counted, WEIGHED)
        assert records[3] == (FETCHED, WEIGHED)
