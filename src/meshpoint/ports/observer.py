"""What happens, as it happens. Logs, metrics and tests hear the same events."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from pydantic import JsonValue

from meshpoint.model.events import Event, Phase, Step
from meshpoint.model.ids import AgentName, ReplicaId, TaskId


class Observer(Protocol):
    """Hears every event, synchronously, at the place in the code where it happens.

    Lease renewals are told from a thread of their own; everything else from the event loop.
    """

    def emit(self, event: Event) -> None:
        """Take note. Must not raise and must not block."""


@dataclass(frozen=True, slots=True)
class Steps:
    """Tells one worker's steps to an observer."""

    observer: Observer
    agent: AgentName
    replica: ReplicaId

    @contextmanager
    def step(self, step: Step, task_ids: Iterable[TaskId] = (), **detail: JsonValue) -> Iterator[None]:
        """Tell that `step` is about to take effect, and then that it has, or that it failed."""
        ids = tuple(task_ids)
        self._emit(step, Phase.BEFORE, ids, detail)
        try:
            yield
        except BaseException as error:
            self._emit(step, Phase.FAILED, ids, {**detail, "error": f"{type(error).__name__}: {error}"})
            raise
        self._emit(step, Phase.AFTER, ids, detail)

    def note(self, step: Step, *task_ids: TaskId, **detail: JsonValue) -> None:
        """Tell something that has no effect of its own."""
        self._emit(step, Phase.NOTED, task_ids, detail)

    def _emit(self, step: Step, phase: Phase, ids: tuple[TaskId, ...], detail: dict[str, JsonValue]) -> None:
        self.observer.emit(Event(step, phase, self.agent, self.replica, ids, detail))
