"""Read the open questions of a task, for callers and operators."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias

from meshpoint.errors import Unavailable
from meshpoint.model.questions import AskedQuestion, QuestionKey, open_question_keys
from meshpoint.model.task_status import MAX_WAITS
from meshpoint.model.tasks import CallSummary, TaskSummary
from meshpoint.ports.task_store import CheckpointStore

log = logging.getLogger("meshpoint.store")

_Questions: TypeAlias = list[AskedQuestion | None]
_Find: TypeAlias = Callable[[Sequence[QuestionKey]], Awaitable[_Questions]]
_Ask: TypeAlias = Callable[[Callable[[], Awaitable[_Questions]]], Awaitable[_Questions]]


async def read_open_questions(
    store: CheckpointStore,
    task: TaskSummary,
    calls: Sequence[CallSummary],
    ask: _Ask | None = None,
) -> list[AskedQuestion]:
    """Return the questions that a task waits for, at most 100.

    A question that cannot be read is left out with a warning: it must not hide the others. `ask`
    runs the read, for example again while the store is unavailable.
    """

    async def find(keys: Sequence[QuestionKey]) -> list[AskedQuestion | None]:
        if ask is None:
            return await store.find_questions(keys)
        return await ask(lambda: store.find_questions(keys))

    keys = open_question_keys(task, calls)[:MAX_WAITS]
    if not keys:
        return []
    try:
        return await _read(find, keys)
    except Unavailable:
        raise
    except Exception:  # of a damaged row, or a row that a later release wrote
        found: list[AskedQuestion] = []
        for key in keys:
            try:
                found += await _read(find, [key])
            except Unavailable:
                raise
            except Exception:
                log.warning(
                    "task %s: its question %s cannot be read", key.task_id, key.name, exc_info=True
                )
        return found


async def _read(find: _Find, keys: Sequence[QuestionKey]) -> list[AskedQuestion]:
    found = [each for each in await find(keys) if each is not None]
    for question in found:
        question.to_update()  # fails if its details are damaged
    return found
