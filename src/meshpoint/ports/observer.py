"""What happens, as it happens. Logs, metrics and tests hear the same events."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from pydantic import JsonValue

from meshpoint.model.error_text import described
from meshpoint.model.events import Event, Phase, Step
from meshpoint.model.ids import AgentName, ReplicaId, TaskId

log = logging.getLogger("meshpoint.observer")


class Observer(Protocol):
    """Hears every event, synchronously, at the place in the code where it happens.

    Lease renewals are told from a thread of their own; everything else from the event loop.
    """

    def emit(self, event: Event) -> None:
        """Take note. Must not raise and must not block."""


@dataclass(slots=True)
class Found:
    """What a look came upon; empty until its block says."""

    task_ids: tuple[TaskId, ...] = ()
    detail: dict[str, JsonValue] = field(default_factory=dict)


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
            self._failed(step, ids, detail, error)
            raise
        self._emit(step, Phase.AFTER, ids, detail)

    @contextmanager
    def look(self, step: Step) -> Iterator[Found]:
        """Tell that a look is about to take what is due, and then what the block found, unless that is nothing."""
        found = Found()
        self._emit(step, Phase.BEFORE, (), {})
        try:
            yield found
        except BaseException as error:
            self._failed(step, (), {}, error)
            raise
        if found.task_ids or found.detail:
            self._emit(step, Phase.AFTER, found.task_ids, found.detail)

    def note(self, step: Step, *task_ids: TaskId, **detail: JsonValue) -> None:
        """Tell something that has no effect of its own."""
        self._emit(step, Phase.NOTED, task_ids, detail)

    def _failed(
        self, step: Step, ids: tuple[TaskId, ...], detail: dict[str, JsonValue], error: BaseException
    ) -> None:
        self._emit(step, Phase.FAILED, ids, {**detail, "error": described(error)})

    def _emit(self, step: Step, phase: Phase, ids: tuple[TaskId, ...], detail: dict[str, JsonValue]) -> None:
        try:
            self.observer.emit(Event(step, phase, self.agent, self.replica, ids, detail))
        except Exception:  # observers must not raise, but this one did
            log.exception("the observer failed at %s %s", step.value, phase.value)
