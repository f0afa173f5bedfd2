"""The job: an agent with 8 KB of state asks N peers concurrently, waits for all, and answers.

Standard library only, because rivals run in an environment without Meshpoint.
"""

from __future__ import annotations

from functools import cache
from random import Random
from typing import Any

from benchmarks.random_text import make_conversation, make_text

QUESTION = "what do you say?"
"""The root's question to a peer."""
_ANSWER_BYTES = 300


@cache
def history() -> tuple[dict[str, Any], ...]:
    """The agent's state."""
    return tuple(make_conversation(Random(2)))


@cache
def answer() -> str:
    """A peer's answer: 300 bytes."""
    return make_text(Random(3), 80)[:_ANSWER_BYTES]


def summary(answers: list[str]) -> str:
    """The agent's answer, computed from all of its peers' answers."""
    return f"{len(answers)} answers, {sum(map(len, answers))} characters"


def check(fan_out: int, result: object) -> None:
    """Check that a result covers every answer, so that losing some is not an advantage.

    Raises:
        AssertionError: it does not.
    """
    expected = summary([answer()] * fan_out)
    if result != expected:
        raise AssertionError(f"{result!r} instead of {expected!r}")
