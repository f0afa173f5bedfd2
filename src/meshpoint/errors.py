"""What can go wrong, grouped by what the caller does next.

    MeshpointError
    ├── ConfigurationError      refuse to start: names the key and the fix
    ├── PoisonMessage           reject: the delivery goes to the dead-letter queue with the reason
    ├── Unavailable             wait and retry: nothing is lost, nothing is answered
    │   ├── BrokerUnavailable
    │   │   └── QueueFull       the broker works, but the agent's request queue takes no more for now
    │   ├── StoreUnavailable    nothing was written
    │   │   └── CommitInDoubt   a COMMIT was sent and its answer lost: repeat with the same run id
    │   │       └── RowLocked   another session holds a row that this step needs: repeat it, the database works
    │   └── MemoryUnavailable   the working memory cannot be had now: the task goes on later, or the agent without it
    │       └── MemoryLost      it lost what the task has put there; the task's last checkpoint has it
    ├── MemoryFenced            stop: another run of the task owns its working memory
    ├── CheckpointError
    │   └── IncompatibleState   give the task back for another replica; park it after a limit
    ├── ResumeRefused           an operation cannot be resumed: one class for each reason
    ├── SessionLocked             another process runs this session of `meshpoint exec`: says which
    └── AgentFailed             answer with the error, then ack
        ├── InvalidInput        the request does not fit the agent's declared input
        ├── InvalidOutput       the agent's result does not fit its declared output
        ├── AgentMisbehaved     the agent broke its contract (returned neither Paused nor Done, …)
        ├── MemoryRefused       a value, a key or a size that the working memory cannot keep
        ├── ConsistencyError    no place has the working memory as it was kept: names the keys
        ├── SubtaskFailed       a subtask had failed, and the agent's code did not expect that
        ├── SubtaskRefused      a subtask cannot be recorded: its name, its inputs or its deliverable
        ├── PeerFailed          a peer call has no result, and the agent's code did not expect that
        └── ReplayMismatch      a function agent took another path than the one recorded

    NotJson(ValueError)         a value that a checkpoint cannot keep, refused when it is set

Expected results (a lost claim, a partial join, a fenced write) are values, not exceptions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class MeshpointError(Exception):
    """Any error that Meshpoint raises on purpose."""


_MAX_PART_LENGTH = 2_000
"""Characters: an error quotes what somebody wrote, and stays readable."""


class ConfigurationError(MeshpointError):
    """The configuration cannot work. `key` names the setting, `fix` what to write instead."""

    def __init__(self, key: str, problem: str, fix: str) -> None:
        key, problem = (
            text if len(text) <= _MAX_PART_LENGTH else f"{text[:_MAX_PART_LENGTH]}…" for text in (key, problem)
        )
        super().__init__(f"{key}: {problem}; {fix}")
        self.key, self.problem, self.fix = key, problem, fix


class PoisonMessage(MeshpointError):
    """A message that no retry can make readable."""


class Unavailable(MeshpointError):
    """A database or broker is away for now."""


class BrokerUnavailable(Unavailable):
    """The broker did not take or confirm the message."""


class QueueFull(BrokerUnavailable):
    """The request queue of an agent is full. The broker works: other agents are not affected."""


class StoreUnavailable(Unavailable):
    """The database did not answer; the transaction certainly did not commit."""


class CommitInDoubt(StoreUnavailable):
    """COMMIT was sent and its answer lost: the transaction may have committed."""


class RowLocked(CommitInDoubt):
    """Another session holds a lock on a row that this step needs. The database works: other tasks are not affected.

    Part of the batch may have committed. Repeat the whole call with the same values.
    """


class MemoryUnavailable(Unavailable):
    """The working memory cannot be read or written now.

    An agent may catch it and go on without. Where it passes, the task is given back and goes on from its last
    checkpoint in a while: it does not fail.
    """


class MemoryLost(MemoryUnavailable):
    """The working memory no longer has what the task has put there: it was emptied, or keys were evicted."""


class MemoryFenced(MeshpointError):
    """Another run of the task owns its working memory by now: this one is a zombie and changed nothing."""


class CheckpointError(MeshpointError):
    """A checkpoint cannot be used as it is."""


class IncompatibleState(CheckpointError):
    """This version of the agent cannot read the state; another replica may."""


class ResumeRefused(MeshpointError):
    """An operation cannot be resumed. `operation_id` is the one that was asked for."""

    def __init__(self, operation_id: str, problem: str) -> None:
        super().__init__(problem)
        self.operation_id = operation_id


class OperationNotFound(ResumeRefused):
    """There is no such task, or none that uses subtasks or has left a row."""


class OperationRunning(ResumeRefused):
    """A replica runs it, or will: it waits for peers or for a slot."""


class OperationCompleted(ResumeRefused):
    """It has ended well."""


class NoCheckpoint(ResumeRefused):
    """It has no checkpoint: it never began a subtask, or its process died in the first one."""


class OperationConflict(ResumeRefused):
    """Its agent is exclusive, and another operation of it is active."""


class SessionLocked(MeshpointError):
    """Another process runs this session of `meshpoint exec`."""


class AgentFailed(MeshpointError):
    """Agent code failed; the requester gets the message."""


class InvalidInput(AgentFailed):
    """The request does not fit the agent's declared input."""


class InvalidOutput(AgentFailed):
    """The agent's result does not fit its declared output."""


class AgentMisbehaved(AgentFailed):
    """The agent broke its contract."""


class MemoryRefused(AgentFailed):
    """The working memory cannot keep this, or is not what the agent takes it for. The message names the key."""


class ConsistencyError(AgentFailed):
    """A memory, or a snapshot of it, is not what was kept. Names the keys that are missing, too many or changed.

    An agent meets it when no place has the memory as its last checkpoint had it. It may catch it, and call
    `ctx.memory.clear()` to begin anew. Where it passes, the task fails, and its operation can be resumed.
    """

    def __init__(
        self, summary: str, *, missing: Sequence[str] = (), extra: Sequence[str] = (), changed: Sequence[str] = ()
    ) -> None:
        kinds = {"missing": missing, "extra": extra, "changed": changed}
        found = [f"{kind}: {_format_keys(keys)}" for kind, keys in kinds.items() if keys]
        super().__init__("; ".join([summary, *found]))
        self.missing, self.extra, self.changed = tuple(missing), tuple(extra), tuple(changed)


def _format_keys(keys: Sequence[str], limit: int = 10) -> str:
    named = ", ".join(repr(key) for key in keys[:limit])
    return named if len(keys) <= limit else f"{named} and {len(keys) - limit} more"


class SubtaskRefused(AgentFailed):
    """A subtask cannot be recorded; nothing of it was marked as done. The message names it and the fix."""


class SubtaskFailed(AgentFailed):
    """A subtask failed in an earlier run of this attempt, with an error that cannot be made again from its record."""


class FailureLike(Protocol):
    """What `PeerFailed` needs of a `Failed`."""

    @property
    def kind(self) -> str: ...

    @property
    def message(self) -> str: ...


class PeerFailed(AgentFailed):
    """A peer call has no result. `outcome` is its `Failed`: `kind` is for code, `message` for people."""

    def __init__(self, peer: str, outcome: FailureLike) -> None:
        super().__init__(f"peer {peer!r}: {outcome.kind}: {outcome.message}")
        self.peer, self.outcome = peer, outcome


class ReplayMismatch(AgentFailed):
    """On resume, a function agent asked for another call than the one recorded at that place."""


class NotJson(MeshpointError, ValueError):
    """A value that is not JSON was set on a context; the message names its key."""


class Interrupted(KeyboardInterrupt):
    """A person's signal that ends all running code, including agent code. Raised only by a signal handler."""


NON_DEFECT_ERRORS = (Unavailable, ConfigurationError)
"""Errors that are not the fault of a single message; anything else that a room raises is a defect."""
