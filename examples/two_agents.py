"""Two agents in one file: while `greeter` waits for `translator`, it is only a database row.

Run it: `python examples/two_agents.py`.
"""

import asyncio

from meshpoint import Peer, TaskExecutionContext, agent
from meshpoint.local import local_mesh

WORDS = {"it": "Buongiorno", "no": "God morgen", "es": "Buenos días"}


@agent("translator")
async def translator(ctx: TaskExecutionContext, language: str) -> str:
    await asyncio.sleep(0.2)  # the time a model or a service takes
    return WORDS[language]


translate = Peer("translator", str, str)


@agent("greeter")
async def greeter(ctx: TaskExecutionContext, name: str) -> str:
    greetings = await ctx.gather(*[translate(language) for language in WORDS])
    return f"{', '.join(greetings)}, {name}!"


async def main() -> None:
    async with local_mesh(greeter, translator) as mesh:
        print(await mesh.call(greeter, "Ada"))


if __name__ == "__main__":
    asyncio.run(main())
