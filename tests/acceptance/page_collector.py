"""An agent with much to remember: it fetches pages, keeps each in its working memory, asks a peer and sums them up.

Replicas import this by its bare name; a request tells where the API writes down what was fetched.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

from pydantic import BaseModel

from meshpoint import Peer, TaskExecutionContext, agent


class Collection(BaseModel):
    """What to fetch. `fetched` is a file that gets a line for each fetch: the page's number and its digest."""

    pages: int
    fetched: Path


async def fetch(number: int, fetched: Path) -> bytes:
    """A page as an API gives it: fetched again, it is another one."""
    page = os.urandom(2_000)
    with fetched.open("a") as file:
        file.write(f"{number} {sha256(page).hexdigest()}\n")
    return page


def digest_of(pages: Iterable[str]) -> str:
    """One digest of those of all pages, in their order."""
    return sha256(" ".join(pages).encode()).hexdigest()


@agent("collector", version="1")
async def collector(ctx: TaskExecutionContext, collection: Collection) -> str:
    """The digest of all pages, once the peer has answered."""
    for number in range(collection.pages):
        if await ctx.memory.get(f"page:{number}") is None:
            await ctx.memory.set(f"page:{number}", await fetch(number, collection.fetched))
    await ctx.call(Peer("peer", int, int)(collection.pages))
    pages = await ctx.memory.get_many(f"page:{number}" for number in range(collection.pages))
    return digest_of(sha256(page).hexdigest() for page in pages.values())
