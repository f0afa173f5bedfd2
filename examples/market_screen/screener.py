"""An agent that reads many pages, keeps all of them in its working memory, and then has to wait.

`read` reads the pages. The agent keeps its working data in `ctx.memory`.
"""

from __future__ import annotations

from hashlib import sha256

from api import fetch, tickers
from pydantic import BaseModel

from meshpoint import Peer, TaskExecutionContext, agent


class Screen(BaseModel):
    """The order: how many companies to screen, and how many to propose."""

    companies: int = 200
    places: int = 5


class Page(BaseModel):
    """What the service knows of one company."""

    ticker: str
    sector: str
    price: float
    earnings: float
    debt_to_equity: float


class Proposal(BaseModel):
    """What the committee is asked to approve.

    `memory` is the digest of the agent's memory at that moment.
    """

    tickers: list[str]
    memory: str
    keys: int
    begun: int


class Screened(BaseModel):
    """The result, with the state of the memory after the pause and its source."""

    approved: list[str]
    memory: str
    keys: int
    begun: int
    found_in: str
    verified: bool


ask_committee = Peer("committee", Proposal, list[str])


@agent("screener")
async def screener(ctx: TaskExecutionContext, screen: Screen) -> Screened:
    """Read every page, propose the cheapest companies, and wait for the committee."""
    begun = await ctx.memory.incr(
        "begun"
    )  # this code runs again after the pause; the write is done once
    for ticker in tickers(screen.companies):
        if not await ctx.memory.exists(f"page:{ticker}"):
            await read(ctx, ticker)
    cheapest = await ctx.memory.zrange("cheap", -screen.places, -1)
    proposal = Proposal(
        tickers=[ticker.decode() for ticker, _ in reversed(cheapest)],
        memory=await digest_of_memory(ctx),
        keys=len(await ctx.memory.keys()),
        begun=begun,
    )
    approved = await ask_committee(proposal)  # here the task is only a row
    recovery = ctx.memory.recovery
    assert recovery is not None
    return Screened(
        approved=approved,
        memory=await digest_of_memory(ctx),
        keys=len(await ctx.memory.keys()),
        begun=begun,
        found_in=recovery.source.value,
        verified=recovery.verified,
    )


async def read(ctx: TaskExecutionContext, ticker: str) -> None:
    """Buy a page, keep it, and note what it says."""
    content = await fetch(ticker)
    page = Page.model_validate_json(content)
    await ctx.memory.hincrby("sectors", page.sector)
    if page.debt_to_equity > 2:
        await ctx.memory.rpush("indebted", ticker)
    else:
        await ctx.memory.zadd("cheap", {ticker: page.earnings / page.price})
    await ctx.memory.set(f"page:{ticker}", content)


async def digest_of_memory(ctx: TaskExecutionContext) -> str:
    """A digest of the whole memory, without Meshpoint's own records."""
    memory = ctx.memory
    pages = await memory.get_many(await memory.keys("page:*"))
    contents = [
        sorted(pages.items()),
        await memory.get("begun"),
        sorted((await memory.hgetall("sectors")).items()),
        await memory.lrange("indebted"),
        await memory.zrange("cheap"),
    ]
    return sha256(repr(contents).encode()).hexdigest()
