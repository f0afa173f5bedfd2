"""Transitions between the states of a segment's memory."""

from __future__ import annotations

from meshpoint.model.memory import MemoryRecovery, MemorySource
from meshpoint.working_memory.recovery import RecoveredMemory
from meshpoint.working_memory.states import Clearing, InDoubt, Open, Untouched

RECOVERY = MemoryRecovery(MemorySource.SQL, 3)
FOUND = RecoveredMemory(RECOVERY, 7, "1:00")


def test_the_first_use_opens_the_memory_at_the_recovered_version() -> None:
    assert Untouched().recovered(FOUND) == Open(RECOVERY, 7)


def test_a_write_is_in_doubt_until_it_is_answered() -> None:
    in_doubt = Open(RECOVERY, 7).writing()
    assert in_doubt == InDoubt(RECOVERY, 7)
    assert in_doubt.writing() == in_doubt
    assert in_doubt.answered(8) == Open(RECOVERY, 8)


def test_a_clear_opens_an_unrecovered_memory_as_behind() -> None:
    opened = Untouched().writing().writing().answered(1)
    assert (opened.version, opened.recovery.source) == (1, MemorySource.NONE)
    assert (opened.recovery.behind, opened.recovery.verified) == (True, False)


def test_a_clear_without_an_answer_leaves_the_recovered_memory_in_doubt() -> None:
    assert Clearing().recovered(FOUND) == InDoubt(RECOVERY, 7)


def test_a_clear_does_not_change_how_the_memory_was_recovered() -> None:
    assert Open(RECOVERY, 7).writing().answered(9).recovery is RECOVERY
