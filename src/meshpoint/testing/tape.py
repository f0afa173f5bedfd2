"""Record the steps and subtasks of a segment, and play them to a second run of its code."""

from __future__ import annotations

import copy
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from datetime import datetime
from inspect import isawaitable
from typing import Any

from pydantic import JsonValue

from meshpoint.model.context import TaskExecutionContext
from meshpoint.model.context_runtime import (
    ContextRuntime,
    MemoryRunner,
    SegmentTools,
    StepRunner,
    SubtaskRunner,
)
from meshpoint.model.recorded_work import current_subtask, subtask_scope
from meshpoint.model.snapshot import apply_diff, diff, snapshot
from meshpoint.model.subtasks import SubtaskProgress
from meshpoint.model.tasks import CheckpointDict

Key = tuple[int, str | None, str, int]
"""The place of a step: the pauses before it, its subtask, its name, and its use of the name."""


class Diverged(BaseException):
    """Ends a second run that does something else. Agent code must not catch it."""


@dataclass
class _Ended:
    """How a step or a subtask ended, and what it changed in the context."""

    value: Any
    error: Exception | None
    changes: CheckpointDict


class Tape:
    """What the first run of a segment got from its steps and subtasks.

    Attributes:
        is_complete: `False` if a second run cannot be given the same: the code has used working
            memory, was cancelled in a step, or has changed the context in concurrent steps.
        steps: The steps, in the order in which they were called.
        unfinished: The subtasks that paused.
    """

    def __init__(self) -> None:
        self.is_complete = True
        self.steps: list[Key] = []
        self.ended: dict[Key | str, _Ended] = {}
        self.unfinished: set[str] = set()
        self._open_count = 0

    async def record(
        self, key: Key | str, ctx: TaskExecutionContext, work: Coroutine[Any, Any, Any]
    ) -> Any:
        """Await `work`, and record how it ends."""
        before = snapshot(ctx)
        self._open_count += 1
        is_alone, value, failure = self._open_count == 1, None, None
        try:
            value = await work
        except Exception as error:
            failure = error
            raise
        except BaseException:
            if isinstance(key, str):
                self.unfinished.add(key)
            else:
                self.is_complete = False
            raise
        finally:
            is_alone = is_alone and self._open_count == 1
            self._open_count -= 1
            changes = diff(before, snapshot(ctx))
            self.is_complete = self.is_complete and (is_alone or not changes)
            self.ended[key] = _Ended(copy.deepcopy(value), failure, changes)
        return value

    def play(self, key: Key | str, ctx: TaskExecutionContext) -> Any:
        """Return the recorded result, or raise the recorded failure."""
        ended = self.ended[key]
        apply_diff(ctx, ended.changes)
        if ended.error is not None:
            raise ended.error
        return copy.deepcopy(ended.value)


class _Places:
    """Gives each step of one run its place."""

    def __init__(self, runtime: ContextRuntime) -> None:
        self._runtime = runtime
        self._uses: dict[tuple[int, str | None, str], int] = {}

    def take(self, name: str) -> Key:
        recorder = self._runtime.recorder
        place = (0 if recorder is None else recorder.passed, current_subtask(), name)
        use = self._uses.get(place, 0)
        self._uses[place] = use + 1
        return (*place, use)


class RecordingTools:
    """The tools of a segment. Also records on a tape what its steps and subtasks return."""

    def __init__(self, tools: SegmentTools, ctx: TaskExecutionContext, tape: Tape) -> None:
        self._tools, self._ctx, self._tape = tools, ctx, tape
        self._places = _Places(ctx._runtime)

    @property
    def place(self) -> tuple[int, int]:
        """The number of pauses before the segment, and the attempt of the operation."""
        return self._tools.place

    def now(self, pauses: int) -> datetime:
        """The time of the segment."""
        return self._tools.now(pauses)

    def use_steps(self) -> StepRunner:
        """The runner of the segment's steps."""
        return self

    def use_subtasks(self) -> SubtaskRunner:
        """The runner of the segment's subtasks."""
        return self

    def use_memory(self) -> MemoryRunner | None:
        """The working memory. A second run would change it again."""
        self._tape.is_complete = False
        return self._tools.use_memory()

    async def set_value(self, key: str, value: bytes) -> None:
        """Store a value of the task."""
        await self._tools.set_value(key, value)

    def call(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Coroutine[Any, Any, Any]:
        """Run a step."""
        key = self._places.take(name)
        self._tape.steps.append(key)
        work = self._tools.use_steps().call(name, function, args, kwargs)
        return self._tape.record(key, self._ctx, work)

    async def run(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a subtask."""
        work = self._tools.use_subtasks().run(name, function, args, kwargs)
        return await self._tape.record(name, self._ctx, work)

    async def ensure_operation(self) -> None:
        """Make the task an operation."""
        await self._tools.use_subtasks().ensure_operation()

    @property
    def progress(self) -> SubtaskProgress:
        """The progress of the segment's subtasks."""
        return self._tools.use_subtasks().progress

    async def save_progress(self, subtask: str, state: object) -> None:
        """Store the intermediate state of a running subtask."""
        await self._tools.use_subtasks().save_progress(subtask, state)

    def saved_progress(self, subtask: str) -> JsonValue:
        """The stored intermediate state of a subtask."""
        return self._tools.use_subtasks().saved_progress(subtask)


class PlayingTools(RecordingTools):
    """The tools of a second run. Its steps and finished subtasks return what is on the tape.

    Attributes:
        played: The steps that this run has called.
    """

    def __init__(self, tools: SegmentTools, ctx: TaskExecutionContext, tape: Tape) -> None:
        super().__init__(tools, ctx, tape)
        self.played: set[Key] = set()

    def call(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Coroutine[Any, Any, Any]:
        """Return a recorded step."""
        key = self._places.take(name)
        self.played.add(key)
        return self._play_step(key)

    async def _play_step(self, key: Key) -> Any:
        if key not in self._tape.ended:
            raise Diverged(f"step {key[2]!r} is new in the second run")
        return self._tape.play(key, self._ctx)

    async def run(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Return a recorded subtask. A subtask that paused runs again."""
        if name not in self._tape.ended:
            raise Diverged(f"subtask {name!r} is new in the second run")
        if name not in self._tape.unfinished:
            self._ctx._runtime.skip_subtask_calls(name)
            return self._tape.play(name, self._ctx)
        with subtask_scope(name):
            value = function(*args, **kwargs)
            return await value if isawaitable(value) else value

    async def set_value(self, key: str, value: bytes) -> None:
        """Do nothing: the first run has stored it."""

    async def save_progress(self, subtask: str, state: object) -> None:
        """Do nothing: the first run has stored it."""
