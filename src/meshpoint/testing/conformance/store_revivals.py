"""Ended tasks that become ready again."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from meshpoint.model.ids import TaskId
from meshpoint.model.messages import Address
from meshpoint.model.operations import NotRevived, OperationStatus, Refusal, Revived
from meshpoint.model.tasks import KeepAlive, TaskState
from meshpoint.model.transitions import Fenced, Save
from meshpoint.model.usage import Tokens, TokenUsage
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.testing.clock import FakeClock
from meshpoint.testing.conformance.build import (
    AGENT,
    CANCELLED,
    ELSEWHERE,
    FAILED,
    FORMAT,
    HERE,
    HOUR,
    LEASE,
    SECOND,
    TIMINGS,
    a_begin,
    a_cancel,
    a_checkpoint,
    a_pause,
    a_record,
    a_release,
    a_requester,
    a_revive,
    a_run,
    an_end,
    an_operation,
    begun,
    ended,
    existing,
    failed,
    one,
    operating,
    paused,
    ready,
    resumed,
    revived,
    row,
    saved,
    state_of,
    summary_of,
    write_end,
)
from meshpoint.testing.conformance.store_leases import sent
from meshpoint.testing.conformance.store_operations import latest_of, status_of


class ReviveSuite:
    """Tasks that are resumed, refusals, and repeated commands."""

    async def test_revive_makes_task_ready(self, store: CheckpointStore, clock: FakeClock) -> None:
        pause = await paused(
            store, run=await operating(store), requester=a_requester(idle_timeout=HOUR)
        )
        run = (await resumed(store, pause)).run
        last = await saved(store, run)
        await store.end([an_end(run, FAILED, reason="broken", dead_reason="broken")])
        await sent(store, run.task_id)
        command = a_revive(run.task_id)
        assert await store.revive(command) == Revived(run.task_id, AGENT, 1)
        assert await status_of(store, run.task_id) == (OperationStatus.PENDING, None, None)
        summary, calls = await row(store, run.task_id)
        assert (summary.attempt, summary.dead_reason, summary.expected, calls) == (0, None, 0, [])
        assert (await existing(store, run.task_id)).reply is None
        clock.advance(TIMINGS.checkpoint_ttl + HOUR)
        assert await store.unsent(AGENT, 10) == []
        assert await store.keep_alives(HERE, 10) == []
        assert await store.purge(AGENT, 10) == 0
        task = one(await store.acquire(HERE, 10))
        assert (task.run.generation, task.run.fence > run.fence + 1) == (0, True)
        assert (task.context, task.state, task.outcomes) == ({}, b"", ())
        assert task.state_format == FORMAT  # names the version that began it
        assert (task.request, task.requester, task.cancel_requested) == (
            b"request",
            a_requester(),  # without its idle timeout, since its reply was sent
            False,
        )
        assert (task.attempt, task.checkpoint, task.retry_count) == (1, last.seq + 1, 1)

    async def test_revive_with_new_request(self, store: CheckpointStore, clock: FakeClock) -> None:
        run = await failed(store)
        requester = a_requester(
            reply_to=Address("cli.resp"),
            deadline=clock.now() + HOUR,
            idle_timeout=timedelta(seconds=9),
        )
        await store.revive(a_revive(run.task_id, request=b"new", requester=requester))
        task = one(await store.acquire(HERE, 10))
        assert (task.request, task.requester) == (b"new", requester)
        result = await write_end(store, an_end(task.run, reply=b"at last"))
        assert (result.reply.requester, result.reply.body) == (requester, b"at last")

    async def test_keep_alives_of_a_revived_task(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        run, requester = await failed(store), a_requester(idle_timeout=9 * SECOND)
        await store.revive(a_revive(run.task_id, requester=requester))
        assert await store.keep_alives(HERE, 10) == []
        clock.advance(3 * SECOND)
        assert await store.keep_alives(HERE, 10) == [KeepAlive(AGENT, run.task_id, requester)]

    async def test_revive_keeps_requester(self, store: CheckpointStore, clock: FakeClock) -> None:
        requester = a_requester(deadline=clock.now() + HOUR, idle_timeout=9 * SECOND)
        run = await operating(store)
        await saved(store, run)
        await store.end(
            [
                an_end(
                    await revived(store, run.task_id, requester=requester, abandoned=True), FAILED
                )
            ]
        )
        run = await revived(store, run.task_id)  # its reply was never sent
        end = await write_end(store, an_end(run, reply=b"at last"))
        assert (end.reply.requester, end.reply.body) == (
            replace(requester, deadline=None),
            b"at last",
        )

    async def test_revive_of_abandoned_task_keeps_requester(self, store: CheckpointStore) -> None:
        run = await revived(
            store, (await operating(store)).task_id, abandoned=True, without_checkpoint=True
        )
        end = await write_end(store, an_end(run))
        assert end.reply.requester == a_requester()

    async def test_a_waiting_requester_gives_way_to_another(self, store: CheckpointStore) -> None:
        requester = a_requester(parent_task_id="next")
        run = await revived(store, (await failed(store)).task_id, requester=requester)
        end = await write_end(store, an_end(run))
        assert end.reply.requester == requester

    async def test_a_revived_operation_goes_on_saving(self, store: CheckpointStore) -> None:
        run = await revived(store, (await failed(store)).task_id)
        assert (await saved(store, run)).seq == 3
        assert [each.seq for each in await store.history(run.task_id)] == [1, 2, 3]
        await store.end([an_end(run, FAILED, reason="again")])
        latest = await latest_of(store, run.task_id)
        assert (latest.failure_reason, latest.retry_count) == ("again", 1)
        assert await store.revive(a_revive(run.task_id)) == Revived(run.task_id, AGENT, 2)

    async def test_revive_restarts_ttl(self, store: CheckpointStore, clock: FakeClock) -> None:
        run = await failed(store)
        await sent(store, run.task_id)
        run = await revived(store, run.task_id)
        clock.advance(2 * HOUR)
        await store.end([an_end(run, FAILED)])
        await sent(store, run.task_id)
        clock.advance(TIMINGS.checkpoint_ttl - HOUR)
        assert await store.purge(AGENT, 10) == 0
        clock.advance(HOUR + SECOND)
        assert await store.purge(AGENT, 10) == 1

    async def test_the_runs_of_before_are_zombies(self, store: CheckpointStore) -> None:
        run = await operating(store)
        await saved(store, run)
        end = an_end(run, FAILED)
        await store.end([end])
        await store.revive(a_revive(run.task_id))
        before = await row(store, run.task_id)
        assert await store.end([end]) == [Fenced()]
        assert await store.pause([a_pause(run=run)]) == [Fenced()]
        assert await store.save(Save(run, a_checkpoint(run, 9))) == Fenced()
        assert await store.renew([run], HERE) == [run]
        assert await row(store, run.task_id) == before

    async def test_a_raised_cancel_flag_is_lowered(self, store: CheckpointStore) -> None:
        run = await operating(store)
        await saved(store, run)
        await store.cancel([a_cancel(run.task_id)])
        await store.end([an_end(run, CANCELLED)])
        assert (await saved(store, await revived(store, run.task_id))).seq == 3

    async def test_a_revived_operation_pauses_and_resumes(self, store: CheckpointStore) -> None:
        run = await revived(store, (await failed(store)).task_id)
        task = await resumed(store, await paused(store, run=run, state_format=FORMAT))
        assert (task.run.generation, task.checkpoint, task.retry_count) == (1, 2, 1)

    async def test_what_is_not_there_is_not_found(self, store: CheckpointStore) -> None:
        run = await failed(store)
        before = await row(store, run.task_id)
        for command in (
            a_revive(TaskId("nobody")),
            a_revive(run.task_id, agent=ELSEWHERE, abandoned=True),
        ):
            assert await store.revive(command) == NotRevived(Refusal.NOT_FOUND)
        assert await row(store, run.task_id) == before
        assert isinstance(await store.revive(a_revive(run.task_id, agent=AGENT)), Revived)

    async def test_revive_active_refused(self, store: CheckpointStore, clock: FakeClock) -> None:
        running, until = await operating(store), (clock.now() + LEASE).isoformat()
        waiting = await paused(store, run=await operating(store))
        pending = await ready(store, await paused(store, run=await operating(store)))
        found = [
            (run.task_id, await row(store, run.task_id))
            for run in (running, waiting.run, pending.run)
        ]
        details = [f"running, owned by {HERE.id} until {until}", "waiting", "pending"]
        for (task_id, before), detail in zip(found, details, strict=True):
            command = a_revive(task_id, without_checkpoint=True)
            assert await store.revive(command) == NotRevived(Refusal.RUNNING, detail)
            assert await row(store, task_id) == before

    async def test_revive_parked_refused(self, store: CheckpointStore) -> None:
        run = await operating(store)
        await saved(store, run)
        await store.release([a_release(run, parked="call 1")])
        assert await state_of(store, run.task_id) is TaskState.PARKED
        assert await store.revive(a_revive(run.task_id)) == NotRevived(Refusal.RUNNING, "parked")
        assert isinstance(await store.revive(a_revive(run.task_id, abandoned=True)), Revived)

    async def test_what_has_ended_well_is_completed(self, store: CheckpointStore) -> None:
        run = await operating(store, preserve=True)
        await saved(store, run)
        await store.end([an_end(run)])
        for command in (
            a_revive(run.task_id),
            a_revive(run.task_id, without_checkpoint=True, abandoned=True),
        ):
            assert await store.revive(command) == NotRevived(Refusal.COMPLETED)

    async def test_revive_without_checkpoint_on_demand_only(self, store: CheckpointStore) -> None:
        task_id = (await failed(store, checkpoints=0)).task_id
        assert await store.revive(a_revive(task_id)) == NotRevived(Refusal.NO_CHECKPOINT)
        assert await store.revive(a_revive(task_id, without_checkpoint=True)) == Revived(
            task_id, AGENT, 1
        )
        assert one(await store.acquire(HERE, 10)).checkpoint == 0

    async def test_revived_plain_task_starts_over(self, store: CheckpointStore) -> None:
        dead = (await ended(store, state=FAILED, dead_reason="five attempts")).task_id
        assert await store.revive(a_revive(dead)) == NotRevived(Refusal.NO_CHECKPOINT)
        assert await store.revive(a_revive(dead, without_checkpoint=True)) == Revived(
            dead, AGENT, 1
        )
        assert one(await store.acquire(HERE, 10)).checkpoint is None

    async def test_revive_without_request_needs_new_one(self, store: CheckpointStore) -> None:
        over = (await ended(store, state=FAILED)).task_id
        refused = await store.revive(a_revive(over, without_checkpoint=True))
        assert isinstance(refused, NotRevived)
        assert refused.refusal is Refusal.NO_CHECKPOINT
        assert isinstance(
            await store.revive(a_revive(over, without_checkpoint=True, request=b"new")), Revived
        )

    async def test_exclusive_agent_has_one_active_operation(self, store: CheckpointStore) -> None:
        over, other = await failed(store, exclusive=True), await operating(store)
        await begun(store)  # this one is not an operation
        command = a_revive(over.task_id)
        assert await store.revive(command) == NotRevived(Refusal.OTHER_ACTIVE, other.task_id)
        await store.end([an_end(other, FAILED)])
        assert isinstance(await store.revive(command), Revived)

    async def test_the_first_reason_is_returned(self, store: CheckpointStore) -> None:
        empty = await failed(store, checkpoints=0, exclusive=True)
        good = await operating(store, exclusive=True)
        await store.end([an_end(good)])
        active = await operating(store, exclusive=True)
        assert await store.revive(a_revive(active.task_id, agent=ELSEWHERE)) == NotRevived(
            Refusal.NOT_FOUND
        )
        commands = [a_revive(run.task_id, abandoned=run is good) for run in (active, good, empty)]
        found = [await store.revive(command) for command in commands]
        assert [each.refusal for each in found if isinstance(each, NotRevived)] == [
            Refusal.RUNNING,
            Refusal.COMPLETED,
            Refusal.NO_CHECKPOINT,
        ]

    async def test_exclusive_ignores_other_agents(self, store: CheckpointStore) -> None:
        over = await failed(store, exclusive=True)
        other = replace(a_run(), agent=ELSEWHERE)
        await store.begin([replace(a_begin(other), operation=an_operation(exclusive=True))])
        assert isinstance(await store.revive(a_revive(over.task_id)), Revived)

    async def test_an_agent_that_is_not_exclusive_has_many(self, store: CheckpointStore) -> None:
        over = await failed(store)
        await operating(store)
        assert isinstance(await store.revive(a_revive(over.task_id)), Revived)

    async def test_a_repeated_command_finds_itself(self, store: CheckpointStore) -> None:
        run = await failed(store)
        command = a_revive(run.task_id, abandoned=True)
        await store.revive(command)
        before = await row(store, run.task_id)
        assert await store.revive(command) == Revived(run.task_id, AGENT, 1, repeated=True)
        assert await row(store, run.task_id) == before

    async def test_manual_revive_does_not_depend_on_clocks(self, store: CheckpointStore) -> None:
        run = await failed(store)
        old = a_revive(run.task_id)
        new = a_revive(run.task_id, order="99", requester=a_requester())
        await store.revive(new)
        await store.end([an_end(one(await store.acquire(HERE, 10)).run, FAILED)])
        assert await store.revive(old) == Revived(run.task_id, AGENT, 2)

    @pytest.mark.parametrize("step", ["running", "waiting", "ready"])
    async def test_revive_abandoned_fences_owner(self, store: CheckpointStore, step: str) -> None:
        run = await operating(store)
        await saved(store, run)
        if step != "running":
            pause = await paused(store, run=run)
            if step == "ready":
                await ready(store, pause)
        assert await store.revive(a_revive(run.task_id, abandoned=True)) == Revived(
            run.task_id, AGENT, 1
        )
        task = one(await store.acquire(HERE, 10))
        assert (task.run.generation, task.outcomes, task.checkpoint, task.request) == (
            0,
            (),
            1,
            b"request",
        )
        assert (await row(store, run.task_id))[1] == []
        assert await store.end([an_end(run)]) == [Fenced()]

    async def test_the_tokens_of_ended_attempts_are_kept(self, store: CheckpointStore) -> None:
        usage = usage_of(200)
        run = await operating(store)
        await saved(store, run)
        await store.end([replace(an_end(run, FAILED, reason="broken"), usage=usage)])
        await store.revive(a_revive(run.task_id))
        task = one(await store.acquire(HERE, 10))
        assert task.context == {"token_usage": usage.model_dump(mode="json")}
        await store.end([an_end(task.run, FAILED, reason="broken again")])
        await store.revive(a_revive(run.task_id))
        assert one(await store.acquire(HERE, 10)).context == task.context
        assert (await row(store, run.task_id))[0].usage == usage
        assert (await summary_of(store, run.task_id)).usage == usage

    async def test_a_completed_operation_keeps_its_tokens(self, store: CheckpointStore) -> None:
        run = await operating(store)
        await saved(store, run)
        await store.end([replace(an_end(run), usage=usage_of(300))])
        assert (await summary_of(store, run.task_id)).usage == usage_of(300)
        (listed,) = await store.operations()
        assert listed.usage == usage_of(300)

    async def test_a_cancel_keeps_the_tokens_of_the_last_pause(
        self, store: CheckpointStore
    ) -> None:
        """Records that the pause has counted are not counted again by the next attempt."""
        usage, counted = usage_of(200), '{"token_usage": {"total": {"input": 100}}}'
        run = await operating(store)
        records = [
            a_record("fetch", '"x"').model_copy(update={"context": counted}),
            a_record("weigh", '"x"').model_copy(update={"context": counted, "generation": 1}),
        ]
        await store.save(Save(run, a_checkpoint(run, 1, *records)))
        pause = a_pause(run=run, context={"token_usage": usage.model_dump(mode="json")})
        await store.pause([pause])
        await store.cancel([a_cancel(run.task_id)])
        contexts = [each.context for each in (await latest_of(store, run.task_id)).subtasks]
        assert contexts == [None, counted]
        assert (await latest_of(store, run.task_id)).token_usage == usage
        await store.revive(a_revive(run.task_id))
        task = one(await store.acquire(HERE, 10))
        assert task.context == {"token_usage": usage.model_dump(mode="json")}


def usage_of(tokens: int) -> TokenUsage:
    """The usage of one model response."""
    usage = TokenUsage()
    usage.record(Tokens(input=tokens), model="small")
    return usage
