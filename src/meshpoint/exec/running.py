"""Run one attempt of a session and record its result."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from meshpoint.errors import MeshpointError
from meshpoint.exec.attempt import execute_attempt
from meshpoint.exec.embedded import ExecConfig
from meshpoint.exec.report import StepLog, StepReport
from meshpoint.exec.session import AttemptStatus, Session
from meshpoint.exec.sessions import LockedSession
from meshpoint.model.outcomes import Failed, FailureKind, Ok, Outcome
from meshpoint.model.secrets import masked
from meshpoint.model.subtasks import AgentCheckpoint


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """The result of an attempt.

    `checkpoint` is set if it did not complete and had begun a step.
    """

    session: Session
    attempt_number: int
    status: AttemptStatus
    outcome: Outcome
    steps: list[StepReport]
    checkpoint: AgentCheckpoint | None


async def run_attempt(config: ExecConfig, locked: LockedSession, log: StepLog, stop: asyncio.Event) -> AttemptResult:
    """Run one attempt of a session and record its result in the session.

    Raises:
        MeshpointError: The attempt has no outcome. The session has the reason.
    """
    entry = locked.begin_attempt()
    try:
        attempt_outcome = await execute_attempt(config, locked.session, log, stop)
    except MeshpointError as error:
        locked.end_attempt(AttemptStatus.FAILED, masked(str(error), config.secret_keys), log.finish(None))
        raise
    outcome = attempt_outcome.outcome
    if isinstance(outcome, Failed):
        outcome = replace(outcome, message=masked(outcome.message, config.secret_keys))
    steps = log.finish(outcome)
    locked.end_attempt(_attempt_status(outcome), outcome.message if isinstance(outcome, Failed) else None, steps)
    checkpoint = None if isinstance(outcome, Ok) else attempt_outcome.checkpoint
    return AttemptResult(locked.session, entry.number, _attempt_status(outcome), outcome, steps, checkpoint)


def _attempt_status(outcome: Outcome) -> AttemptStatus:
    match outcome:
        case Ok():
            return AttemptStatus.COMPLETED
        case Failed(kind=FailureKind.CANCELLED):
            return AttemptStatus.CANCELLED
        case _:
            return AttemptStatus.FAILED
