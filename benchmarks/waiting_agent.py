"""Agents for memory measurements: `patient` and `asker` wait, `echo` answers immediately.

On SIGUSR1 their process collects garbage and counts its objects.
"""

from __future__ import annotations

import asyncio
import base64
import ctypes
import gc
import json
import os
import signal
from datetime import timedelta
from pathlib import Path

from pydantic import BaseModel

from meshpoint import Question, agent
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
echo_peer = Peer("echo", int, int, timeout=timedelta(minutes=10))


@agent("echo")
async def echo(ctx: TaskExecutionContext, number: int) -> int:
    """Returns its input."""
    return number


class Decision(BaseModel):
    """The answer that `asker` waits for."""

    approved: bool


approval = Question("approval", Decision)
_barriers: dict[int, asyncio.Barrier] = {}


@agent("asker")
async def asker(ctx: TaskExecutionContext, running: int) -> bool:
    """Asks a question that stays open, or waits until `running` tasks run at once."""
    if running:
        await _barriers.setdefault(running, asyncio.Barrier(running)).wait()
        return True
    return (await ctx.wait_for(approval, prompt="Buy it?")).approved


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
