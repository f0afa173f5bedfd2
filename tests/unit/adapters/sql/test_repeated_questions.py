"""Questions that a replica of an earlier release has asked again.

It does not know the table of questions: it writes the wait, and leaves an earlier answer there.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from meshpoint.adapters.sql import SqlStore
from meshpoint.model.mailbox import MailAccepted, MailRefused
from meshpoint.model.outcomes import Ok, encode_outcome
from meshpoint.model.tasks import TaskState
from meshpoint.model.transitions import Pause
from meshpoint.testing.conformance.build import outcomes, paused, state_of
from meshpoint.testing.conformance.store_mailbox import (
    a_question,
    acquired,
    an_answer,
    answer,
    asked,
)

_SET_QUESTION = """
UPDATE agent_task_questions SET request = :request, answer = :answer, is_kept = :k
"""


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqlStore]:
    opened = SqlStore(f"sqlite:///{tmp_path}/tasks.db", namespace="test")
    await opened.open()
    yield opened
    await opened.close()


async def asked_again(store: SqlStore, *, is_kept: bool, prompt: str = "Buy?") -> Pause:
    """A task that waits for a question, with an answer `True` to an earlier wait for it."""
    pause = await paused(store, a_question(prompt=prompt))
    known = {"request": b"\x00" + a_question().body, "answer": b"\x00" + encode_outcome(Ok(True))}
    await store._database.write(lambda tx: tx.execute(_SET_QUESTION, **known, k=is_kept))
    return pause


async def test_a_kept_answer_is_delivered(store: SqlStore) -> None:
    task_id = (await asked_again(store, is_kept=True)).run.task_id
    refused = MailRefused("'approval' was answered")
    assert await answer(store, an_answer(task_id, False)) == refused
    assert outcomes(await acquired(store)) == {"approval": Ok(True)}


async def test_an_answer_to_another_prompt_does_not_count(store: SqlStore) -> None:
    task_id = (await asked_again(store, is_kept=True, prompt="Buy two?")).run.task_id
    question = await asked(store, task_id)
    assert question is not None
    assert (question.details, question.outcome) == (a_question(prompt="Buy two?").body, None)
    assert await answer(store, an_answer(task_id, False)) == MailAccepted(True)
    assert outcomes(await acquired(store)) == {"approval": Ok(False)}


async def test_an_answer_that_was_received_does_not_count_again(store: SqlStore) -> None:
    task_id = (await asked_again(store, is_kept=False)).run.task_id
    assert await answer(store, an_answer(task_id, False)) == MailAccepted(True)
    assert await state_of(store, task_id) is TaskState.READY
    assert outcomes(await acquired(store)) == {"approval": Ok(False)}
