"""Which memory writes are already done when code runs again."""

from __future__ import annotations

import pytest

from meshpoint.model.memory import Answer, Command
from meshpoint.model.subtasks import AgentCheckpoint
from meshpoint.working_memory.write_log import MemoryWriteLog, WritePosition

INCR = [Command("INCRBY", "n", (b"1",))]
OTHER = [
    [Command("INCRBY", "n", (b"2",))],
    [Command("INCRBY", "m", (b"1",))],
    [Command("DECRBY", "n", (b"1",))],
    [*INCR, *INCR],
    [Command("INCRBY", "n", (b"1", b""))],
    [Command("INCRBY", "n1", ())],
]


def again(writes: MemoryWriteLog, seq: int = 1) -> MemoryWriteLog:
    """The log as the next segment reads it, via JSON."""
    kept = AgentCheckpoint(operation_id="t", agent="a", seq=seq, memory_writes=writes.for_checkpoint(seq))  # type: ignore[arg-type]
    return MemoryWriteLog(AgentCheckpoint.model_validate_json(kept.model_dump_json()).memory_writes)


def test_what_this_run_did_is_not_taken_for_done() -> None:
    writes = MemoryWriteLog()
    assert writes.recorded_answers((0, 0, ""), INCR) is None
    writes.record((0, 0, ""), INCR, [1])
    assert writes.recorded_answers((0, 0, ""), INCR) is None


def test_the_next_run_is_answered_what_this_one_was_as_often_as_it_was() -> None:
    writes = MemoryWriteLog()
    writes.record((0, 0, ""), INCR, [1])
    writes.record((0, 0, ""), INCR, [2])
    writes = again(writes)
    assert [writes.recorded_answers((0, 0, ""), INCR) for _ in range(3)] == [[1], [2], None]
    writes = again(writes)
    assert [writes.recorded_answers((0, 0, ""), INCR) for _ in range(3)] == [[1], [2], None]


@pytest.mark.parametrize("place", [(1, 0, ""), (0, 1, ""), (1, 1, ""), (0, "s", ""), (0, 0, "read")])
def test_at_another_place_it_is_another_write(place: WritePosition) -> None:
    writes = MemoryWriteLog()
    writes.record((0, 0, ""), INCR, [1])
    assert again(writes).recorded_answers(place, INCR) is None


@pytest.mark.parametrize("commands", OTHER)
def test_other_commands_are_another_write(commands: list[Command]) -> None:
    writes = MemoryWriteLog()
    writes.record((0, 0, ""), INCR, [1])
    assert again(writes).recorded_answers((0, 0, ""), commands) is None


@pytest.mark.parametrize("answers", [[b"OK"], [None], [0], [b"\x00\xff1.5"], [b"none", 0], [b"OK", 1]])
def test_answers_are_kept_exactly(answers: list[Answer]) -> None:
    commands = [Command("LPOP", f"k{index}") for index in range(len(answers))]
    writes = MemoryWriteLog()
    writes.record((0, 0, ""), commands, answers)
    assert again(writes).recorded_answers((0, 0, ""), commands) == answers


def test_each_has_the_first_checkpoint_that_has_it() -> None:
    writes = MemoryWriteLog()
    writes.record((0, 0, ""), INCR, [1])
    writes.for_checkpoint(4)
    writes.record((1, 0, ""), INCR, [2])
    assert [write.seq for write in writes.for_checkpoint(9)] == [4, 9]


def test_what_an_earlier_memory_has_not_is_to_be_done_again() -> None:
    writes = MemoryWriteLog()
    writes.record((0, 0, ""), INCR, [1])
    writes.for_checkpoint(4)
    writes.record((0, 0, ""), INCR, [2])
    writes.for_checkpoint(5)
    writes.discard_after(4)
    assert [writes.recorded_answers((0, 0, ""), INCR) for _ in range(2)] == [[1], None]
    writes.discard_after(0)
    assert writes.for_checkpoint(6) == ()
