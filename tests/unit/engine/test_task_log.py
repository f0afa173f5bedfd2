"""Agents whose pauses append to their task's log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from fake_peer import FakePeer
from meshpoint.agents.function import agent
from meshpoint.agents.peer import Peer
from meshpoint.engine.task_log import Notes, StepEntry, TaskLog
from meshpoint.errors import IncompatibleState
from meshpoint.model.calls import Call, Done, Paused
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.ids import AgentName, RunId, TaskId
from meshpoint.model.outcomes import Failed, Ok, Outcomes
from meshpoint.model.tasks import Requester, Resumable, Run, logged_format
from meshpoint.model.transitions import LogChange

from .agents import ScriptedAgent
from .mesh import Mesh

TEXT = "x" * 3000
CALLS = [Call("a", "peer", 1)]


class Historian:
    """Appends each answer to its log, replaces the log after `keeps` answers, and replies with it.

    Its state is the number of answers that it has replaced.
    """

    name = "historian"
    state_format = "historian/1"

    def __init__(self, pauses: int, keeps: int = 100) -> None:
        self._pauses, self._keeps = pauses, keeps

    async def start(self, ctx: TaskExecutionContext, request: Any) -> Paused:
        return Paused(CALLS, b"0")

    async def resume(self, ctx: TaskExecutionContext, state: bytes, outcomes: Outcomes) -> Any:
        raise AssertionError("the engine calls resume_with_log instead")

    async def resume_with_log(
        self, ctx: TaskExecutionContext, state: bytes, log: Sequence[bytes], outcomes: Outcomes
    ) -> Paused | Done[Any]:
        outcome = outcomes["a"]
        assert isinstance(outcome, Ok)
        answers = int(state) + len(log) + 1
        if answers == self._pauses:
            history = [entry.decode() for entry in log]
            return Done([state.decode(), *history, str(outcome.value)])
        if len(log) == self._keeps:
            return Paused(CALLS, str(answers).encode())
        return Paused(CALLS, state, append=str(outcome.value).encode())


async def answer_requests(peer: FakePeer, answers: Sequence[Any]) -> None:
    for number, answer in enumerate(answers, 1):
        await peer.respond(await peer.wait_for_request(number), answer)


@pytest.mark.parametrize("durable", [True, False])
async def test_an_agent_resumes_with_what_it_appended(
    mesh: Mesh, client: FakePeer, peer: FakePeer, durable: bool
) -> None:
    for _ in range(2):
        await mesh.replica(Historian(4), durable=durable)
    task_id = await client.ask("historian", 1)
    await answer_requests(peer, range(4))
    reply = await client.reply(task_id)
    assert isinstance(reply, Ok)
    assert reply.value == ["0", "0", "1", "2", "3"]


async def test_a_pause_without_append_ends_the_log(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    await mesh.replica(Historian(6, keeps=2))
    task_id = await client.ask("historian", 1)
    await answer_requests(peer, range(6))
    reply = await client.reply(task_id)
    assert isinstance(reply, Ok)
    assert reply.value == ["3", "3", "4", "5"]


async def test_an_agent_that_reads_no_logs_leaves_the_task_to_others(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    async def resume(ctx: TaskExecutionContext, state: bytes, outcomes: Outcomes) -> Any:
        return Done("without its history")

    new = await mesh.replica(Historian(2))
    task_id = await client.ask("historian", 1)
    await answer_requests(peer, [1])
    await peer.wait_until(lambda: len(peer.requests) == 2)
    await new.crash()
    other = ScriptedAgent("historian", Historian(2).start, resume, state_format="historian/1")
    replica = await mesh.replica(other)
    await peer.respond(peer.requests[-1], 2)
    await mesh.idle()
    assert client.replies(task_id) == []
    await replica.drain()
    await mesh.replica(Historian(2))
    await mesh.advance(10)
    reply = await client.reply(task_id)
    assert isinstance(reply, Ok)
    assert reply.value == ["0", "1", "2"]


async def test_an_agent_that_reads_no_logs_must_not_append(
    mesh: Mesh, client: FakePeer, peer: FakePeer
) -> None:
    async def start(ctx: TaskExecutionContext, request: Any) -> Paused:
        return Paused(CALLS, b"", append=b"lost")

    await mesh.replica(ScriptedAgent("forgetful", start))
    reply = await client.reply(await client.ask("forgetful", 1))
    assert isinstance(reply, Failed)
    assert "resume_with_log" in reply.message
    assert peer.requests == []


@agent("editor")
async def editor(ctx: TaskExecutionContext, chapters: int) -> int:
    writer = Peer("peer", int, str)
    return sum([len(await writer(chapter)) for chapter in range(chapters)])


@pytest.mark.parametrize("durable", [True, False])
async def test_a_function_agent_replays_its_log(
    mesh: Mesh, client: FakePeer, peer: FakePeer, durable: bool
) -> None:
    for _ in range(2):
        await mesh.replica(editor, durable=durable)
    task_id = await client.ask("editor", 6)
    await answer_requests(peer, [TEXT + "y" * number for number in range(6)])
    reply = await client.reply(task_id)
    assert isinstance(reply, Ok)
    assert reply.value == 6 * len(TEXT) + 15
    assert [request.correlation_id for request in peer.requests] == list(
        dict.fromkeys(request.correlation_id for request in peer.requests)
    )


def a_task(
    *log: bytes, generation: int = 1, state_format: str = logged_format("travel/1")
) -> Resumable:
    run = Run(TaskId("t"), AgentName("travel"), RunId("r"), fence=3, generation=generation)
    return Resumable(run, Requester(), {}, b"state", state_format, (), None, 1, log=log, log_seq=7)


APPENDING = Paused(CALLS, b"state", append=b"new")
STANDING_ALONE = Paused(CALLS, b"other")
NOTED = Notes(b"noted")
NEW_LOG = TaskLog()


def test_entries_continue_the_state() -> None:
    log = TaskLog.of(a_task(b"\x00a", b"\x01n", b"\x00"))
    assert ([*log.agent], log.notes) == ([b"a", b""], (b"n",))
    appended = LogChange((b"\x00new",), after=7, keeps_state=True, kept_bytes=5)
    assert log.change(APPENDING) == appended
    assert log.change(APPENDING, NOTED) == replace(appended, entries=(b"\x00new", b"\x01noted"))
    changed = replace(APPENDING, state=b"changed")
    assert log.change(changed) == replace(appended, keeps_state=False)


def test_contents_are_entries_without_their_kind() -> None:
    contents = TaskLog.of(a_task(b"\x00a", b"\x01n", b"\x00bc", b"\x00")).agent
    assert ([*contents], contents[-2], [*contents[:2]]) == (
        [b"a", b"bc", b""],
        b"bc",
        [b"a", b"bc"],
    )
    with pytest.raises(IndexError):
        contents[3]


def test_a_task_without_a_log_changes_nothing() -> None:
    assert NEW_LOG.change(STANDING_ALONE) is None
    assert NEW_LOG.change(APPENDING, NOTED) == LogChange((b"\x00new", b"\x01noted"))
    noted_only = TaskLog.of(a_task(b"\x01n"))
    assert noted_only.change(STANDING_ALONE) is None
    assert not noted_only.is_empty_after(None)
    assert NEW_LOG.is_empty_after(None)


@pytest.mark.parametrize("generation", [0, 1])
def test_ended_entries_are_deleted_if_that_halves_the_log(generation: int) -> None:
    """The state stands alone, or the task starts again from its request."""
    log = TaskLog.of(a_task(b"\x00" + b"a" * 100, b"\x01n", generation=generation))
    assert log.notes == (b"n",)
    change = log.change(STANDING_ALONE, NOTED)
    assert change == LogChange((b"\x01n", b"\x01noted"), after=7, replaces=True)
    assert not log.is_empty_after(change)
    only_agent = TaskLog.of(a_task(b"\x00a", generation=generation))
    change = only_agent.change(STANDING_ALONE)
    assert change == LogChange(after=7, replaces=True)
    assert only_agent.is_empty_after(change)


@pytest.mark.parametrize("generation", [0, 1])
def test_ended_entries_are_marked_otherwise(generation: int) -> None:
    log = TaskLog.of(a_task(b"\x00a", b"\x01" + b"n" * 100, generation=generation))
    change = log.change(STANDING_ALONE)
    assert change == LogChange((b"\x02",), after=7, kept_bytes=103)
    again = TaskLog.of(a_task(b"\x00a", b"\x01n", b"\x02", b"\x00b"))
    assert ([*again.agent], again.notes) == ([b"b"], (b"n",))


def test_notes_may_replace_earlier_ones() -> None:
    log = TaskLog.of(a_task(b"\x00a", b"\x01n"))
    change = log.change(APPENDING, Notes(b"all", replace=True))
    assert change == LogChange((b"\x00new", b"\x03all"), after=7, keeps_state=True, kept_bytes=4)
    again = TaskLog.of(a_task(b"\x00a", b"\x01n", b"\x03all", b"\x01more"))
    assert ([*again.agent], again.notes) == ([b"a"], (b"all", b"more"))
    only_notes = TaskLog.of(a_task(b"\x01n"))
    change = only_notes.change(STANDING_ALONE, Notes(b"all", replace=True))
    assert change == LogChange((b"\x03all",), after=7, replaces=True)


def test_a_log_that_a_release_without_logs_left_behind_is_replaced() -> None:
    """It has paused the task since, so the state stands alone."""
    log = TaskLog.of(a_task(b"\x00a", b"\x01n", b"\x99", state_format="travel/1"))
    assert ([*log.agent], log.notes) == ([], ())
    assert log.change(APPENDING) == LogChange(
        (b"\x00new",), after=7, replaces=True, keeps_state=True
    )
    assert log.change(STANDING_ALONE) == LogChange(after=7, replaces=True)
    assert TaskLog.of(a_task(state_format="travel/1")).change(STANDING_ALONE) is None


def test_notes_do_not_count_after_an_attempt_of_a_release_without_logs() -> None:
    """It has resumed the task from the start, and its checkpoints have all notes."""
    entries = (b"\x00a", b"\x01n", a_step(b"old", 0), a_step(b"own", 2))
    task = replace(a_task(*entries, generation=0, state_format="travel/1"), retry_count=2)
    log = TaskLog.of(task)
    assert ([*log.agent], log.notes, records(log)) == ([], (), [b"own"])
    steps = (a_step(b"own", 2), a_step(b"new", 2))
    appended = log.append([StepEntry(2, b"new")])
    assert appended == LogChange(steps, after=7, replaces=True)
    noted = (b"\x00new", b"\x01noted")
    assert log.change(APPENDING, NOTED) == LogChange(noted, after=7, replaces=True)


@pytest.mark.parametrize("entry", [b"", b"\x09new"])
def test_an_unknown_entry_is_incompatible(entry: bytes) -> None:
    with pytest.raises(IncompatibleState):
        TaskLog.of(a_task(b"\x00a", entry))


def a_step(record: bytes, attempt: int = 0) -> bytes:
    """The entry of a step record."""
    return StepEntry(attempt, record).entry


def records(log: TaskLog) -> list[bytes]:
    """The step records that count."""
    return [each.record for each in log.steps]


def after(log: TaskLog, change: LogChange, *before: bytes, generation: int = 1) -> TaskLog:
    """The log as the next run reads it, after `change` of these entries."""
    entries = (*(() if change.replaces else before), *change.entries)
    return TaskLog.of(a_task(*entries, generation=generation))


def test_step_records_are_appended() -> None:
    log = TaskLog.of(a_task(b"\x00a", a_step(b"1")))
    change = log.append([StepEntry(0, b"2"), StepEntry(0, b"")])
    assert change == LogChange((a_step(b"2"), a_step(b"")), after=7, kept_bytes=8)
    changed = log.with_steps(change, [StepEntry(0, b"2"), StepEntry(0, b"")])
    assert (records(changed), changed.seq) == ([b"1", b"2", b""], 9)
    assert changed.size == sum(map(len, (b"\x00a", a_step(b"1"), a_step(b"2"), a_step(b""))))
    assert [*changed.agent] == [b"a"]


@pytest.mark.parametrize("keeps", [True, False])
def test_a_pause_keeps_or_ends_step_records(keeps: bool) -> None:
    entries = (b"\x00a", a_step(b"1"), b"\x00" + bytes(100))
    log = TaskLog.of(a_task(*entries))
    change = log.change(APPENDING, keeps_steps=keeps)
    assert change is not None
    assert not change.replaces
    changed = after(log, change, *entries)
    assert records(changed) == ([b"1"] if keeps else [])
    assert [*changed.agent] == [b"a", bytes(100), b"new"]


def test_a_pause_deletes_a_log_of_step_records_only() -> None:
    log = TaskLog.of(a_task(a_step(b"1")))
    assert log.change(STANDING_ALONE) == LogChange(after=7, replaces=True)
    assert log.change(STANDING_ALONE, keeps_steps=True) is None
    assert log.is_empty_after(log.change(STANDING_ALONE))
    assert not log.is_empty_after(None)


def test_compaction_keeps_the_records_of_a_function() -> None:
    log = TaskLog.of(a_task(b"\x00" + bytes(100), a_step(b"1")))
    change = log.change(STANDING_ALONE, keeps_steps=True)
    assert change == LogChange((a_step(b"1"),), after=7, replaces=True)


def test_an_attempt_from_the_beginning_ends_earlier_records() -> None:
    entries = (a_step(b"old", 0), b"\x01" + bytes(100), a_step(b"own", 1))
    task = replace(a_task(*entries, generation=0), retry_count=1)
    log = TaskLog.of(task)
    assert (records(log), log.has_ended_steps) == ([b"own"], True)
    change = log.append([StepEntry(1, b"new")])
    assert records(after(log, change, *entries)) == [b"own", b"new"]
    paused = log.change(STANDING_ALONE, keeps_steps=True)
    assert paused is not None
    assert records(after(log, paused, *entries)) == [b"own"]
    assert not log.with_steps(change, [StepEntry(1, b"new")]).has_ended_steps


def test_a_run_takes_its_records_back() -> None:
    entries = (a_step(b"1"), a_step(b"2"), a_step(b"3"))
    log = TaskLog.of(a_task(*entries))
    assert records(after(log, log.drop_steps(2), *entries)) == [b"1"]
    assert records(after(log, log.drop_steps(3), *entries)) == []


def test_step_records_replace_a_stale_log() -> None:
    log = TaskLog.of(a_task(b"\x00a", b"\x01n", state_format="travel/1"))
    change = log.append([StepEntry(0, b"1")])
    assert change == LogChange((a_step(b"1"),), after=7, replaces=True)
    changed = log.with_steps(change, [StepEntry(0, b"1")])
    assert (changed.is_stale, changed.size, changed.state) == (False, 6, b"state")
