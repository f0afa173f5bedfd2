"""An observer that records every event and lets a test await one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from meshpoint.model.events import Event, Phase, Step


class RecordedEvents:
    """All events so far; each `hooks` function is called with every new one."""

    def __init__(self) -> None:
        self.all: list[Event] = []
        self.hooks: list[Callable[[Event], object]] = []
        self._changed = asyncio.Event()

    def emit(self, event: Event) -> None:
        more = event.more()
        event = replace(event, more=lambda: more)  # so that it keeps no object of the engine
        self.all.append(event)
        for hook in self.hooks:
            hook(event)
        self._changed.set()

    @property
    def steps(self) -> list[Step]:
        return [event.step for event in self.all]

    def matching(
        self, step: Step, phase: Phase | None = None, task_id: str | None = None, **fields: Any
    ) -> list[Event]:
        return [
            event
            for event in self.all
            if event.step is step
            and (phase is None or event.phase is phase)
            and (task_id is None or task_id in event.task_ids)
            and all(getattr(event, name) == value for name, value in fields.items())
        ]

    async def wait(
        self,
        step: Step,
        phase: Phase | None = None,
        count: int = 1,
        task_id: str | None = None,
        **fields: Any,
    ) -> list[Event]:
        """All matching events, once there are `count`."""
        await self.wait_until(lambda: len(self.matching(step, phase, task_id, **fields)) >= count)
        return self.matching(step, phase, task_id, **fields)

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until an event makes `condition` true."""
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def timeline(self, task_id: str, *steps: Step) -> list[str]:
        """Events of a task in order, as "checkpoint before" etc.; only of `steps`, if given."""
        return [
            f"{event.step.value} {event.phase.value}"
            for event in self.all
            if task_id in event.task_ids and (not steps or event.step in steps)
        ]
