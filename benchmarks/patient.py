"""An agent whose every task waits, for a peer that nobody serves, with a large state.

Its process counts what it holds when it is sent SIGUSR1; garbage is collected first.
"""

from __future__ import annotations

import base64
import ctypes
import gc
import json
import os
import signal
from datetime import timedelta
from pathlib import Path

from pydantic import BaseModel

from meshpoint.agents.peer import Peer
from meshpoint.agents.replies import Replies
from meshpoint.agents.stateful import StatefulAgent
from meshpoint.model.calls import Done, Paused
from meshpoint.model.context import TaskExecutionContext

COUNTED = "MESHPOINT_BENCH_COUNTED"
"""Names the file that the process writes when it has counted."""

mute = Peer("mute", int, str, timeout=timedelta(hours=6))


class Memory(BaseModel):
    """What the agent has to remember."""

    text: str


class Patient(StatefulAgent[int, Memory, str]):
    """Waits for `mute`, with so many bytes of state: random letters, which shrink by a quarter and no more."""

    name = "patient"

    async def on_request(self, ctx: TaskExecutionContext, size: int) -> Paused | Done[str]:
        text = base64.b64encode(os.urandom(size * 3 // 4)).decode()
        return self.ask(Memory(text=text), {"word": mute(size)}, then=self.on_word)

    async def on_word(self, ctx: TaskExecutionContext, state: Memory, replies: Replies) -> Paused | Done[str]:
        return self.done(replies.value("word", mute))


patient = Patient()


def count(number: int, frame: object) -> None:
    """Write how many objects the collector knows; with SIGUSR2, give free memory back to the system first."""
    gc.collect()
    if number == signal.SIGUSR2:
        ctypes.CDLL(None).malloc_trim(0)
    written = Path(os.environ[COUNTED])
    written.with_suffix(".new").write_text(json.dumps({"objects": len(gc.get_objects())}))
    written.with_suffix(".new").replace(written)


if COUNTED in os.environ:
    signal.signal(signal.SIGUSR1, count)
    signal.signal(signal.SIGUSR2, count)
