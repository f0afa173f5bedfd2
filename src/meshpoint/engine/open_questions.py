"""Read the open questions of a task, for callers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from meshpoint.engine.backend import Backend
from meshpoint.engine.retry import Retry
from meshpoint.model.questions import AskedQuestion, QuestionKey, open_question_keys
from meshpoint.model.task_status import MAX_WAITS
from meshpoint.model.tasks import CallSummary, TaskSummary

log = logging.getLogger("meshpoint.store")


async def read_open_questions(
    backend: Backend, retry: Retry, task: TaskSummary, calls: Sequence[CallSummary]
) -> list[AskedQuestion]:
    """Return the questions that a task waits for, at most 100.

    A question that cannot be read is left out with a warning: it must not hide the others.
    """
    keys = open_question_keys(task, calls)[:MAX_WAITS]
    if not keys:
        return []
    try:
        return await _read(backend, retry, keys)
    except Exception:  # of a damaged row, or of one that a later release wrote
        found: list[AskedQuestion] = []
        for key in keys:
            try:
                found += await _read(backend, retry, [key])
            except Exception:
                log.warning(
                    "task %s: its question %s cannot be read", key.task_id, key.name, exc_info=True
                )
        return found


async def _read(
    backend: Backend, retry: Retry, keys: Sequence[QuestionKey]
) -> list[AskedQuestion]:
    asked = await retry.until_available(partial(backend.store.find_questions, keys))
    found = [each for each in asked if each is not None]
    for question in found:
        question.to_update()  # fails if its details are damaged
    return found
