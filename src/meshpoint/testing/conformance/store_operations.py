"""Running operations: their begin, their checkpoints and their summaries."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import pytest

from meshpoint.model.ids import TaskId, new_id
from meshpoint.model.operations import OperationStatus, OperationSummary
from meshpoint.model.subtasks import AgentCheckpoint, Child, SaveCommitted
from meshpoint.model.tasks import TaskState
from meshpoint.model.transitions import BeginCommitted, CancelFound, Fenced, PauseCommitted, Save
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.testing.clock import FakeClock
from meshpoint.testing.conformance.build import (
    AGENT,
    ELSEWHERE,
    HERE,
    LEASE,
    PEER,
    SECOND,
    THERE,
    TIMINGS,
    a_begin,
    a_cancel,
    a_checkpoint,
    a_pause,
    a_record,
    a_release,
    a_run,
    an_end,
    an_operation,
    begun,
    failed,
    operating,
    paused,
    resumed,
    row,
    saved,
    summary_of,
    taken_over,
)


class OperationSuite:
    """Tasks become operations, save checkpoints, and are summarised."""

    async def test_a_task_without_subtasks_is_no_operation(self, store: CheckpointStore) -> None:
        task = await resumed(store)
        assert (task.checkpoint, task.retry_count) == (None, 0)
        assert await store.operation(task.run.task_id) is None
        assert await store.operations() == []

    async def test_begin_writes_operation(self, store: CheckpointStore, clock: FakeClock) -> None:
        run, now = await operating(store, exclusive=True), clock.now()
        clock.advance(SECOND)
        assert await store.operation(run.task_id) == OperationSummary(
            id=run.task_id,
            agent=AGENT,
            type="analysis",
            status=OperationStatus.RUNNING,
            phase=None,
            subject="ACME",
            parameters={"ticker": "ACME"},
            children=(),
            progress_pct=0.0,
            retry_count=0,
            owner=HERE.id,
            lease_until=now + LEASE,
            created_at=now,
            updated_at=now,
            ended_at=None,
            failure_reason=None,
            exclusive=True,
            preserve=False,
            checkpoint=None,
        )

    async def test_a_repeated_begin_finds_its_operation(self, store: CheckpointStore) -> None:
        begin = a_begin(operation=an_operation())
        first = await store.begin([begin])
        before = await store.operation(begin.run.task_id)
        assert await store.begin([begin]) == first
        assert await store.operation(begin.run.task_id) == before

    async def test_track_running_task(self, store: CheckpointStore, clock: FakeClock) -> None:
        task = await resumed(store)
        assert await store.track(task.run, an_operation()) == BeginCommitted(task.run)
        summary = await summary_of(store, task.run.task_id)
        assert (summary.type, summary.parameters, summary.checkpoint) == (
            "analysis",
            {"ticker": "ACME"},
            None,
        )
        assert (await taken_over(store, clock)).checkpoint == 0

    async def test_what_is_an_operation_stays_the_one_it_is(self, store: CheckpointStore) -> None:
        run = await operating(store)
        await saved(store, run)
        before = await store.operation(run.task_id)
        assert await store.track(run, an_operation(type="other")) == BeginCommitted(run)
        assert await store.operation(run.task_id) == before

    async def test_only_owner_tracks_task(self, store: CheckpointStore, clock: FakeClock) -> None:
        zombie = (await resumed(store)).run
        await taken_over(store, clock)
        waiting = replace((await paused(store)).run, fence=1, generation=1)
        for run in (zombie, waiting, replace(a_run(), fence=1)):
            assert await store.track(run, an_operation()) == Fenced()
        assert await store.operations() == []

    async def test_track_finds_cancel_request(self, store: CheckpointStore) -> None:
        run = (await resumed(store)).run
        await store.cancel([a_cancel(run.task_id)])
        assert await store.track(run, an_operation()) == CancelFound(run)
        assert await store.operation(run.task_id) is None

    async def test_parked_operation_has_reason(self, store: CheckpointStore) -> None:
        run = await operating(store)
        await saved(store, run)
        assert await store.release([a_release(run, parked="travel/9")]) == [True]
        summary = await summary_of(store, run.task_id)
        assert (summary.status, summary.failure_reason) == (OperationStatus.PARKED, "travel/9")
        assert await store.operations(statuses=[OperationStatus.PENDING]) == []
        assert await store.operations(statuses=[OperationStatus.PARKED]) == [summary]

    async def test_parameters_are_kept_exactly(self, store: CheckpointStore) -> None:
        parameters = {"z": 1e16, "a": [-0.0, "\0", 2**70], "m": None}
        summary = await store.operation((await operating(store, parameters=parameters)).task_id)
        assert summary is not None
        assert json.dumps(summary.parameters) == json.dumps(parameters)

    async def test_each_pause_adds_its_children(self, store: CheckpointStore) -> None:
        run = await operating(store)
        first = a_child()
        second = a_child(subtask=None, retry=2)
        third = a_child()
        pause = replace(a_pause(run=run), children=(first, second))
        for _ in range(2):  # the second is a repeat
            await store.pause([pause])
        await store.pause(
            [replace(a_pause(run=(await resumed(store, pause)).run), children=(third,))]
        )
        summary = await summary_of(store, run.task_id)
        assert (summary.status, summary.children) == (
            OperationStatus.WAITING,
            (first, second, third),
        )

    async def test_pauses_written_together_add_their_own_children(
        self, store: CheckpointStore
    ) -> None:
        plain = (await resumed(store, await paused(store))).run
        runs = [await operating(store) for _ in range(3)]
        added = [(a_child(), a_child()), (), (a_child(),)]
        pauses = [
            replace(a_pause(run=run), children=children)
            for run, children in zip(runs, added, strict=True)
        ]
        results = await store.pause([pauses[2], a_pause("b", run=plain), *pauses[:2]])
        assert all(isinstance(each, PauseCommitted) for each in results)
        for run, children in zip(runs, added, strict=True):
            assert (await summary_of(store, run.task_id)).children == children

    async def test_pause_without_children_keeps_operation(self, store: CheckpointStore) -> None:
        run = await operating(store)
        checkpoint = await saved(store, run)
        task = await resumed(store, await paused(store, run=run))
        assert (task.checkpoint, task.retry_count, task.attempt) == (checkpoint.seq, 0, 1)

    @pytest.mark.parametrize("records_from", [None, 7])
    async def test_latest_round_trip(
        self, store: CheckpointStore, clock: FakeClock, records_from: int | None
    ) -> None:
        run = await operating(store)
        await saved(store, run)
        clock.advance(SECOND)
        checkpoint = a_checkpoint(
            run,
            7,
            a_record("fetch", '{"price": 1}').model_copy(
                update={"secrets": ("/key\0",), "context": "{}"}
            ),
            a_record("weigh"),
            saved_progress={"weigh": "[1, 2]"},
            agent_config={"model": "m", "rate": 0.5},
            error_details={"trace": ["a", None]},
            failure_reason="broken",
            retry_count=3,
            extra={"subtask_progress": {"fetch": 1.0}, "odd": "\0"},
            records_from=records_from,
        )
        assert await store.save(Save(run, checkpoint)) == SaveCommitted()
        latest = await store.latest(run.task_id)
        assert latest == checkpoint.model_copy(update={"checkpoint_time": clock.now()})
        assert await store.latest(run.task_id, AGENT) == latest
        assert await store.latest(run.task_id, ELSEWHERE) is None

    async def test_there_is_no_checkpoint_before_the_first(self, store: CheckpointStore) -> None:
        for task_id in (
            (await operating(store)).task_id,
            (await begun(store)).task_id,
            TaskId("nobody"),
        ):
            assert await store.latest(task_id) is None
            assert await store.history(task_id) == []

    async def test_repeated_save_finds_itself(self, store: CheckpointStore) -> None:
        run = await operating(store)
        first, second = await saved(store, run), await saved(store, run)
        before = await store.history(run.task_id)
        await store.cancel([a_cancel(run.task_id)])
        for seq in (first.seq, second.seq):
            assert (
                await store.save(Save(run, a_checkpoint(run, seq, a_record("other"))))
                == SaveCommitted()
            )
        assert await store.history(run.task_id) == before

    async def test_zombie_save_is_fenced(self, store: CheckpointStore, clock: FakeClock) -> None:
        zombie = await operating(store)
        await saved(store, zombie)
        await taken_over(store, clock)
        before = await row(store, zombie.task_id), await store.history(zombie.task_id)
        assert await store.save(Save(zombie, a_checkpoint(zombie, 2))) == Fenced()
        assert (await row(store, zombie.task_id), await store.history(zombie.task_id)) == before

    async def test_only_a_running_operation_is_saved(self, store: CheckpointStore) -> None:
        waiting, over, plain = await operating(store), await failed(store), await begun(store)
        await paused(store, run=waiting)
        for run in (waiting, over, plain, replace(a_run(), fence=1)):
            assert await store.save(Save(run, a_checkpoint(run, 9))) == Fenced()
            assert 9 not in [checkpoint.seq for checkpoint in await store.history(run.task_id)]

    async def test_save_finds_cancel_request(self, store: CheckpointStore) -> None:
        run = await operating(store)
        await store.cancel([a_cancel(run.task_id)])
        assert await store.save(Save(run, a_checkpoint(run))) == CancelFound(run)
        assert await store.latest(run.task_id) is None

    async def test_save_resets_attempt(self, store: CheckpointStore, clock: FakeClock) -> None:
        await operating(store)
        task = await taken_over(store, clock)
        assert (task.attempt, task.checkpoint) == (2, 0)
        await saved(store, task.run)
        assert (await row(store, task.run.task_id))[0].attempt == 1
        task = await taken_over(store, clock)
        assert (task.attempt, task.checkpoint) == (2, 1)

    async def test_save_without_progress(self, store: CheckpointStore, clock: FakeClock) -> None:
        await operating(store)
        for attempt in (2, 3):
            task = await taken_over(store, clock)
            checkpoint = a_checkpoint(task.run, attempt, saved_progress={"weigh": str(attempt)})
            assert (
                await store.save(Save(task.run, checkpoint, progressed=False)) == SaveCommitted()
            )
            assert (await row(store, task.run.task_id))[0].attempt == attempt
            assert (await latest_of(store, task.run.task_id)).saved_progress == {
                "weigh": str(attempt)
            }

    async def test_so_many_checkpoints_are_kept_as_history(self, store: CheckpointStore) -> None:
        run = await operating(store)
        written = [await saved(store, run) for _ in range(5)]
        kept = await store.history(run.task_id)
        assert [each.seq for each in kept] == [3, 4, 5]
        assert [each.subtasks for each in kept] == [
            each.subtasks for each in written[-TIMINGS.checkpoint_history :]
        ]
        assert await store.latest(run.task_id) == kept[-1]

    @pytest.mark.parametrize("records_from", [None, 1])
    @pytest.mark.parametrize(
        "text",
        [
            '{"z": 1, "a": 2}',
            "1e16",
            "-0.0",
            '"\\u0000"',
            '"\\ud800"',
            '{"a": 1, "a": 2}',
            f'"{"x" * 2**20}"',
        ],
        ids=[
            "order",
            "float",
            "negative-zero",
            "zero-character",
            "surrogate",
            "twice",
            "megabyte",
        ],
    )
    async def test_json_text_is_stored_verbatim(
        self, store: CheckpointStore, text: str, records_from: int | None
    ) -> None:
        run = await operating(store)
        record = a_record("fetch", text).model_copy(update={"context": text})
        values = {"saved_progress": {"weigh": text}, "records_from": records_from}
        checkpoint = a_checkpoint(run, 1, record, **values)
        assert await store.save(Save(run, checkpoint)) == SaveCommitted()
        latest = await store.latest(run.task_id)
        assert latest is not None
        assert (latest.subtasks, latest.saved_progress) == ((record,), {"weigh": text})

    async def test_unstorable_characters_do_not_fail_save(self, store: CheckpointStore) -> None:
        odd = {
            "error_details": {"k\0": ["v\0"]},
            "agent_config": {"k\0": float("nan")},
            "failure_reason": "r\0",
        }
        run = await operating(store, subject="s\0", type="t\0")
        assert (
            await store.save(
                Save(run, a_checkpoint(run, 1, subject="s\0", agent_version="\0", **odd))
            )
            == SaveCommitted()
        )
        await store.end([an_end(run, TaskState.FAILED, reason="r\0\ud800")])
        assert (await latest_of(store, run.task_id)).seq == 2

    async def test_what_was_read_may_be_changed(self, store: CheckpointStore) -> None:
        run = await operating(store)
        checkpoint = a_checkpoint(run, agent_config={"tools": ["a"]})
        await store.save(Save(run, checkpoint))
        for each in (
            checkpoint,
            await latest_of(store, run.task_id),
            *await store.history(run.task_id),
        ):
            each.agent_config.clear()
        assert (await latest_of(store, run.task_id)).agent_config == {"tools": ["a"]}

    async def test_operation_progress(self, store: CheckpointStore, clock: FakeClock) -> None:
        run = await operating(store)
        clock.advance(SECOND)
        await saved(store, run)
        summary = await summary_of(store, run.task_id)
        assert (summary.phase, summary.progress_pct, summary.checkpoint) == ("weigh", 33.33, 1)
        assert summary.updated_at == clock.now()
        await saved(store, run, current_subtask=None)
        summary = await summary_of(store, run.task_id)
        assert (summary.phase, summary.checkpoint) == ("weigh", 2)  # the next subtask of the plan

    async def test_operation_status(self, store: CheckpointStore, clock: FakeClock) -> None:
        assert await store.operation(TaskId("nobody")) is None
        pause = await paused(store, run=await operating(store))
        assert await status_of(store, pause.run.task_id) == (OperationStatus.WAITING, None, None)
        run = (await resumed(store, pause, replica=THERE)).run
        assert await status_of(store, run.task_id) == (
            OperationStatus.RUNNING,
            THERE.id,
            clock.now() + LEASE,
        )
        await store.release([a_release(run)])
        assert await status_of(store, run.task_id) == (OperationStatus.PENDING, None, None)

    @pytest.mark.parametrize("state", [TaskState.COMPLETED, TaskState.FAILED, TaskState.CANCELLED])
    async def test_operation_ends_with_task(
        self, store: CheckpointStore, clock: FakeClock, state: TaskState
    ) -> None:
        run = await operating(store)
        clock.advance(SECOND)
        await store.end(
            [an_end(run, state, dead_reason=None if state is TaskState.COMPLETED else "why")]
        )
        summary = await summary_of(store, run.task_id)
        done = state is TaskState.COMPLETED
        assert (summary.status, summary.ended_at) == (OperationStatus(state.value), clock.now())
        assert (summary.progress_pct, summary.phase, summary.checkpoint) == (
            100.0 if done else 0.0,
            None,
            None,
        )
        assert (summary.failure_reason, summary.updated_at) == (
            None if done else "why",
            clock.now(),
        )

    async def test_the_key_for_copies_is_made_once(self, store: CheckpointStore) -> None:
        first, *others = await asyncio.gather(*(store.copy_key() for _ in range(5)))
        assert len(first) == 32
        assert set(others) == {first}

    async def test_operations_newest_first(self, store: CheckpointStore, clock: FakeClock) -> None:
        ids = []
        for _ in range(3):
            ids.append((await operating(store)).task_id)
            clock.advance(SECOND)
        over = await failed(store)
        await begun(store)
        newest = [over.task_id, *reversed(ids)]
        assert [each.id for each in await store.operations()] == newest
        assert [each.id for each in await store.operations(agent=AGENT, limit=2)] == newest[:2]
        assert await store.operations(agent=ELSEWHERE) == []
        running = await store.operations(
            statuses=[OperationStatus.RUNNING, OperationStatus.WAITING]
        )
        assert [each.id for each in running] == newest[1:]
        assert [
            each.id
            for each in await store.operations(agent=AGENT, statuses=[OperationStatus.FAILED])
        ] == newest[:1]


def a_child(**values: object) -> Child:
    """A task that an operation started at a peer."""
    return Child.model_validate(
        {"id": new_id(), "peer": PEER, "digest": "d", "subtask": "fetch", **values}
    )


async def latest_of(store: CheckpointStore, task_id: TaskId) -> AgentCheckpoint:
    """The operation's last checkpoint."""
    latest = await store.latest(task_id)
    assert latest is not None
    return latest


async def status_of(store: CheckpointStore, task_id: TaskId) -> tuple[object, object, object]:
    """The operation's status, its owner, and when the owner's lease ends."""
    summary = await summary_of(store, task_id)
    return summary.status, summary.owner, summary.lease_until
