"""Measure one version of the store on demand. Run with that version's tree on the path.

Commands arrive as lines on stdin, `["tasks_for", fan_out, seconds]` or `["round", fan_out,
tasks]`; each is answered by one line on stdout. The script uses only `Entrant`, `Mesh` and `MESH`
of the tree's `benchmarks.store`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict

from benchmarks.contenders.mesh import Mesh
from benchmarks.store import MESH, Entrant
from meshpoint import event_loop
from meshpoint.adapters.sql import migrations


class SingleDatabaseStage:
    """A stage with a single, empty database."""

    def __init__(self, url: str) -> None:
        self._url = url

    async def database(self) -> str:
        """Its URL, after creating this version's tables."""
        await asyncio.to_thread(migrations.upgrade, self._url)
        return self._url


async def main(url: str) -> None:
    """Answer commands until stdin closes."""
    entrant = Entrant(MESH, Mesh())
    await entrant.open(SingleDatabaseStage(url))  # type: ignore[arg-type]  # it uses only `database`
    while line := await asyncio.to_thread(sys.stdin.readline):
        name, fan_out, amount = json.loads(line)
        answer = await getattr(entrant, name)(fan_out, amount)
        print(json.dumps(answer if isinstance(answer, int) else asdict(answer)), flush=True)
    await entrant.close()


event_loop.run(main(sys.argv[1]))
