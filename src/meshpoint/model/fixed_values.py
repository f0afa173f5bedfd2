"""`ctx.now`, `ctx.uuid4` and `ctx.random`: values that are the same in every run of agent code.

Random values are derived from where the code draws them. The time is recorded with the next
record of the code: a step, a subtask or a pause.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from hashlib import sha256
from random import Random
from uuid import UUID

from meshpoint.model.context_runtime import ContextRuntime
from meshpoint.model.ids import TaskId
from meshpoint.model.recorded_work import current_place


class FixedValuesMixin:
    """The part of a context that replaces clocks and random numbers."""

    _runtime: ContextRuntime
    _task_id: TaskId

    def now(self) -> datetime:
        """The time, in UTC, the same in every run.

        It stands still while code runs, and moves with each pause: in a function agent it is the
        time of the first `ctx.now()` since the last pause, in a class agent the time of the
        segment. To measure how long something takes, use `time.monotonic()` in a step.
        """
        runtime = self._runtime
        recorder, tools = runtime.recorder, runtime.tools
        is_replaying = recorder is not None and recorder.replaying
        if recorder is not None and is_replaying and recorder.recorded_now is not None:
            return recorder.recorded_now
        if tools is not None:
            pauses = tools.place[0] if recorder is None else recorder.passed
            instant = tools.now(pauses)
        else:
            instant = runtime.instant or datetime.now(UTC)
        if not is_replaying:
            runtime.instant = instant
        return instant

    def uuid4(self) -> UUID:
        """A UUID that is the same in every run, for example as an idempotency key.

        It is derived from the task's id, so it is unique but not secret.
        """
        return UUID(bytes=self._draw()[:16], version=4)

    def random(self) -> Random:
        """A random number generator with a seed that is the same in every run.

        Each call returns another generator. Its numbers are derived from the task's id, so they
        are not secret.
        """
        return Random(self._draw())

    def _draw(self) -> bytes:
        """Bytes that depend on the task, its attempt, the place in the code, and their number.

        Code in a subtask or a step counts its draws separately, because it does not run again once
        it is recorded.
        """
        runtime = self._runtime
        recorder = runtime.recorder
        pauses, attempt = (0, 0) if runtime.tools is None else runtime.tools.place
        if recorder is not None:
            pauses, attempt = recorder.passed, recorder.attempt
        place = (pauses, *current_place())
        if runtime.draws is None:
            runtime.draws = {}
        number = runtime.draws.get(place, 0)
        runtime.draws[place] = number + 1
        return sha256(json.dumps([self._task_id, attempt, *place, number]).encode()).digest()
