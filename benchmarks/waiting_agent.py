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
from meshpoint.agents.stateful import Replies, StatefulAgent
from meshpoint.model.calls import Done, Paused
from meshpoint.model.context import TaskExecutionContext

COUNT_FILE_VARIABLE = "MESHPOINT_BENCH_COUNTED"
"""Environment variable with the path of the file for the count."""

silent_peer = Peer("mute", int, str, timeout=timedelta(hours=6))


class WaitingState(BaseModel):
    """The agent's state while it waits."""

    text: str


class WaitingAgent(StatefulAgent[int, WaitingState, str]):
    """Waits for `mute` with a state of the requested size in bytes.

    The state is random letters, which compress by a quarter.
    """

    name = "patient"

    async def on_request(self, ctx: TaskExecutionContext, size: int) -> Paused | Done[str]:
        text = base64.b64encode(os.urandom(size * 3 // 4)).decode()
        return self.ask(WaitingState(text=text), {"word": silent_peer(size)}, then=self.on_reply)

    async def on_reply(
        self, ctx: TaskExecutionContext, state: WaitingState, replies: Replies
    ) -> Paused | Done[str]:
        return self.done(replies.value("word", silent_peer))


patient = WaitingAgent()


def write_object_count(number: int, frame: object) -> None:
    """Write the number of objects known to the collector.

    With SIGUSR2, return free memory to the system first.
    """
    gc.collect()
    if number == signal.SIGUSR2:
        ctypes.CDLL(None).malloc_trim(0)
    path = Path(os.environ[COUNT_FILE_VARIABLE])
    path.with_suffix(".new").write_text(json.dumps({"objects": len(gc.get_objects())}))
    path.with_suffix(".new").replace(path)


if COUNT_FILE_VARIABLE in os.environ:
    signal.signal(signal.SIGUSR1, write_object_count)
    signal.signal(signal.SIGUSR2, write_object_count)
