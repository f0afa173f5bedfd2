"""Which memory writes are already done when code runs again."""

from __future__ import annotations

import pytest

from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.memory import Answer, Command
from meshpoint.model.subtasks import AgentCheckpoint
from meshpoint.working_memory.snapshots import MemoryRef
from meshpoint.working_memory.write_log import (
    MemoryWriteLog,
    WritePosition,
    decode_writes,
    encode_writes,
)

INCR = [Command("INCRBY", "n", (b"1",))]
OTHER = [
    [Command("INCRBY", "n", (b"2",))],
    [Command("INCRBY", "m", (b"1",))],
    [Command("DECRBY", "n", (b"1",))],
    [*INCR, *INCR],
    [Command("INCRBY", "n", (b"1", b""))],
    [Command("INCRBY", "n1", ())],
]


def reload_writes(writes: MemoryWriteLog, seq: int = 1) -> MemoryWriteLog:
    """The log as the next segment reads it, via JSON."""
    checkpoint = AgentCheckpoint(
        operation_id=TaskId("t"),
        agent=AgentName("a"),
        seq=seq,
        memory_writes=writes.for_checkpoint(seq),
    )
    return MemoryWriteLog(
        AgentCheckpoint.model_validate_json(checkpoint.model_dump_json()).memory_writes
    )


def test_writes_of_this_run_are_not_replayed_in_it() -> None:
    writes = MemoryWriteLog()
    assert writes.recorded_answers((0, 0, ""), INCR) is None
    writes.record((0, 0, ""), INCR, [1])
    assert writes.recorded_answers((0, 0, ""), INCR) is None


def test_the_next_run_gets_the_recorded_answers_as_often() -> None:
    writes = MemoryWriteLog()
    writes.record((0, 0, ""), INCR, [1])
    writes.record((0, 0, ""), INCR, [2])
    writes = reload_writes(writes)
    assert [writes.recorded_answers((0, 0, ""), INCR) for _ in range(3)] == [[1], [2], None]
    writes = reload_writes(writes)
    assert [writes.recorded_answers((0, 0, ""), INCR) for _ in range(3)] == [[1], [2], None]


@pytest.mark.parametrize(
    "place", [(1, 0, ""), (0, 1, ""), (1, 1, ""), (0, "s", ""), (0, 0, "read")]
)
def test_a_write_at_another_position_is_a_different_write(place: WritePosition) -> None:
    writes = MemoryWriteLog()
    writes.record((0, 0, ""), INCR, [1])
    assert reload_writes(writes).recorded_answers(place, INCR) is None


@pytest.mark.parametrize("commands", OTHER)
def test_other_commands_are_a_different_write(commands: list[Command]) -> None:
    writes = MemoryWriteLog()
    writes.record((0, 0, ""), INCR, [1])
    assert reload_writes(writes).recorded_answers((0, 0, ""), commands) is None


@pytest.mark.parametrize(
    "answers", [[b"OK"], [None], [0], [b"\x00\xff1.5"], [b"none", 0], [b"OK", 1]]
)
def test_answers_are_recorded_exactly(answers: list[Answer]) -> None:
    commands = [Command("LPOP", f"k{index}") for index in range(len(answers))]
    writes = MemoryWriteLog()
    writes.record((0, 0, ""), commands, answers)
    assert reload_writes(writes).recorded_answers((0, 0, ""), commands) == answers


def test_each_write_names_the_first_checkpoint_that_contains_it() -> None:
    writes = MemoryWriteLog()
    writes.record((0, 0, ""), INCR, [1])
    writes.for_checkpoint(4)
    writes.record((1, 0, ""), INCR, [2])
    assert [write.seq for write in writes.for_checkpoint(9)] == [4, 9]


def test_writes_missing_from_an_earlier_memory_are_executed_again() -> None:
    writes = MemoryWriteLog()
    writes.record((0, 0, ""), INCR, [1])
    writes.for_checkpoint(4)
    writes.record((0, 0, ""), INCR, [2])
    writes.for_checkpoint(5)
    writes.discard_after(4)
    assert [writes.recorded_answers((0, 0, ""), INCR) for _ in range(2)] == [[1], None]
    writes.discard_after(0)
    assert writes.for_checkpoint(6) == ()


def pause_writes(writes: MemoryWriteLog, seq: int, *finished: str) -> bytes:
    """What a pause with checkpoint `seq` adds to the task's log."""
    new = writes.for_checkpoint(seq, finished)
    return encode_writes(new, writes.finished_in_log)


def test_writes_in_the_log_are_recognized_and_not_repeated_in_checkpoints() -> None:
    writes = MemoryWriteLog()
    writes.record((0, 0, ""), INCR, [1])
    entry = pause_writes(writes, 1)
    writes = MemoryWriteLog((), decode_writes([entry]))
    assert writes.recorded_answers((0, 0, ""), INCR) == [1]
    writes.record((1, 0, ""), INCR, [2])
    assert [write.seq for write in writes.for_checkpoint(2)] == [2]
    both = decode_writes([entry, pause_writes(writes, 2)])
    assert [(write.calls, write.seq, write.answers) for write in both] == [
        (0, 1, [1]),
        (1, 2, [2]),
    ]


@pytest.mark.parametrize(
    "answers", [[b"OK"], [None], [0], [b"\x00\xff1.5"], [b"none", 0], [b"OK", 1]]
)
def test_the_log_keeps_answers_exactly(answers: list[Answer]) -> None:
    commands = [Command("LPOP", f"k{index}") for index in range(len(answers))]
    writes = MemoryWriteLog()
    writes.record((0, "subtask", "read"), commands, answers)
    writes = MemoryWriteLog((), decode_writes([pause_writes(writes, 1)]))
    assert writes.recorded_answers((0, "subtask", "read"), commands) == answers


def test_a_finished_subtask_repeats_its_logged_writes_if_it_runs_again() -> None:
    writes = MemoryWriteLog()
    writes.record((0, "paused", ""), INCR, [1])
    writes.record((0, 0, ""), INCR, [2])
    first = pause_writes(writes, 1)
    finished = MemoryWriteLog((), decode_writes([first]), finished_subtasks=["paused"])
    assert finished.recorded_answers((0, "paused", ""), INCR) is None
    assert finished.recorded_answers((0, 0, ""), INCR) == [2]
    second = pause_writes(finished, 2)
    assert [write.subtasks for write in decode_writes([first, second])] == [0]


def test_a_subtask_that_finishes_later_is_named_in_the_log_once() -> None:
    writes = MemoryWriteLog()
    writes.record((0, "paused", ""), INCR, [1])
    first = pause_writes(writes, 1)
    writes = MemoryWriteLog((), decode_writes([first]))
    assert writes.for_checkpoint(2, ["paused", "other"]) == ()
    assert writes.finished_in_log == {"paused"}
    second = pause_writes(writes, 3, "paused", "other")
    assert MemoryWriteLog((), decode_writes([first, second])).finished_in_log == set()


def test_lost_writes_make_checkpoints_replace_the_log() -> None:
    writes = MemoryWriteLog()
    entries: list[bytes] = []
    for seq in (1, 2, 3):
        writes.record((0, 0, ""), INCR, [seq])
        entries.append(pause_writes(writes, seq))
        writes = MemoryWriteLog((), decode_writes(entries))
    writes.discard_after(3)
    assert not writes.replaces_log
    writes.discard_after(2)
    assert writes.replaces_log
    writes.record((0, 0, ""), INCR, [5])
    assert [write.answers for write in writes.for_checkpoint(4)] == [[1], [2], [5]]


def test_a_memory_hands_its_writes_to_the_log_at_a_pause() -> None:
    writes = MemoryWriteLog()
    writes.record((0, 0, ""), INCR, [1])
    ref = MemoryRef("digest", writes=writes.for_checkpoint(1))
    stored, entry = ref.split_log()
    assert (stored, stored.split_log()) == (MemoryRef("digest"), (stored, None))
    assert decode_writes([entry or b""]) == list(ref.writes)
    emptied = MemoryRef("digest", writes_replace_log=True)
    stored, entry = emptied.split_log()
    assert (stored.writes_replace_log, decode_writes([entry or b""])) == (False, [])
