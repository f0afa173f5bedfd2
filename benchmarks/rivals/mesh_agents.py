"""The job's two agents on Meshpoint."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from benchmarks.rivals import job
from meshpoint import Done, Paused, Peer, Replies, StatefulAgent, TaskExecutionContext, agent

_ask = Peer("peer", str, str)


class Memory(BaseModel):
    """The root's state while it waits."""

    history: tuple[dict[str, Any], ...]


class Root(StatefulAgent[int, Memory, str]):
    """Asks the requested number of peers."""

    name = "root"

    async def on_request(self, ctx: TaskExecutionContext, fan_out: int) -> Paused | Done[str]:
        calls = {str(number): _ask(job.QUESTION) for number in range(fan_out)}
        return self.ask(Memory(history=job.history()), calls, then=self.on_answers)

    async def on_answers(
        self, ctx: TaskExecutionContext, memory: Memory, replies: Replies
    ) -> Paused | Done[str]:
        return self.done(job.summary([replies.value(key, _ask) for key in replies]))


root = Root()


@agent("peer")
async def peer(ctx: TaskExecutionContext, question: str) -> str:
    """Answer at once."""
    return job.answer()
