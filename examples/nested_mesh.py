"""Three levels: a publisher asks an editor, who asks fifty reviewers, who each ask a library.

Run it: `python examples/nested_mesh.py`.

While the answers arrive, no task waits in memory: 1 + 1 + 50 tasks are rows.
"""

import asyncio

from meshpoint import AT_LEAST, Ok, Peer, TaskExecutionContext, agent
from meshpoint.local import local_mesh

REVIEWERS = 50

look_up = Peer("library", int, int)
review = Peer("reviewer", int, int)
edit = Peer("editor", str, dict[str, int])


@agent("library")
async def library(ctx: TaskExecutionContext, page: int) -> int:
    """How many words a page has."""
    return 200 + page % 7


@agent("reviewer")
async def reviewer(ctx: TaskExecutionContext, page: int) -> int:
    """How many mistakes a page has: one in a hundred words."""
    return await look_up(page) // 100


@agent("editor")
async def editor(ctx: TaskExecutionContext, title: str) -> dict[str, int]:
    """Requests all pages, continues after nine of ten reviews, and cancels the rest."""
    enough = AT_LEAST(REVIEWERS * 9 // 10)
    answers = await ctx.gather_outcomes(*[review(page) for page in range(REVIEWERS)], join=enough)
    counts = [answer.value for answer in answers if isinstance(answer, Ok)]
    return {"pages": len(counts), "mistakes": sum(counts)}


@agent("publisher")
async def publisher(ctx: TaskExecutionContext, title: str) -> str:
    found = await edit(title)
    return f"{title}: {found['pages']} pages reviewed, {found['mistakes']} mistakes"


async def main() -> None:
    async with local_mesh(publisher, editor, reviewer, library) as mesh:
        print(await mesh.call(publisher, "The Waiting Mesh"))


if __name__ == "__main__":
    asyncio.run(main())
