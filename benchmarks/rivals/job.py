"""The job: an agent with 8 KB of state asks N peers concurrently, waits for all, and answers.

Standard library only, because rivals run in an environment without Meshpoint.
"""

from __future__ import annotations

import json
from functools import cache
from random import Random
from typing import Any

STATE_BYTES, ANSWER_BYTES = 8192, 300
_WORDS = 900


@cache
def history() -> tuple[dict[str, Any], ...]:
    """The agent's state: a conversation of 8 KB of JSON, compressible by a factor of about 2.9."""
    random, messages = Random(2), list[dict[str, Any]]()
    while len(json.dumps(messages)) < STATE_BYTES - 200:
        call = {"id": f"{random.getrandbits(96):024x}", "name": "search", "arguments": {"query": _text(random, 5)}}
        messages.append({"role": "assistant", "content": _text(random, 40), "tool_calls": [call]})
    return tuple(messages)


@cache
def answer() -> str:
    """A peer's answer: 300 bytes."""
    return _text(Random(3), 80)[:ANSWER_BYTES]


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


def _text(random: Random, words: int) -> str:
    return " ".join(_VOCABULARY[min(int(random.expovariate(6.6 / _WORDS)), _WORDS - 1)] for _ in range(words))


def _vocabulary() -> list[str]:
    random = Random(1)
    return ["".join(random.choices("etaoinshrdlucmfwyp", k=random.randint(2, 9))) for _ in range(_WORDS)]


_VOCABULARY = _vocabulary()
