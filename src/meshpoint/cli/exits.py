"""Exit codes and error messages of the command line."""

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
    """The result of a command, for scripts."""

    OK = 0
    ERROR = 1
    CONFIGURATION = 2  # also for an invalid command line
    UNAVAILABLE = 3  # the database or the broker is unavailable
    FAILED = 4  # the task failed
    CANCELLED = 5  # the task was cancelled
    NO_ANSWER = 6  # no answer in time; the task may still complete
    HELD = 7  # another process runs this session
    ABANDONED = 8  # the drain timed out while agent code was still running
    REPEATS = 9  # a dry run: steps with a result would run again
    NOT_FOUND = 10  # 10 to 14: why an operation is not resumed, in the order of the checks
    RUNNING = 11
    COMPLETED = 12
    NO_CHECKPOINT = 13
    OTHER_ACTIVE = 14
    WARNINGS = 15  # doctor: a person should look at the findings before the deploy
    UNDEPLOYABLE = 16  # doctor: replicas would not start, or would not work
    INTERRUPTED = 130


_CODES: dict[type[MeshpointError], ExitCode] = {
    ConfigurationError: ExitCode.CONFIGURATION,
    Unavailable: ExitCode.UNAVAILABLE,
    OperationNotFound: ExitCode.NOT_FOUND,
    OperationRunning: ExitCode.RUNNING,
    OperationCompleted: ExitCode.COMPLETED,
    NoCheckpoint: ExitCode.NO_CHECKPOINT,
    OperationConflict: ExitCode.OTHER_ACTIVE,
    SessionLocked: ExitCode.HELD,
}


def exit_code_for(error: MeshpointError) -> ExitCode:
    """Return the exit code for `error`."""
    return next((code for kind, code in _CODES.items() if isinstance(error, kind)), ExitCode.ERROR)


def describe_error(error: MeshpointError) -> str:
    """Return the message for `error`. For an unavailable server, it names the setting to check."""
    match error:
        case QueueFull():
            return str(error)  # the broker does answer
        case BrokerUnavailable():
            server, setting = "broker", "mesh.broker_url"
        case StoreUnavailable():
            server, setting = "database", "its URL"
        case _:
            return str(error)
    return (
        f"the {server} does not answer: {error}; "
        f"check that it is running and that {setting} is correct"
    )
