"""The job as Celery tasks. The root replaces itself with a chord of its peers."""

from __future__ import annotations

import os
from typing import Any

from celery import Celery, Task, chord

from benchmarks.rivals import job

app = Celery("bench", broker=os.environ["CELERY_URL"], backend=os.environ["CELERY_URL"])
app.conf.update(
    task_acks_late=True,  # redo tasks whose worker died
    task_reject_on_worker_lost=True,
    broker_connection_retry_on_startup=True,
)


@app.task
def peer(question: str) -> str:
    """Answer at once."""
    return job.answer()


@app.task
def collect(answers: list[str], history: list[dict[str, Any]]) -> str:
    """Continue with the root's state after all peers have answered."""
    return job.summary(answers)


@app.task(bind=True)
def root(self: Task, fan_out: int) -> Any:
    """Ask `fan_out` peers."""
    calls = [peer.s(job.QUESTION) for _ in range(fan_out)]
    return self.replace(chord(calls, collect.s(list(job.history()))))
