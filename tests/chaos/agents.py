"""The agents under chaos: `root` calls five peers in parallel, `middle` calls `leaf`, and `leaf`
has a side effect and answers.

Each correct answer follows from the input, so a wrong answer is detected.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
import zlib

from pydantic import BaseModel

from meshpoint.agents.function import agent
from meshpoint.agents.peer import Peer
from meshpoint.model.calls import ALL, Join
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.outcomes import Failed, FailureKind, Ok, Outcome

WIDTH = 5
"""Peers that `root` calls in parallel."""
WORK_SECONDS, IGNORE_SECONDS = 9.0, 60.0
"""Seconds that `stubborn` works (longer than a drain waits), and for which it ignores a cancel."""
EFFECTS_VARIABLE = "CHAOS_EFFECTS"
"""Environment variable that names the file of side effects."""


class Work(BaseModel):
    """Input of `root`: `nested` calls go through `middle`; `needed` results meet its joins.

    With `recorded`, each round begins and ends with a subtask. With `remembered`, each round
    counts itself and appends its answers in working memory, which must hold each of them exactly
    once at the end.
    """

    number: int
    rounds: int = 1
    nested: bool = False
    needed: int | None = None
    recorded: bool = False
    remembered: bool = False


class Piece(BaseModel):
    """Input of one peer call."""

    number: int
    round: int
    index: int

    def value(self) -> int:
        """The value that `leaf` returns."""
        return zlib.crc32(f"{self.number} {self.round} {self.index}".encode())

    def seconds(self) -> float:
        """Time that `leaf` takes: some milliseconds, so that faults hit work in progress."""
        return 0.005 + self.value() % 40 / 1000


Answer = list[list[int | None]]
"""Each peer's value, by round; None where the join closed the call."""

leaf_peer = Peer("leaf", Piece, int)
middle_peer = Peer("middle", Piece, int)


def is_correct(agent_name: str, work: Work, outcome: Outcome) -> bool:
    """Whether `outcome` is a correct one for this agent."""
    match agent_name:
        case "viper":
            return isinstance(outcome, Failed) and outcome.kind is FailureKind.ERROR
        case "stubborn":
            return isinstance(outcome, Ok) and outcome.value == work.number
        case _:
            return isinstance(outcome, Ok) and _is_correct_answer(work, outcome.value)


def _is_correct_answer(work: Work, answer: object) -> bool:
    if not isinstance(answer, list) or len(answer) != work.rounds:
        return False
    return all(_is_correct_round(work, number, values) for number, values in enumerate(answer))


def _is_correct_round(work: Work, number: int, values: object) -> bool:
    if not isinstance(values, list) or len(values) != WIDTH:
        return False
    expected = [
        Piece(number=work.number, round=number, index=index).value() for index in range(WIDTH)
    ]
    results = [value for value in values if value is not None]
    matches = all(
        value in {None, expected_value}
        for value, expected_value in zip(values, expected, strict=True)
    )
    return matches and len(results) >= (work.needed or WIDTH)


@agent("root", version="1")
async def root(ctx: TaskExecutionContext, work: Work) -> Answer:
    """Return the peers' values, round by round."""
    _record_effect("root", ctx.task_id, work.number)
    peer, join = (
        middle_peer if work.nested else leaf_peer,
        Join(work.needed) if work.needed else ALL,
    )
    answer: Answer = []
    for number in range(work.rounds):
        if work.remembered and (count := await ctx.memory.incr("rounds")) != number + 1:
            raise AssertionError(f"round {number} has count {count} in working memory")
        ticket = await ctx.subtask(f"draw-{number}", draw_ticket) if work.recorded else None
        pieces = [Piece(number=work.number, round=number, index=index) for index in range(WIDTH)]
        outcomes = await ctx.gather_outcomes(*[peer(piece) for piece in pieces], join=join)
        answer.append([each.value if isinstance(each, Ok) else None for each in outcomes])
        if work.remembered:
            await ctx.memory.rpush("answers", json.dumps(answer[-1]))
        await asyncio.sleep(0.01)
        if (
            ticket is not None
            and (stored := await ctx.subtask(f"keep-{number}", return_ticket, ticket)) != ticket
        ):
            raise AssertionError(f"ticket {number} was drawn twice: {stored}, then {ticket}")
    if work.remembered and (remembered := await ctx.memory.lrange("answers")) != [
        json.dumps(each).encode() for each in answer
    ]:
        raise AssertionError(f"working memory has {remembered}, but the answers are {answer}")
    return answer


@agent("viper", version="1")
async def viper(ctx: TaskExecutionContext, work: Work) -> None:
    """Kill the process: the task must fail, and a neighbour lose at most two processes to it."""
    _record_effect("viper", ctx.task_id, work.number)
    os.kill(os.getpid(), signal.SIGKILL)


@agent("stubborn", version="1")
async def stubborn(ctx: TaskExecutionContext, work: Work) -> int:
    """Work for a while; when cancelled, ignore it for another minute."""
    _record_effect("stubborn", ctx.task_id, work.number)
    end, ignored = time.monotonic() + WORK_SECONDS, False
    while (remaining := end - time.monotonic()) > 0:
        try:
            await asyncio.sleep(remaining)
        except asyncio.CancelledError:
            end, ignored = end if ignored else time.monotonic() + IGNORE_SECONDS, True
    return work.number


async def draw_ticket() -> str:
    """A random value per run: a replica that continues the task must find the recorded one."""
    await asyncio.sleep(0.005)
    return os.urandom(8).hex()


async def return_ticket(ticket: str) -> str:
    """Return the ticket.

    If it differs from the recorded input, the subtask is refused and the task fails.
    """
    return ticket


@agent("middle", version="1")
async def middle(ctx: TaskExecutionContext, piece: Piece) -> int:
    """Return the value of `leaf`."""
    _record_effect("middle", ctx.task_id, piece.number, piece.round, piece.index)
    return await leaf_peer(piece)


@agent("leaf", version="1")
async def leaf(ctx: TaskExecutionContext, piece: Piece) -> int:
    """Have a side effect outside the mesh, then answer."""
    await asyncio.sleep(piece.seconds())
    _record_effect("leaf", ctx.task_id, piece.number, piece.round, piece.index)
    return piece.value()


def _record_effect(*fields: object) -> None:
    """Append one line to the file of side effects.

    A single write, so that a crash never leaves half a line.
    """
    file = os.open(os.environ[EFFECTS_VARIABLE], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, (" ".join(str(each) for each in fields) + "\n").encode())
    finally:
        os.close(file)
