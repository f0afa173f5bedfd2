"""Agents that the acceptance tests run in separate processes."""

from __future__ import annotations

import asyncio
import ctypes
import os
import resource
import signal
import threading
import time
from datetime import timedelta
from pathlib import Path

from pydantic import BaseModel

from meshpoint.agents.function import agent
from meshpoint.agents.peer import Peer
from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.outcomes import Failed
from meshpoint.model.retry_policy import RetryPolicy
from meshpoint.model.signals import Signal


class Work(BaseModel):
    """Input of `root`: call `peer` once per number, `rounds` times.

    `trace` gets a line per segment. With `gate`, the first segment runs until that file exists.
    With `steps`, the agent is an operation that runs this many subtasks before its calls and one
    after them; with `recorded`, it runs `ctx.step`s in the same way. With `mended_by`, it then
    fails until that file exists. Each call has at most `attempts` attempts, `wait` seconds apart.
    It sets a value `values` times before its calls, and receives `signals` signals after them.
    """

    numbers: list[int]
    rounds: int = 1
    timeout: float = 600
    trace: str | None = None
    gate: str | None = None
    peer: str = "peer"
    steps: int = 0
    recorded: int = 0
    mended_by: str | None = None
    attempts: int = 1
    wait: float = 1
    values: int = 0
    signals: int = 0


peer = Peer("peer", int, int)
chat = Signal("chat", int)


def append_trace(trace: str | None, text: str) -> None:
    if trace:
        with Path(trace).open("a") as file:
            file.write(f"{os.getpid()} {text}\n")


async def step(number: int) -> int:
    """Body of each subtask."""
    return 10 * number


@agent("root", version="1")
async def root(ctx: TaskExecutionContext, work: Work) -> list[int | str]:
    """Per number, the peer's last answer or the kind of the failure."""
    append_trace(work.trace, f"{ctx.task_id} segment")
    while work.gate and not os.path.exists(work.gate):
        await asyncio.sleep(0.05)
    for number in range(work.steps):
        await ctx.subtask(f"step {number}", step, number)
    for number in range(work.recorded):
        await ctx.step(f"recorded {number}", step, number)
    for number in range(work.values):
        await ctx.set_value("number", number)
    results: list[int | str] = []
    retry = RetryPolicy(
        max_attempts=work.attempts, initial_interval=work.wait, backoff_factor=1, jitter=False
    )
    ask_peer = Peer(
        work.peer,
        int,
        int,
        timeout=timedelta(seconds=work.timeout),
        retry=retry if work.attempts > 1 else None,
    )
    for _ in range(work.rounds):
        outcomes = await ctx.gather_outcomes(*[ask_peer(number) for number in work.numbers])
        results = [
            each.kind.value if isinstance(each, Failed) else each.value for each in outcomes
        ]
    received = [await ctx.receive(chat) for _ in range(work.signals)]
    results += received
    if work.steps:
        await ctx.subtask("last step", step, len(results))
    if work.recorded:
        await ctx.step("last recorded", step, len(results))
    if work.mended_by and not os.path.exists(work.mended_by):
        raise RuntimeError("not mended yet")
    return results


@agent("chief", version="1")
async def chief(ctx: TaskExecutionContext, work: Work) -> list[int | str]:
    """Delegate the work to `root`. With `steps`, this task is an operation too."""
    if work.steps:
        await ctx.subtask("order", step, work.steps)
    return await Peer("root", Work, list[int | str])(work)


class Level(BaseModel):
    """Input of the agents that call one another: the number of levels below this one."""

    below: int
    trace: str | None = None


@agent("top", version="1")
async def top(ctx: TaskExecutionContext, level: Level) -> str:
    return await Peer("middle", Level, str)(level)


@agent("middle", version="1")
async def middle(ctx: TaskExecutionContext, level: Level) -> str:
    return await Peer("bottom", Level, str)(level)


@agent("bottom", version="1")
async def bottom(ctx: TaskExecutionContext, level: Level) -> str:
    return str(await peer(1))


@agent("sleeper", version="1")
async def sleeper(ctx: TaskExecutionContext, trace: str) -> str:
    """Wait forever at an await, and record in `trace` when the code is cancelled."""
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        append_trace(trace, "code cancelled")
        raise
    return "never"


@agent("poison", version="1")
async def poison(ctx: TaskExecutionContext, deadly: bool) -> str:
    """Kill its own process if `deadly`."""
    if deadly:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


class WardRequest(BaseModel):
    """Input of `ward`: run for `seconds`, then end the process as `how` says, if set.

    Each segment appends its process id to `trace` when it begins. With `asks`, the task first
    calls `peer`. With `kills`, it also runs until that many tasks have killed their process.
    """

    trace: str
    how: str | None = None
    seconds: float = 0
    kills: int = 0
    asks: bool = False


@agent("ward", version="1")
async def ward(ctx: TaskExecutionContext, request: WardRequest) -> str:
    """Behave well, or end the process, as `request` says."""
    if request.asks:
        await peer(1)
    await ctx.update_status("begun")
    append_trace(request.trace, f"{ctx.task_id} {request.how}")
    await asyncio.sleep(request.seconds)
    while Path(request.trace).read_text().count(" kill\n") < request.kills:
        await asyncio.sleep(0.05)
    match request.how:
        case None:
            return "well"
        case "exit":
            os._exit(3)
        case "exit 0":
            os._exit(0)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segfault":
            ctypes.string_at(0)
        case "memory":
            resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
            allocations = [bytearray(1 << 26) for _ in range(64)]
            os._exit(len(allocations))
        case "hang":
            block_event_loop()
        case "wait":
            await asyncio.Event().wait()
        case "subtask":
            await ctx.subtask("fatal", kill_own_process)
    return "survived"


def block_event_loop() -> None:
    """Block the event loop of this process."""
    while True:
        time.sleep(1)


async def kill_own_process() -> None:
    """Body of a subtask that kills its process."""
    os.kill(os.getpid(), signal.SIGKILL)


@agent("selfish", version="1")
async def selfish(ctx: TaskExecutionContext, below: int) -> int:
    """Call itself `below` more times."""
    return 0 if below == 0 else 1 + await Peer("selfish", int, int)(below - 1)


class StubbornRequest(BaseModel):
    """Input of `stubborn`: how it resists shutdown. `trace` records what it does, by process."""

    how: str
    trace: str


def _block_forever() -> None:
    threading.Event().wait()


def _keep_running(trace: str) -> None:
    time.sleep(0.02)
    append_trace(trace, "lives")


@agent("stubborn", version="1")
async def stubborn(ctx: TaskExecutionContext, work: StubbornRequest) -> str:
    """Resist shutdown in the first process that runs it; return in the next one."""
    ran_before = Path(work.trace).exists()
    append_trace(work.trace, "begins")
    if ran_before:
        return "elsewhere"
    match work.how:
        case "swallows":
            while True:
                try:
                    await asyncio.sleep(0.02)
                    append_trace(work.trace, "lives")
                except asyncio.CancelledError:
                    append_trace(work.trace, "was cancelled")
        case "blocks":
            await asyncio.sleep(0)
            while True:
                _keep_running(work.trace)
        case "leaves a thread":
            threading.Thread(target=_block_forever).start()
        case "waits for a thread":
            await asyncio.to_thread(_block_forever)
        case "leaves a task":
            task = asyncio.create_task(_ignore_cancellation())
            await asyncio.Event().wait()
            del task
    await asyncio.Event().wait()
    return "never"


async def _ignore_cancellation() -> None:
    while True:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            continue


@agent("outrageous", version="1")
async def outrageous(ctx: TaskExecutionContext, what: str) -> str:
    """Raise an exception that would normally end the process, at once or after a pause."""
    exceptions = {
        "KeyboardInterrupt": KeyboardInterrupt,
        "SystemExit": SystemExit,
        "GeneratorExit": GeneratorExit,
    }
    kind, _, where = what.partition(" ")
    if where.endswith("after a pause"):
        await peer(1)
    exception = exceptions[kind](what)

    async def raise_in_task() -> None:
        raise exception

    def raise_in_callback() -> None:
        raise exception

    if where.startswith("in a task"):
        background_task = asyncio.create_task(raise_in_task())
        await asyncio.Event().wait()
        del background_task
    if where.startswith("in a callback"):
        asyncio.get_running_loop().call_soon(raise_in_callback)
        for _ in range(3):
            await asyncio.sleep(0)
        return "lived on"
    raise exception
