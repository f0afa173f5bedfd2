"""One version of the store, measured on demand: a script, run with the tree of that version on the path.

Questions come as lines on stdin, `["tasks_for", fan_out, seconds]` or `["round", fan_out, tasks]`; answers go to
stdout, a line each. It uses `Entrant`, `Mesh` and `MESH` of that tree's `benchmarks.store`, and no more of it.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict

from benchmarks.store import MESH, Entrant, Mesh
from meshpoint import event_loop
from meshpoint.adapters.sql import migrations


class Given:
    """A stage with one database, which is empty."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def database(self) -> str:
        """Its URL, with the tables of this version."""
        await asyncio.to_thread(migrations.upgrade, self._url)
        return self._url


async def main(url: str) -> None:
    """Answer until the questions end."""
    entrant = Entrant(MESH, Mesh())
    await entrant.open(Given(url))  # type: ignore[arg-type]  # it asks a stage for a database only
    while line := await asyncio.to_thread(sys.stdin.readline):
        name, fan_out, how_much = json.loads(line)
        answer = await getattr(entrant, name)(fan_out, how_much)
        print(json.dumps(answer if isinstance(answer, int) else asdict(answer)), flush=True)
    await entrant.close()


event_loop.run(main(sys.argv[1]))
