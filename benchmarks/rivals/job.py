"""The job: an agent that keeps 8 KB, asks N peers at once, waits for all of them, and answers.

Standard library only: rivals run in an environment without Meshpoint.
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
    """A conversation of 8 KB as JSON, which zstd makes about 2.9 times smaller: what the agent must remember."""
    random, messages = Random(2), list[dict[str, Any]]()
    while len(json.dumps(messages)) < STATE_BYTES - 200:
        call = {"id": f"{random.getrandbits(96):024x}", "name": "search", "arguments": {"query": _text(random, 5)}}
        messages.append({"role": "assistant", "content": _text(random, 40), "tool_calls": [call]})
    return tuple(messages)


@cache
def answer() -> str:
    """What each peer says: 300 bytes."""
    return _text(Random(3), 80)[:ANSWER_BYTES]


def summary(answers: list[str]) -> str:
    """What the agent answers, from all of its peers' answers."""
    return f"{len(answers)} answers, {sum(map(len, answers))} characters"


def check(fan_out: int, result: object) -> None:
    """Refuse a result that is not the sum of all answers: whoever loses some is not in the race.

    Raises:
        AssertionError: it is another.
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
