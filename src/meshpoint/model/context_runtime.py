"""The runtime's side of a task's context, hidden from agents behind `_runtime`.

The context checks arguments and converts types. The objects here do the work: they record peer
calls and subtasks, and hold the working memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Protocol, TypeVar

from pydantic import JsonValue

from meshpoint.model.calls import Call, Join
from meshpoint.model.cards import AgentCard
from meshpoint.model.json_values import json_digest
from meshpoint.model.memory import Answer, Command, MemoryRecovery
from meshpoint.model.outcomes import Failed, Ok, Outcome
from meshpoint.model.peer_directory import PeerDirectory
from meshpoint.model.subtasks import SubtaskProgress

_T_co = TypeVar("_T_co", covariant=True)


class UnsentCall(Protocol[_T_co]):
    """A typed request that has not been sent yet, created by calling a `Peer`."""

    @property
    def peer(self) -> str: ...
    @property
    def input(self) -> JsonValue: ...

    def as_call(self, call_id: str) -> Call:
        """The request as a `Call` of a pause."""

    def read(self, outcome: Outcome, /) -> Ok[_T_co] | Failed:
        """Convert the outcome's value to the declared type, or `Failed(INVALID)` on mismatch."""


class CallRecorder(Protocol):
    """Answers calls from the journal, or ends the segment with a pause."""

    @property
    def replaying(self) -> bool: ...

    @property
    def position(self) -> int:
        """Number of recorded pauses the run has passed, not counting pauses inside subtasks."""

    @property
    def passed(self) -> int:
        """Number of recorded pauses the run has passed."""

    @property
    def is_pausing(self) -> bool:
        """Whether the segment ends with a pause."""

    @property
    def is_own_task(self) -> bool:
        """Whether the caller runs in the function's own asyncio task."""

    @property
    def has_waited(self) -> bool:
        """Whether the run has passed or reached a wait that no peer answers, such as a sleep."""

    def ask(
        self, calls: Sequence[UnsentCall[Any]], join: Join, *, from_run: bool = False
    ) -> list[Ok[Any] | Failed]:
        """Return one outcome per call, in call order.

        Does not return if outcomes are missing: the task pauses. `from_run` allows the asyncio
        tasks of a framework's run to call it, while the function awaits that run.
        """

    @property
    def attempt(self) -> int:
        """The attempt of the operation in which the function first started."""

    @property
    def recorded_now(self) -> datetime | None:
        """What `ctx.now()` returned before the recorded pause that comes next, if it was used."""

    def skip_subtask(self, subtask: str) -> None:
        """Skip the calls recorded inside a subtask whose deliverable is known."""


class SubtaskRunner(Protocol):
    """Runs the subtasks of one segment, or returns their recorded deliverables."""

    @property
    def progress(self) -> SubtaskProgress: ...

    async def ensure_operation(self) -> None:
        """Make the task an operation, if it is not one yet, so that it can be resumed."""

    async def run(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run and record a subtask, or return its recorded deliverable."""

    async def save_progress(self, subtask: str, state: object) -> None:
        """Store the intermediate state of a running subtask."""

    def saved_progress(self, subtask: str) -> JsonValue:
        """The stored intermediate state of a subtask, or `None`."""


class StepRunner(Protocol):
    """Runs the steps of one segment, or returns their recorded results."""

    def call(
        self,
        name: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Coroutine[Any, Any, Any]:
        """Give the step its place now, and return what runs or replays it."""


class MemoryRunner(Protocol):
    """Executes an agent's commands on the working memory of its task."""

    @property
    def recovery(self) -> MemoryRecovery | None: ...

    async def execute(self, commands: Sequence[Command]) -> list[Answer]:
        """Execute commands atomically and in order; return their answers."""

    async def keys(self) -> list[str]:
        """The existing keys."""

    async def clear(self) -> None:
        """Replace the memory with an empty one, even if it is damaged."""


class SegmentTools(Protocol):
    """What a replica gives to the code of a segment. It is built when the code first uses it."""

    @property
    def place(self) -> tuple[int, int]:
        """The number of pauses before the segment, and the attempt of the operation."""

    def now(self, pauses: int) -> datetime:
        """The time at which code after `pauses` pauses runs, the same at each call.

        A segment that ran before a crash may have recorded it.
        """

    def use_subtasks(self) -> SubtaskRunner:
        """The runner of the segment's subtasks."""

    def use_steps(self) -> StepRunner:
        """The runner of the segment's steps."""

    def use_memory(self) -> MemoryRunner | None:
        """The working memory, or `None` once the segment has ended."""

    async def set_value(self, key: str, value: bytes) -> None:
        """Store a value of the task, as JSON.

        Raises:
            AgentMisbehaved: The task has too many values, or the segment has ended.
        """


def _find_none() -> None:
    return None


@dataclass(slots=True, eq=False)
class ContextRuntime:
    """What the replica attaches to a context for one segment.

    A segment keeps its own reference, because agent code may replace any attribute of its context.
    With slots, no method of an instance can be replaced either.

    Attributes:
        recorder: Answers peer calls. `None` unless the agent is a function agent.
        tools: Builds the subtasks, the steps and the working memory. `None` outside a replica.
        find_open_step: Returns the name of a step that was called and has not ended, or `None`.
        instant: What `ctx.now()` has returned since the last pause, or `None`.
        draws: How many random values were drawn so far, by place. `None` before the first.
        agent: The name of the agent. Empty outside a replica.
        generation: Number of the task's pauses before the segment.
        question_counts: How often the segment has used each name of a question, by subtask.
        directory: The peers that the agent may discover. `None` if it discovers none.
        wait_hint: The error of code that must not wait. `None` for the general one.
        max_fan_out: Maximum calls of one pause. `None` outside a replica.
        resources: What the agent's lifespan has yielded in this replica, or `None`.
        login: The login of the requester that the broker has verified. Set in the first segment.
        offers: The peers that were last offered to a model, by the subtask and the step that
            recorded them.
    """

    recorder: CallRecorder | None = None
    tools: SegmentTools | None = None
    find_open_step: Callable[[], str | None] = _find_none
    instant: datetime | None = None
    draws: dict[tuple[object, ...], int] | None = None
    agent: str = ""
    generation: int = 0
    question_counts: Counter[tuple[str | None, str]] = field(default_factory=Counter)
    directory: PeerDirectory | None = None
    wait_hint: str | None = None
    max_fan_out: int | None = None
    resources: Any = None
    login: str | None = None
    offers: dict[tuple[str | None, str], tuple[AgentCard, ...]] = field(default_factory=dict)

    @property
    def subtasks(self) -> SubtaskRunner | None:
        """Records subtasks. `None` outside a replica, where they are only called."""
        return None if self.tools is None else self.tools.use_subtasks()

    @property
    def steps(self) -> StepRunner | None:
        """Records steps. `None` outside a replica, where they are only called."""
        return None if self.tools is None else self.tools.use_steps()

    @property
    def memory(self) -> MemoryRunner | None:
        """The working memory. `None` outside a running segment."""
        return None if self.tools is None else self.tools.use_memory()

    def next_question(self, name: str, subtask: str | None) -> str:
        """The place of the next question with this name in the task, the same in every run.

        In a function agent, how often the name was used so far, in `subtask` if any. In other
        agents, also the segment.
        """
        self.question_counts[subtask, name] += 1
        scope = [] if subtask is None else [json_digest(subtask)[:12]]
        if self.recorder is None:
            scope.append(f"g{self.generation}")
        return ".".join([str(self.question_counts[subtask, name]), *scope])

    def prior_pause_count(self, generation: int) -> int:
        """Number of the task's pauses before the current code.

        Pauses inside subtasks of a function agent do not count, because a recorded subtask does
        not pause again after a resume.
        """
        return generation if self.recorder is None else self.recorder.position

    def skip_subtask_calls(self, subtask: str) -> None:
        """Skip the recorded peer calls of a subtask that is not run again."""
        if self.recorder is not None:
            self.recorder.skip_subtask(subtask)
