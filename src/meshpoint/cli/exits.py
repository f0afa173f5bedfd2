"""Exit codes, for scripts."""

from __future__ import annotations

from enum import IntEnum

from meshpoint.errors import (
    BrokerUnavailable,
    ConfigurationError,
    MeshpointError,
    NoCheckpoint,
    OperationCompleted,
    OperationConflict,
    OperationNotFound,
    OperationRunning,
    QueueFull,
    SessionLocked,
    StoreUnavailable,
    Unavailable,
)


class ExitCode(IntEnum):
    """How a command ended."""

    OK = 0
    ERROR = 1
    CONFIGURATION = 2  # also a command line that cannot be read
    UNAVAILABLE = 3  # the database or the broker is away
    FAILED = 4  # the task failed
    CANCELLED = 5  # the task was cancelled
    NO_ANSWER = 6  # no answer in time; the task may still end
    HELD = 7  # another process runs this session
    ABANDONED = 8  # the drain timed out while agent code was still running
    NOT_FOUND = 10  # why an operation is not resumed, in the order of the checks
    RUNNING = 11
    COMPLETED = 12
    NO_CHECKPOINT = 13
    OTHER_ACTIVE = 14
    INTERRUPTED = 130


def exit_code_for(error: MeshpointError) -> ExitCode:
    """The exit code for `error`."""
    match error:
        case ConfigurationError():
            return ExitCode.CONFIGURATION
        case Unavailable():
            return ExitCode.UNAVAILABLE
        case OperationNotFound():
            return ExitCode.NOT_FOUND
        case OperationRunning():
            return ExitCode.RUNNING
        case OperationCompleted():
            return ExitCode.COMPLETED
        case NoCheckpoint():
            return ExitCode.NO_CHECKPOINT
        case OperationConflict():
            return ExitCode.OTHER_ACTIVE
        case SessionLocked():
            return ExitCode.HELD
        case _:
            return ExitCode.ERROR


def describe_error(error: MeshpointError) -> str:
    """What to print of `error`: for a server that is away, also the setting that says where it is."""
    match error:
        case QueueFull():
            return str(error)  # The broker does answer.
        case BrokerUnavailable():
            return f"the broker does not answer: {error}; check that it runs and that mesh.broker_url is right"
        case StoreUnavailable():
            return f"the database does not answer: {error}; check that it runs and that session_db_url is right"
        case _:
            return str(error)
