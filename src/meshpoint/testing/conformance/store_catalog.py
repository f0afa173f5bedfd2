"""Listing and showing tasks: filters, pages, and what is known about each task."""

from __future__ import annotations

from dataclasses import replace

from meshpoint.model.calls import ALL, AT_LEAST, FIRST
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.tasks import ListPosition, TaskFilter, TaskState, logged_format
from meshpoint.model.transitions import LogChange
from meshpoint.model.usage import TokenUsage
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.testing.clock import FakeClock
from meshpoint.testing.conformance.build import (
    AGENT,
    FAILED,
    FORMAT,
    HERE,
    HOUR,
    PEER,
    SECOND,
    TIMEOUT,
    a_call,
    a_cancel,
    a_claim,
    a_pause,
    a_release,
    a_replica,
    a_requester,
    an_end,
    begun,
    ended,
    error,
    operating,
    paused,
    resumed,
    row,
    write_end,
    write_pause,
)

HOTELS = AgentName("hotels")


class CatalogSuite:
    """Conformance tests for `Catalog`."""

    async def test_tasks_are_filtered(self, store: CheckpointStore, clock: FakeClock) -> None:
        """Listings contain exactly the tasks that match."""
        start = clock.now()
        operation = await operating(store)
        clock.advance(SECOND)
        for_ada = await paused(
            store, context={"a2a_context": {"user_id": "ada", "session_id": "s-1"}}
        )
        clock.advance(SECOND)
        from_shop = await paused(store, requester=a_requester(app_id="shop", parent_task_id=None))
        clock.advance(SECOND)
        for_hotels = await paused(store, "a", a_call("b", peer=HOTELS))
        all_ids = [
            for_hotels.run.task_id,
            from_shop.run.task_id,
            for_ada.run.task_id,
            operation.task_id,
        ]
        for where, expected in (
            (TaskFilter(subject="ACME"), [operation.task_id]),
            (TaskFilter(user="ada"), [for_ada.run.task_id]),
            (TaskFilter(requester="shop"), [from_shop.run.task_id]),
            (TaskFilter(waiting_for=HOTELS), [for_hotels.run.task_id]),
            (TaskFilter(waiting_for=PEER), all_ids[:3]),
            (TaskFilter(since=start + 2 * SECOND), all_ids[:2]),
            (TaskFilter(until=start + 2 * SECOND), all_ids[2:]),
            (TaskFilter(since=start + SECOND, until=start + 2 * SECOND), all_ids[2:3]),
            (TaskFilter(subject="ACME", user="ada"), []),
            (TaskFilter(), all_ids),
        ):
            found = [task.task_id for task in await store.tasks(where=where)]
            assert found == expected, where
            assert [task.task_id for task in await store.tasks(agent=AGENT, where=where)] == found
        waiting = await store.tasks(states=[TaskState.WAITING], where=TaskFilter(requester="shop"))
        assert [task.task_id for task in waiting] == [from_shop.run.task_id]

    async def test_a_call_with_an_outcome_is_not_waited_for(self, store: CheckpointStore) -> None:
        pause = await paused(store, "a", a_call("b", peer=HOTELS))
        assert (await row(store, pause.run.task_id))[0].waiting_for == (PEER, HOTELS)
        await store.claim([a_claim(pause, "a")], HERE, 1)
        assert (await row(store, pause.run.task_id))[0].waiting_for == (HOTELS,)
        assert await store.tasks(where=TaskFilter(waiting_for=PEER)) == []

    async def test_a_task_says_how_many_results_its_join_needs(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        for join, needed in ((ALL, None), (FIRST, 1), (AT_LEAST(2), 2)):
            pause = await paused(store, "a", "b", "c", join=join)
            assert (await row(store, pause.run.task_id))[0].needed == needed
            (listed,) = await store.tasks(limit=1)
            assert (listed.task_id, listed.needed) == (pause.run.task_id, needed)
            await write_end(
                store, an_end((await resumed(store, pause, *"abc"[: needed or 3])).run)
            )
            assert (await row(store, pause.run.task_id))[0].needed is None
            clock.advance(SECOND)

    async def test_tasks_are_listed_in_pages(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        """Tasks of the same time are neither repeated nor left out."""
        for number in range(9):
            await paused(store)
            if number % 3 == 0:
                clock.advance(SECOND)
        everything = [task.task_id for task in await store.tasks()]
        pages: list[TaskId] = []
        position: ListPosition | None = None
        while page := await store.tasks(limit=2, after=position):
            pages += [task.task_id for task in page]
            position = page[-1].position
        assert pages == everything

    async def test_a_page_begins_where_the_last_task_was_listed(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        others = [await _paused_later(store, clock) for _ in range(2)][::-1]
        pause = await paused(store)
        (first,) = await store.tasks(limit=1)
        clock.advance(SECOND)
        await write_pause(store, a_pause("b", run=(await resumed(store, pause)).run))
        (moved,) = await store.tasks(limit=1)
        assert first.task_id == moved.task_id == pause.run.task_id
        assert moved.position != first.position
        for listed in (first, moved):
            found = await store.tasks(after=listed.position)
            assert [task.task_id for task in found] == others

    async def test_pages_are_filtered(self, store: CheckpointStore, clock: FakeClock) -> None:
        pauses = [await _paused_later(store, clock) for _ in range(3)]
        (last, *_) = await store.tasks(limit=1)
        shown = await store.tasks(
            states=[TaskState.WAITING],
            where=TaskFilter(requester="client", waiting_for=PEER),
            after=last.position,
        )
        assert [task.task_id for task in shown] == pauses[-2::-1]

    async def test_what_is_known_of_a_waiting_task(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        deadline = clock.now() + HOUR
        usage = TokenUsage.model_validate({"total": {"input": 7}})
        pause = a_pause(
            requester=a_requester(deadline=deadline),
            context={
                "a2a_context": {"user_id": "ada", "session_id": "s-1"},
                "token_usage": usage.model_dump(mode="json"),
            },
        )
        await store.pause([pause])
        task, (call,) = await row(store, pause.run.task_id)
        assert (task.requester, task.parent_task_id) == ("client", "parent")
        assert (task.user_id, task.session_id) == ("ada", "s-1")
        assert (task.deadline, task.ended_at, task.state_format) == (deadline, None, FORMAT)
        assert (task.usage, task.waiting_for) == (usage, (PEER,))
        assert (call.since, call.sends) == (clock.now(), 1)
        assert call.absolute_deadline == clock.now() + TIMEOUT
        assert await store.stored_request(task.task_id) == b"request"

    async def test_a_failed_call_has_its_message(self, store: CheckpointStore) -> None:
        pause = await paused(store, "a", "b")
        await store.claim([a_claim(pause, "a", error("no seat"))], HERE, 1)
        _, calls = await row(store, pause.run.task_id)
        assert [(call.outcome, call.message) for call in calls] == [
            ("error", "no seat"),
            (None, None),
        ]

    async def test_what_is_known_of_an_ended_task(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        run = await ended(store)
        task, _ = await row(store, run.task_id)
        assert (task.ended_at, task.user_id, task.usage) == (clock.now(), None, None)
        assert await store.stored_request(run.task_id) is None

    async def test_the_subject_outlives_the_operation(self, store: CheckpointStore) -> None:
        run = await operating(store)
        await store.end([an_end(run, FAILED, reason="no answer")])
        assert [task.subject for task in await store.tasks(states=[FAILED])] == ["ACME"]
        assert (await row(store, run.task_id))[0].subject == "ACME"

    async def test_a_parked_task_says_since_when(
        self, store: CheckpointStore, clock: FakeClock
    ) -> None:
        since = clock.now()
        task = await resumed(store)
        await store.release([a_release(task.run, parked="call 1")])
        listed, _ = await row(store, task.run.task_id)
        assert (listed.state, listed.incompatible_since) == (TaskState.PARKED, since)

    async def test_an_early_cancel_is_listed(self, store: CheckpointStore) -> None:
        await store.cancel([a_cancel(TaskId("to come"), sender="client")])
        (task,) = await store.tasks()
        assert (task.state, task.requester) == (TaskState.CANCELLED, "client")

    async def test_a_running_task_has_its_request(self, store: CheckpointStore) -> None:
        run = await begun(store)
        assert await store.stored_request(run.task_id) is not None
        assert await store.stored_request(TaskId("nobody")) is None

    async def test_a_waiting_task_is_read_with_its_calls(self, store: CheckpointStore) -> None:
        pause = await paused(store, "a", "b")
        await store.claim([a_claim(pause, "b", error("no seat"))], HERE, 1)
        stored = await store.stored_task(pause.run.task_id)
        assert stored is not None
        assert (stored.state, stored.resumable.run.generation) == (TaskState.WAITING, 1)
        assert (stored.resumable.state, stored.resumable.state_format) == (b"state", FORMAT)
        assert (stored.resumable.request, stored.resumable.outcomes) == (b"request", ())
        assert [(call.call_id, call.peer, call.outcome) for call in stored.calls] == [
            ("a", PEER, None),
            ("b", PEER, error("no seat")),
        ]
        assert [call.body for call in stored.calls] == [call.body for call in pause.calls]

    async def test_a_task_is_read_with_its_log_and_without_later_entries(
        self, store: CheckpointStore
    ) -> None:
        pause = replace(
            a_pause(state_format=logged_format(FORMAT)), log=LogChange((b"one", b"two"))
        )
        await write_pause(store, pause)
        stored = await store.stored_task(pause.run.task_id)
        assert stored is not None
        assert (list(stored.resumable.log), stored.resumable.log_seq) == ([b"one", b"two"], 2)
        assert await resumed(store, pause, replica=a_replica("R", formats=[pause.state_format]))
        running = await store.stored_task(pause.run.task_id)
        assert running is not None
        assert (running.state, running.resumable.log) == (TaskState.RUNNING, stored.resumable.log)

    async def test_only_tasks_that_have_not_ended_are_read(self, store: CheckpointStore) -> None:
        run = await ended(store)
        assert await store.stored_task(run.task_id) is None
        assert await store.stored_task(TaskId("nobody")) is None
        begun_run = await begun(store)
        stored = await store.stored_task(begun_run.task_id)
        assert stored is not None
        assert (stored.state, stored.calls) == (TaskState.RUNNING, ())
        assert stored.resumable.request is not None


async def _paused_later(store: CheckpointStore, clock: FakeClock) -> TaskId:
    pause = await paused(store)
    clock.advance(SECOND)
    return pause.run.task_id
