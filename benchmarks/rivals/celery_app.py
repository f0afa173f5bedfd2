"""The job as Celery tasks: the root replaces itself by a chord of its peers."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery, Task, chord

from benchmarks.rivals import job

app = Celery("bench", broker=os.environ["CELERY_URL"], backend=os.environ["CELERY_URL"])
app.conf.update(
    task_acks_late=True,  # a task whose worker died is done again
    task_reject_on_worker_lost=True,
    broker_connection_retry_on_startup=True,
)


@app.task
def peer(question: str) -> str:
    """Answers at once."""
    return job.answer()


@app.task
def collect(answers: list[str], history: list[dict[str, Any]]) -> str:
    """Goes on when all peers have answered, with what the root kept."""
    return job.summary(answers)


@app.task(bind=True)
def root(self: Task, fan_out: int) -> Any:
    """Asks as many peers as it is told to."""
    calls = [peer.s("what do you say?") for _ in range(fan_out)]
    return self.replace(chord(calls, collect.s(list(job.history()))))
