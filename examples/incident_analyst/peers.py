"""The analyst's peers. Other processes, or other teams, could serve each of them."""

from __future__ import annotations

import asyncio
import random

from incident import Draft, Finding, Review, ask_owner

from meshpoint import AgentFailed, Context, agent

OBJECTIONS = ("Why now?", "Why only here?")


@agent("logs")
async def logs(ctx: Context, service: str) -> Finding:
    """The slow one. Callers of the analyst see its progress too."""
    for percent in (0, 50):
        await ctx.update_status(f"{percent} % searched")
        await asyncio.sleep(1)
    return Finding(source="logs", text=f"{service} ran out of connections.")


@agent("metrics")
async def metrics(ctx: Context, service: str) -> Finding:
    """The flaky one. Its `RetryPolicy` retries the call, even if the caller's process dies."""
    if random.random() < 0.3:
        raise AgentFailed("the metrics store is overloaded")
    return Finding(source="metrics", text=f"{service} is slow at the 99th percentile.")


@agent("changes")
async def changes(ctx: Context, service: str) -> Finding:
    """The nested one: it calls another peer."""
    owner = await ask_owner(service)
    return Finding(source="changes", text=f"{owner} deployed {service} an hour ago")


@agent("owners")
async def owners(ctx: Context, service: str) -> str:
    return f"team-{service}"


@agent("critic")
async def critic(ctx: Context, draft: Draft) -> Review:
    """Object until each objection has an answer."""
    open_objections = OBJECTIONS[len(draft.answers) :]
    return Review(objection=open_objections[0] if open_objections else None)
