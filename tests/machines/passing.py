"""Checks of the sweeper's methods: work that becomes due by time, and the outbox."""

from __future__ import annotations

from collections.abc import Sequence

from machines.ledger import Ledger
from machines.story import KEEP_ALIVES_PER_TIMEOUT, Sending, Story
from meshpoint.model.checkpoint import (
    SUSPECT_FROM,
    AllArrived,
    CancelNotice,
    Dispatch,
    Expired,
    KeepAlive,
    MadeReady,
    Progress,
    ProgressNoted,
    Replica,
    Reply,
    Resumable,
    Run,
    Send,
    StillWaiting,
    TaskState,
)
from meshpoint.model.ids import TaskId
from meshpoint.model.outcomes import FailureKind
from meshpoint.testing.conformance.build import AGENT


def expired(ledger: Ledger, replica: Replica, slots: int, results: Sequence[Expired]) -> None:
    """Check that everything past its deadline was closed once and that its tasks continue."""
    late = {story.task_id: story.late(ledger.now) for story in ledger.stories.values()}
    due = {task_id: calls for task_id, calls in late.items() if calls}
    assert sorted(result.task_id for result in results) == sorted(due), "expire missed a task, or ended one too early"
    taken = sum(isinstance(result.then, AllArrived) for result in results)
    assert taken <= slots, f"{taken} tasks were acquired with {slots} slots"
    for result in results:
        story, calls = ledger.stories[result.task_id], due[result.task_id]
        for call in calls:
            call.close(FailureKind.TIMEOUT, ledger.now)
        assert result.timed_out == tuple(call.id for call in calls)
        assert result.cancels == tuple(story.notice(call) for call in calls)
        if not story.met:
            assert result.then == StillWaiting(story.task_id, calls[-1].id)
        else:
            refused = isinstance(result.then, MadeReady) and story.readable_by(replica)
            assert not refused or taken >= slots, "a task became ready although a slot was free"
            ledger.gone_on(story, None, replica, result.then)


def runnable(ledger: Ledger, replica: Replica, state: TaskState) -> list[Story]:
    """Ready tasks, or running ones with an expired lease, that `replica` may take: oldest first."""
    due = [
        (story.due_at, story)
        for story in ledger.in_state(state)
        if story.readable_by(replica) and story.due_at is not None and story.due_at <= ledger.now
    ]
    return [story for _, story in sorted(due, key=lambda pair: pair[0])]


def untied(due: Sequence[Story], limit: int) -> int:
    """`limit`, raised to the end of a tie: among equally old tasks a store may take any."""
    while 0 < limit < len(due) and due[limit - 1].due_at == due[limit].due_at:
        limit += 1
    return limit


def takeable(ledger: Ledger, replica: Replica, suspects: int) -> list[Story]:
    """Ready tasks that `replica` may acquire, with all suspects or none."""
    due = runnable(ledger, replica, TaskState.READY)
    return [story for story in due if suspects or story.rescues < SUSPECT_FROM]


def taken(ledger: Ledger, replica: Replica, limit: int, suspects: int, tasks: Sequence[Resumable]) -> None:
    """Check that the oldest ready tasks were acquired, up to `limit`."""
    _owned(ledger, replica, takeable(ledger, replica, suspects)[:limit], tasks)


def rescued(ledger: Ledger, replica: Replica, limit: int, suspects: int, tasks: Sequence[Resumable]) -> None:
    """Check that the tasks with the oldest expired leases were rescued, up to `limit`.

    A task that must run isolated but cannot becomes ready.
    """
    due = runnable(ledger, replica, TaskState.RUNNING)[:limit]
    for story in due:
        story.rescues += 1
        story.attempt += not replica.isolates
    mine = [story for story in due if suspects or story.rescues < SUSPECT_FROM]
    _owned(ledger, replica, mine, tasks)
    for story in due:
        if story not in mine:
            story.make_ready(ledger.now, None)


def _owned(ledger: Ledger, replica: Replica, due: Sequence[Story], tasks: Sequence[Resumable]) -> None:
    assert sorted(task.run.task_id for task in tasks) == sorted(story.task_id for story in due)
    for task in tasks:
        ledger.resumed(ledger.stories[task.run.task_id], task, replica)


def renewed(ledger: Ledger, runs: Sequence[Run], replica: Replica, lost: Sequence[Run]) -> None:
    """Check that exactly the owning runs got their leases extended."""
    for run in runs:
        story = ledger.stories.get(run.task_id)
        if story is not None and story.owned_by(run):
            assert run not in lost, f"{run} owns its task and lost its lease"
            story.due_at = ledger.now + replica.lease
        else:
            assert run in lost, f"{run} does not own its task and was renewed"


def progressed(ledger: Ledger, updates: Sequence[Progress], noted: Sequence[ProgressNoted | None]) -> None:
    """Check that idle deadlines moved, but never past absolute ones."""
    for update, note in zip(updates, noted, strict=True):
        story = ledger.stories.get(update.task_id)
        call = next((call for call in story.pending if call.id == update.sub_task_id), None) if story else None
        if story is None or call is None or call.planned.peer != update.sender:
            assert note is None
            continue
        assert note == ProgressNoted(story.task_id, story.requester)
        idle = call.planned.idle_timeout
        if idle is not None:
            extended = min(ledger.now + idle, call.deadline)
            call.due_at = extended if extended - call.due_at >= idle / 10 else call.due_at


def kept_alive(ledger: Ledger, notes: Sequence[KeepAlive]) -> None:
    """Check that each requester that is due a keep-alive gets one."""
    expected = []
    for story in ledger.in_state(TaskState.WAITING, TaskState.READY):
        idle = story.requester.idle_timeout
        if idle is not None and story.keep_alive_at is not None and story.keep_alive_at <= ledger.now:
            expected.append(story.task_id)
            story.keep_alive_at = ledger.now + idle / KEEP_ALIVES_PER_TIMEOUT
    assert sorted(note.task_id for note in notes) == sorted(expected)


def purged(ledger: Ledger, count: int) -> None:
    """Check that tombstones are purged once expired and with nothing left to send."""
    over = [story for story in ledger.stories.values() if _purgeable(story, ledger)]
    assert count == len(over), f"{count} purged, not {[story.task_id for story in over]}"
    for story in over:
        ledger.gone[story.task_id] = ledger.stories.pop(story.task_id)


def _purgeable(story: Story, ledger: Ledger) -> bool:
    over = story.expires_at is not None and story.expires_at <= ledger.now
    return over and story.reply_sending is None and not story.rows


def offered(ledger: Ledger, sends: Sequence[Send]) -> None:
    """Check that exactly the due sends were offered, and lease them."""
    due: list[tuple[str, TaskId]] = []
    for story in ledger.stories.values():
        for call in story.rows:
            worth_sending = call.outcome is None and not call.dispatched and call.due_at > ledger.now
            if (worth_sending or call.cancelling) and _offer(call.sending, ledger):
                due.append(("CancelNotice" if call.cancelling else "Dispatch", call.id))
        if story.reply_sending is not None and _offer(story.reply_sending, ledger):
            due.append(("Reply", story.task_id))
    assert sorted(_named(send) for send in sends) == sorted(due)
    for send in sends:
        if isinstance(send, Reply):
            assert send == ledger.stories[send.task_id].reply_at(ledger.now)


def _offer(sending: Sending, ledger: Ledger) -> bool:
    if sending.due_at > ledger.now:
        return False
    sending.offer(ledger.now)
    return True


def _named(send: Send) -> tuple[str, TaskId]:
    assert send.agent == AGENT
    return type(send).__name__, send.task_id if isinstance(send, Reply) else send.sub_task_id


def marked(ledger: Ledger, sends: Sequence[Send]) -> None:
    """Record that the broker has confirmed these sends."""
    for send in sends:
        story = ledger.stories.get(send.task_id)
        if story is None:
            continue
        match send:
            case Reply(fence=fence):
                story.reply_sending = None if fence == story.fence else story.reply_sending
            case Dispatch() | CancelNotice():
                call = next((call for call in story.rows if call.id == send.sub_task_id), None)
                if call is not None and isinstance(send, CancelNotice):
                    call.cancelling = False
                elif call is not None and call.outcome is None:
                    call.dispatched = True
