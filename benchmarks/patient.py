"""An agent whose tasks all wait, with a large state, for a peer that never answers.

On SIGUSR1 its process collects garbage and counts its objects.
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
"""Environment variable with the path of the file for the count."""

mute = Peer("mute", int, str, timeout=timedelta(hours=6))


class Memory(BaseModel):
    """The agent's state while it waits."""

    text: str


class Patient(StatefulAgent[int, Memory, str]):
    """Waits for `mute` with a state of the requested size in bytes.

    The state is random letters, which compress by a quarter.
    """

    name = "patient"

    async def on_request(self, ctx: TaskExecutionContext, size: int) -> Paused | Done[str]:
        text = base64.b64encode(os.urandom(size * 3 // 4)).decode()
        return self.ask(Memory(text=text), {"word": mute(size)}, then=self.on_word)

    async def on_word(self, ctx: TaskExecutionContext, state: Memory, replies: Replies) -> Paused | Done[str]:
        return self.done(replies.value("word", mute))


patient = Patient()


def count(number: int, frame: object) -> None:
    """Write the number of objects known to the collector.

    With SIGUSR2, return free memory to the system first.
    """
    gc.collect()
    if number == signal.SIGUSR2:
        ctypes.CDLL(None).malloc_trim(0)
    written = Path(os.environ[COUNTED])
    written.with_suffix(".new").write_text(json.dumps({"objects": len(gc.get_objects())}))
    written.with_suffix(".new").replace(written)


if COUNTED in os.environ:
    signal.signal(signal.SIGUSR1, count)
    signal.signal(signal.SIGUSR2, count)
