"""All errors, grouped by what the caller does next.

    MeshpointError
    ├── ConfigurationError      refuse to start: names the key and the fix
    ├── PoisonMessage           dead-letter the message, with the reason
    ├── Unavailable             wait and retry: nothing is lost, no reply is sent
    │   ├── BrokerUnavailable
    │   │   ├── QueueFull       the broker works, but the agent's request queue is full
    │   │   └── SendInDoubt     a request was not confirmed: repeat it with the same task id
    │   ├── StoreUnavailable    nothing was written
    │   │   ├── KeyMissing      a value is sealed with a key that this process lacks: names it
    │   │   └── CommitInDoubt   a COMMIT was sent but not confirmed: repeat with the same run id
    │   │       └── RowLocked   another session locks a row that this step needs: repeat the step
    │   └── MemoryUnavailable   retry the task later, or let the agent continue without memory
    │       └── MemoryLost      stored keys were lost: recover them from the last checkpoint
    ├── MemoryFenced            stop: another run of the task owns its working memory
    ├── CheckpointError
    │   └── IncompatibleState   park the task until another version of the agent continues it
    │       └── ReplayMismatch  a function agent made other calls than the recorded ones
    ├── ResumeRefused           an operation cannot be resumed: one class for each reason
    ├── SessionLocked           another process runs this session of `meshpoint exec`: says which
    ├── UnknownAgent            start the agent, or correct its name, the broker or the namespace
    ├── MeshClosed              connect again: the mesh was closed while a task was open
    ├── TaskNotFound            the task exists nowhere: correct its id, or send it
    ├── OutcomeUnknown          the reply was lost: check what the task did before you repeat it
    ├── TaskExists              a task with this id exists: choose another id, or attach
    ├── OtherRequester          connect with the name of the task's requester
    ├── TooManyFollowers        a stream has ended: call `updates` again, or `result`
    ├── QuestionNotOpen         no such question is open: correct the id, or answer later
    ├── AnswerRefused           an answer does not fit, or the question was answered before
    ├── SignalNotKept           no replica knows the task: correct its id, or send it again
    ├── SignalRefused           the task has ended, or has too many signals
    ├── TaskFailed              a task that `mesh.send` started ended without a result
    │   ├── TaskTimeout         at its deadline; also a `TimeoutError`
    │   └── TaskCancelled
    └── AgentFailed             answer with the error, then ack
        ├── InvalidInput        the request does not fit the agent's declared input
        ├── InvalidOutput       the agent's result does not fit its declared output
        ├── BudgetExceeded      the task has used its budget for a framework's model
        ├── AgentMisbehaved     the agent broke its contract (returned neither Paused nor Done, …)
        ├── MemoryRefused       the working memory cannot store a value, a key or this many bytes
        ├── ConsistencyError    no copy of the working memory matches the checkpoint: names keys
        ├── SubtaskFailed       a subtask failed, and the agent's code did not handle it
        ├── SubtaskRefused      a subtask cannot be recorded: its name, inputs or deliverable
        ├── StepFailed          a step failed, in this run or an earlier one
        └── PeerFailed          a peer call has no result, and the agent's code did not handle it

    NotJson(ValueError)         a value that a checkpoint cannot store, refused when it is set
    WaitTimeout(TimeoutError)   no answer or signal in time: ask again, or end with kind "timeout"
    InvalidOption(ValueError)   an option of `mesh.send` is invalid: names it; nothing was sent

Expected results (a lost claim, a partial join, a fenced write) are values, not exceptions.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from math import isnan
from typing import Protocol


class MeshpointError(Exception):
    """Base class of all errors that Meshpoint raises deliberately."""


_MAX_PART_LENGTH = 2_000
"""Characters. Errors quote user input and must stay readable."""


class ConfigurationError(MeshpointError):
    """The configuration cannot work.

    Attributes:
        key: The setting, entrypoint or argument that is wrong.
        problem: What is wrong with it.
        fix: What to write instead.
    """

    def __init__(self, key: str, problem: str, fix: str) -> None:
        key, problem = (
            text if len(text) <= _MAX_PART_LENGTH else f"{text[:_MAX_PART_LENGTH]}…"
            for text in (key, problem)
        )
        super().__init__(f"{key}: {problem}; {fix}")
        self.key, self.problem, self.fix = key, problem, fix


class PoisonMessage(MeshpointError):
    """A message that no retry can make readable."""


class Unavailable(MeshpointError):
    """A database or broker is unavailable for now. Retrying is safe."""


class BrokerUnavailable(Unavailable):
    """The broker did not accept or confirm the message."""


class QueueFull(BrokerUnavailable):
    """The request queue of an agent is full. The broker works: other agents are not affected."""


class SendInDoubt(BrokerUnavailable):
    """The broker did not confirm a request: the task may have started.

    Sending the same input again with `task_id` is safe.
    """

    def __init__(self, task_id: str, problem: str) -> None:
        super().__init__(f"{problem}; the task may have started: repeat with task_id={task_id!r}")
        self.task_id = task_id


class StoreUnavailable(Unavailable):
    """The database did not answer, and the transaction did not commit."""


class KeyMissing(StoreUnavailable):
    """A stored value is sealed with a key that this process does not have.

    A process with the key can read it, so nothing is lost.

    Attributes:
        key_id: The key.
        setting: The setting that must have it.
    """

    def __init__(self, key_id: str, setting: str, has_keys: bool = True) -> None:
        lacks = "does not have" if has_keys else "is not set to have"
        super().__init__(
            f"sealed with key {key_id}, which {setting} {lacks}: add that key to {setting}"
        )
        self.key_id, self.setting = key_id, setting


class CommitInDoubt(StoreUnavailable):
    """COMMIT was sent but not confirmed: the transaction may have committed."""


class RowLocked(CommitInDoubt):
    """Another session holds a lock on a row that this step needs.

    The database works, and other tasks are not affected. Part of the batch may have committed:
    repeat the whole call with the same values.
    """


class MemoryUnavailable(Unavailable):
    """The working memory cannot be read or written now.

    An agent may catch it and continue without memory. If not caught, it does not fail the task:
    the task is released, and resumes from its last checkpoint after a delay.
    """


class MemoryLost(MemoryUnavailable):
    """The working memory lost what the task stored: it was emptied, or keys were evicted."""


class MemoryFenced(MeshpointError):
    """Another run of the task owns its working memory. This run is a zombie.

    Nothing was changed.
    """


class CheckpointError(MeshpointError):
    """A checkpoint cannot be used as it is."""


class IncompatibleState(CheckpointError):
    """This version of the agent cannot continue the task. Another version may.

    `reason` is shown to operators. The error's text also has the `hint` for the agent's author.
    """

    def __init__(self, reason: str = "", hint: str = "") -> None:
        super().__init__(f"{reason}; {hint}" if hint else reason)
        self.reason = reason


class ReplayMismatch(IncompatibleState):
    """On resume, a function agent made another call than the recorded one."""


class ResumeRefused(MeshpointError):
    """An operation cannot be resumed. `operation_id` is the id that was requested."""

    def __init__(self, operation_id: str, problem: str) -> None:
        super().__init__(problem)
        self.operation_id = operation_id


class OperationNotFound(ResumeRefused):
    """No task has this id, or the task uses no subtasks or has no row in the database."""


class OperationRunning(ResumeRefused):
    """The operation is active: a replica runs it, or it waits for peers or for a slot."""


class OperationCompleted(ResumeRefused):
    """The operation has completed."""


class NoCheckpoint(ResumeRefused):
    """The operation has no checkpoint.

    It never began a subtask, or its process died in the first one.
    """


class OperationConflict(ResumeRefused):
    """The agent is exclusive, and another of its operations is active."""


class SessionLocked(MeshpointError):
    """Another process runs this session of `meshpoint exec`."""


class UnknownAgent(MeshpointError):
    """No replica of the agent has ever declared its queues in this namespace."""

    def __init__(self, agent: str) -> None:
        fix = (
            "start one with `meshpoint run`, "
            "or correct the agent's name, the broker or the namespace"
        )
        super().__init__(f"no agent {agent!r} in this mesh: {fix}")


class MeshClosed(MeshpointError):
    """The connection to the mesh was closed. The task is not affected."""


class TaskNotFound(MeshpointError):
    """No replica has a task with this id, and neither a queue nor the database has it."""

    def __init__(self, agent: str, task_id: str) -> None:
        super().__init__(
            f"no task {task_id!r} of {agent!r}: never sent, or it has ended and its outcome is "
            "not kept (mesh.send keeps outcomes for 7 days, mesh.call need not)"
        )
        self.agent, self.task_id = agent, task_id


class OutcomeUnknown(MeshpointError):
    """A task that this connection has sent exists nowhere any more, and its reply was lost."""

    def __init__(self, agent: str, task_id: str) -> None:
        super().__init__(
            f"the outcome of task {task_id!r} of {agent!r} is unknown: its reply was lost, or its "
            "request was removed; check what it did before you send it again (mesh.send keeps "
            "outcomes)"
        )
        self.agent, self.task_id = agent, task_id


class TaskExists(MeshpointError):
    """A task with this id exists, and `if_exists="reject"` was given: nothing was started.

    Without `may_attach`, it is a task of another requester or agent.
    """

    def __init__(
        self, agent: str, task_id: str, problem: str = "", *, may_attach: bool = True
    ) -> None:
        problem = problem or f"task {task_id!r} of {agent!r} exists"
        advice = ", or attach with mesh.task" if may_attach else f" than {task_id!r}"
        super().__init__(f"{problem}: choose another task_id{advice}")
        self.agent, self.task_id = agent, task_id


class OtherRequester(MeshpointError):
    """A task was requested under another name, and only this name may ask for its outcome."""

    def __init__(self, task_id: str, requester: str, name: str) -> None:
        super().__init__(
            f"task {task_id!r} belongs to {requester!r}, this client is {name!r}: "
            f'connect(name="{requester}")'
        )
        self.task_id, self.requester = task_id, requester


class TooManyFollowers(MeshpointError):
    """Four newer connections follow the task, so this one gets no more updates.

    `result` still waits. A minute later, `updates` may take the place of the oldest of them.
    """

    def __init__(self, agent: str, task_id: str) -> None:
        super().__init__(
            f"four newer connections follow task {task_id!r} of {agent!r}, so its updates end "
            "here; updates() continues them a minute later, and result() still waits"
        )
        self.agent, self.task_id = agent, task_id


class AgentFailed(MeshpointError):
    """Agent code failed. The requester receives the message.

    Args:
        args: The message.
        retryable: Whether a requester with a `RetryPolicy` may try again. `False` is final.
        retry_after: Minimum wait before the next attempt, in seconds or as a `timedelta`; at most
            a year. An invalid value is dropped, and the message says so.
    """

    retryable: bool = True
    retry_after: timedelta | float | None = None

    def __init__(
        self,
        *args: object,
        retryable: bool = True,
        retry_after: timedelta | float | None = None,
    ) -> None:
        super().__init__(*args)
        self.retryable, self.retry_after = retryable, retry_after


class InvalidInput(AgentFailed):
    """The request does not fit the agent's declared input."""


class InvalidOutput(AgentFailed):
    """The agent's result does not fit its declared output."""


class BudgetExceeded(AgentFailed):
    """The next request to a model would exceed the task's budget. Never retryable.

    Attributes:
        what: `"requests"`, `"tokens"` or `"cost"`.
        used: How much the task has used; NaN if its cost is unknown.
        limit: The budget, with what a person has added.
        note: More for the message.
    """

    def __init__(self, what: str, used: float, limit: float, note: str = "") -> None:
        text = f"budget exceeded: {what} {used:,.10g} of {limit:,.10g}"
        if isnan(used):
            text = "the budget cannot be checked"
        super().__init__(f"{text}: {note}" if note else text, retryable=False)
        self.what, self.used, self.limit, self.note = what, used, limit, note


class AgentMisbehaved(AgentFailed):
    """The agent broke its contract."""


class MemoryRefused(AgentFailed):
    """The working memory cannot store this, or does not contain what the agent expects.

    The message names the key.
    """


class ConsistencyError(AgentFailed):
    """The contents of a working memory or a snapshot differ from the stored contents.

    An agent sees it when no copy of the memory matches the last checkpoint. It may catch the error
    and call `ctx.memory.clear()` to start with an empty memory. If not caught, the task fails, and
    its operation can be resumed.

    Attributes:
        missing: Keys that are missing.
        extra: Keys that should not exist.
        changed: Keys whose values differ.
    """

    def __init__(
        self,
        summary: str,
        *,
        missing: Sequence[str] = (),
        extra: Sequence[str] = (),
        changed: Sequence[str] = (),
    ) -> None:
        kinds = {"missing": missing, "extra": extra, "changed": changed}
        found = [f"{kind}: {_format_keys(keys)}" for kind, keys in kinds.items() if keys]
        super().__init__("; ".join([summary, *found]))
        self.missing, self.extra, self.changed = tuple(missing), tuple(extra), tuple(changed)


def _format_keys(keys: Sequence[str], limit: int = 10) -> str:
    named = ", ".join(repr(key) for key in keys[:limit])
    return named if len(keys) <= limit else f"{named} and {len(keys) - limit} more"


class SubtaskRefused(AgentFailed):
    """A subtask cannot be recorded, and nothing of it was marked as done.

    The message names the subtask and the fix.
    """


class SubtaskFailed(AgentFailed):
    """A subtask failed in an earlier run of this attempt, and its error cannot be recreated."""


class StepFailed(AgentFailed):
    """The function of a `ctx.step` failed, or its result cannot be recorded.

    The first run and every later one raise this same error.

    Attributes:
        step: Name of the step.
        error_type: Class name of the error that the function raised.
        message: Its message, for people.
        kind: `"error"`, or `"timeout"` if the limit of `@step(timeout=)` has passed.
    """

    def __init__(self, step: str, error_type: str, message: str, kind: str = "error") -> None:
        super().__init__(f"step {step!r} failed: {error_type}: {message}")
        self.step, self.error_type, self.message, self.kind = step, error_type, message, kind


class _FailureLike(Protocol):
    """The attributes of a `Failed` that `PeerFailed` needs."""

    @property
    def kind(self) -> str: ...

    @property
    def message(self) -> str: ...


class QuestionNotOpen(MeshpointError):
    """No open question has this id: it was never asked, or its task has continued or ended."""


class AnswerRefused(MeshpointError):
    """The answer was not recorded: it does not fit, or the question was answered before."""


class SignalNotKept(MeshpointError):
    """No replica has accepted the signal. Sending it again with its id is safe."""


class SignalRefused(MeshpointError):
    """The task does not accept the signal: it has ended, or has too many signals."""


class WaitTimeout(TimeoutError):
    """A question was not answered, or no signal arrived, in time.

    A task that does not handle it fails with kind "timeout".
    """


class PeerFailed(AgentFailed):
    """A peer call has no result, or a question was rejected.

    `outcome` is its `Failed`: branch on `outcome.kind`, show `outcome.message` to people.
    """

    def __init__(self, peer: str, outcome: _FailureLike, what: str = "peer") -> None:
        super().__init__(f"{what} {peer!r}: {outcome.kind}: {outcome.message}")
        self.peer, self.outcome = peer, outcome


class TaskFailed(MeshpointError):
    """A task has no result.

    `outcome` is its `Failed`: branch on `kind`, show `message` to people.

    Attributes:
        agent: Name of the agent.
        task_id: Id of the task.
        outcome: How the task ended.
    """

    def __init__(self, agent: str, task_id: str, outcome: _FailureLike) -> None:
        super().__init__(f"task {task_id!r} of {agent!r}: {outcome.kind}: {outcome.message}")
        self.agent, self.task_id, self.outcome = agent, task_id, outcome

    @property
    def kind(self) -> str:
        """The `FailureKind` of the outcome."""
        return self.outcome.kind

    @property
    def message(self) -> str:
        """The message of the outcome."""
        return self.outcome.message


class TaskTimeout(TaskFailed, TimeoutError):
    """The task did not end before its deadline."""


class TaskCancelled(TaskFailed):
    """The task was cancelled."""


class InvalidOption(MeshpointError, ValueError):
    """An option of a request is invalid. The message names it, and nothing was sent."""


class NotJson(MeshpointError, ValueError):
    """A context or `metadata` got a value that is not JSON. The message names its key."""


class Interrupted(KeyboardInterrupt):
    """A person's signal that ends all running code, including agent code.

    Raised only by a signal handler.
    """


NON_DEFECT_ERRORS = (Unavailable, ConfigurationError)
"""Errors that are not the fault of a single message. Any other error in a handler is a defect."""
