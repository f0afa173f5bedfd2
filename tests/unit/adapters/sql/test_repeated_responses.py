"""Many responses to one call that is retried, in one batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from meshpoint.adapters.sql import SqlStore, claiming, locking
from meshpoint.model.calls import Join
from meshpoint.model.outcomes import Outcome
from meshpoint.testing.conformance.build import HERE, a_call, error, ok, paused, sub
from meshpoint.testing.conformance.store_retries import a_retried_call, answer, fail


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[SqlStore]:
    opened = SqlStore(f"sqlite:///{tmp_path}/tasks.db", namespace="test")
    await opened.open()
    yield opened
    await opened.close()


@pytest.fixture
def locks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tasks each round of claims locked."""
    counts, lock_tasks = list[int](), locking.lock_tasks

    async def counted(tx: Any, task_ids: Any) -> Any:
        counts.append(len(task_ids))
        return await lock_tasks(tx, task_ids)

    monkeypatch.setattr(claiming, "lock_tasks", counted)
    return counts


@pytest.mark.parametrize("outcome", [error(), ok()], ids=["failures", "results"])
@pytest.mark.parametrize("has_failed", [False, True])
async def test_they_take_few_rounds(
    store: SqlStore, locks: list[int], outcome: Outcome, has_failed: bool
) -> None:
    pause = await paused(store, a_retried_call(), a_call("b"), join=Join())
    if has_failed:
        await fail(store, pause)
    locks.clear()
    claims = [answer(pause, sub(pause, "a"), outcome) for _ in range(40)]
    results = Counter(type(each).__name__ for each in await store.claim(claims, HERE, 1))
    changes_nothing = has_failed and outcome == error()
    assert results["DuplicateOutcome"] == (40 if changes_nothing else 39)
    assert len(locks) <= 3


async def test_late_results_of_a_closed_call_take_one_round(
    store: SqlStore, locks: list[int]
) -> None:
    pause = await paused(store, a_retried_call(), a_call("b"), join=Join())
    retried: Any = await fail(store, pause)
    await store.claim([answer(pause, retried.next_id, ok())], HERE, 1)
    locks.clear()
    claims = [answer(pause, sub(pause, "a"), ok()) for _ in range(40)]
    results = Counter(type(each).__name__ for each in await store.claim(claims, HERE, 1))
    assert (results, len(locks)) == ({"DuplicateOutcome": 40}, 1)
