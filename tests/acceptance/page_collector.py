"""An agent with a large working memory: it keeps fetched pages, calls a peer, and digests them.

Replicas import this module by its bare name. The request names the file where the fake API records
each fetch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path

from pydantic import BaseModel

from meshpoint import Peer, TaskExecutionContext, agent


class CollectRequest(BaseModel):
    """Input of the collector. `fetched` gets a line per fetch: page number and digest."""

    pages: int
    fetched: Path


async def fetch(number: int, fetched: Path) -> bytes:
    """A page from a fake API whose content differs at every fetch."""
    page = os.urandom(2_000)
    with fetched.open("a") as file:
        file.write(f"{number} {sha256(page).hexdigest()}\n")
    return page


def digest_of(pages: Iterable[str]) -> str:
    """One digest over the digests of all pages, in order."""
    return sha256(" ".join(pages).encode()).hexdigest()


@agent("collector", version="1")
async def collector(ctx: TaskExecutionContext, request: CollectRequest) -> str:
    """The digest of all pages, returned after the peer has answered."""
    for number in range(request.pages):
        if await ctx.memory.get(f"page:{number}") is None:
            await ctx.memory.set(f"page:{number}", await fetch(number, request.fetched))
    await Peer("peer", int, int)(request.pages)
    pages = await ctx.memory.get_many(f"page:{number}" for number in range(request.pages))
    return digest_of(sha256(page).hexdigest() for page in pages.values())
