"""Texts that resemble the messages of agents: reproducible, and about as compressible.

Standard library only, because rivals run in an environment without Meshpoint.
"""

from __future__ import annotations

import json
from random import Random
from typing import Any

_STATE_BYTES = 8192
_WORDS = 900


def make_conversation(random: Random) -> list[dict[str, Any]]:
    """The state of an agent: 8 KB of JSON, which zstd compresses by a factor of about 2.9."""
    messages: list[dict[str, Any]] = []
    while len(json.dumps(messages)) < _STATE_BYTES - 200:
        call = {
            "id": f"{random.getrandbits(96):024x}",
            "name": "search",
            "arguments": {"query": make_text(random, 5)},
        }
        content = make_text(random, 40)
        messages.append({"role": "assistant", "content": content, "tool_calls": [call]})
    return messages


def make_text(random: Random, words: int) -> str:
    """Random words, common ones more often."""
    return " ".join(
        _VOCABULARY[min(int(random.expovariate(6.6 / _WORDS)), _WORDS - 1)] for _ in range(words)
    )


def _vocabulary() -> list[str]:
    random = Random(1)
    return [
        "".join(random.choices("etaoinshrdlucmfwyp", k=random.randint(2, 9)))
        for _ in range(_WORDS)
    ]


_VOCABULARY = _vocabulary()
