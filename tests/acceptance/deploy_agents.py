"""Versions of one agent, as its author edits it between two deploys.

Each answers with what it did, so that a test sees which code ran. Earlier releases of Meshpoint
can import this module too.
"""

from __future__ import annotations

from typing import Any

from meshpoint import Peer, agent

peer, extra = Peer("peer", int, int), Peer("extra", int, int)


async def ask(ctx: Any, call: Any) -> int:
    """Await a call. In earlier releases, only the context can."""
    answer: int = await (call if hasattr(call, "__await__") else ctx.call(call))
    return answer


async def draft(number: int) -> int:
    return number


async def edited_draft(number: int) -> int:
    return number + 1000


@agent("root", version="1")
async def first(ctx: Any, number: int) -> list[int]:
    plan = await ctx.subtask("draft", draft, number)
    return [plan, await ask(ctx, peer(number)), await ask(ctx, peer(number))]


@agent("root", version="1")
async def edited_subtask(ctx: Any, number: int) -> list[int]:
    plan = await ctx.subtask("draft", edited_draft, number)
    return [plan, await ask(ctx, peer(number)), await ask(ctx, peer(number))]


@agent("root", version="1")
async def edited_path(ctx: Any, number: int) -> list[int]:
    """Asks another peer before the recorded calls: tasks of `first` are parked."""
    plan = await ctx.subtask("draft", draft, number)
    before = await ask(ctx, extra(number))
    return [plan, before, await ask(ctx, peer(number)), await ask(ctx, peer(number))]


@agent("root", version="1")
async def fixed_path(ctx: Any, number: int) -> list[int]:
    """Asks the other peer after the recorded calls: continues tasks of `first`."""
    plan = await ctx.subtask("draft", draft, number)
    recorded = [await ask(ctx, peer(number)), await ask(ctx, peer(number))]
    return [plan, *recorded, await ask(ctx, extra(number))]


@agent("root", version="2")
async def second(ctx: Any, number: int) -> list[int]:
    return [await ask(ctx, extra(number)), await ask(ctx, peer(number))]


@agent("root", version="1")
async def counts_and_fails(ctx: Any, number: int) -> int:
    """Counts in its memory before and after its call."""
    await ctx.memory.incr("count")
    await ask(ctx, peer(number))
    await ctx.memory.incr("count")
    raise ValueError("not fixed")


@agent("root", version="1")
async def counts_once_more(ctx: Any, number: int) -> int:
    """Repeats these writes, and adds one before the call."""
    await ctx.memory.incr("count")
    await ctx.memory.incr("count")
    await ask(ctx, peer(number))
    await ctx.memory.incr("count")
    return int(await ctx.memory.get("count"))


@agent("root", version="1")
async def records_and_fails(ctx: Any, number: int) -> list[int]:
    await ctx.subtask("draft", draft, number)
    raise ValueError("not fixed")


def result(name: str, number: int, *, begun: str | None = None) -> list[int] | None:
    """What an agent of this module answers, if peers answer ten times their input.

    `begun` is the agent that ran the first segment, if it is not the same. Returns `None` if the
    agent `name` cannot end such a task.
    """
    begun, answer = begun or name, 10 * number
    if {begun, name} & {"second", "edited_path"} and begun != name:
        return None
    answers = {"second": 2, "edited_path": 3, "fixed_path": 3}.get(name, 2) * [answer]
    if name == "second":
        return answers
    return [number + 1000 if begun == "edited_subtask" else number, *answers]
