"""A person who answers the questions of `patient`: late, twice, or again after the answer.

Some answers come while the task is not waiting for them.
"""

from __future__ import annotations

import asyncio
import json
from random import Random

from meshpoint.model.questions import QuestionKey

from .mesh import Mesh

_WRONG = 1_000_000
_DELAYS = (0.02, 0.5, 3)


class Person:
    """Answers questions one by one until cancelled.

    Attributes:
        is_hurried: Answer every question at once and correctly.
    """

    def __init__(self, mesh: Mesh, rng: Random) -> None:
        self._mesh, self._rng = mesh, rng
        self.is_hurried = False

    async def run(self) -> None:
        """Answer questions."""
        while True:
            await asyncio.sleep(0.2 if self.is_hurried else self._rng.choice(_DELAYS))
            if (answered := self._find_answered()) and self._rng.random() < 0.5:
                await self._answer_again(self._rng.choice(answered))
            if open_questions := self._find_open():
                await self._answer(*self._rng.choice(open_questions))

    def _find_answered(self) -> list[QuestionKey]:
        """The answered questions of open tasks. A task in memory may ask them again."""
        live = self._mesh.store.tables.live if self._mesh.is_strict else {}
        return [key for key in self._mesh.ledger.signals.answered if key.task_id in live]

    def _find_open(self) -> list[tuple[QuestionKey, bytes]]:
        """The questions without an answer, and their requests."""
        stores = [self._mesh.store]
        stores += [self._mesh.memories[process.name] for process in self._mesh.live_processes]
        return [
            (QuestionKey(row.agent, row.task_id, id_), asked.request)
            for store in stores
            for row in store.tables.live.values()
            for id_, asked in row.questions.items()
            if asked.answer is None
        ]

    async def _answer(self, key: QuestionKey, request: bytes) -> None:
        number = int(json.loads(request)["prompt"])
        self._mesh.trace(f"answer {key}")
        for _ in range(self._rng.choice([1, 1, 2])):
            await self._mesh.client.complete(key, number)

    async def _answer_again(self, key: QuestionKey) -> None:
        """Give an answered question a second, wrong answer, which must not count."""
        self._mesh.trace(f"answer again {key}")
        await self._mesh.client.complete(key, _WRONG)
