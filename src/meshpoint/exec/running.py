"""One call of `meshpoint exec`, from the chosen session to what is told of its attempt."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace

from meshpoint.errors import MeshpointError
from meshpoint.exec.attempt import attempt
from meshpoint.exec.embedded import Exec
from meshpoint.exec.report import StepLog, StepReport
from meshpoint.exec.session import Ending, Session
from meshpoint.exec.sessions import HeldSession
from meshpoint.model.outcomes import Failed, FailureKind, Ok, Outcome
from meshpoint.model.secrets import masked
from meshpoint.model.subtasks import AgentCheckpoint


@dataclass(frozen=True, slots=True)
class Finished:
    """What is to be told of an attempt. `checkpoint` is there if it did not complete and had begun a step."""

    session: Session
    number: int
    ending: Ending
    outcome: Outcome
    steps: list[StepReport]
    checkpoint: AgentCheckpoint | None


async def run_attempt(run: Exec, held: HeldSession, log: StepLog, stop: asyncio.Event) -> Finished:
    """Run one attempt of a session, and write into the session what became of it.

    Raises:
        MeshpointError: it came to no outcome; the session says why.
    """
    entry = held.begin()
    try:
        ended = await attempt(run, held.session, log, stop)
    except MeshpointError as error:
        held.end(Ending.FAILED, masked(str(error), run.secret_keys), log.ended(None))
        raise
    outcome = ended.outcome
    if isinstance(outcome, Failed):
        outcome = replace(outcome, message=masked(outcome.message, run.secret_keys))
    steps = log.ended(outcome)
    held.end(_ending(outcome), outcome.message if isinstance(outcome, Failed) else None, steps)
    checkpoint = None if isinstance(outcome, Ok) else ended.checkpoint
    return Finished(held.session, entry.number, _ending(outcome), outcome, steps, checkpoint)


def _ending(outcome: Outcome) -> Ending:
    match outcome:
        case Ok():
            return Ending.COMPLETED
        case Failed(kind=FailureKind.CANCELLED):
            return Ending.CANCELLED
        case _:
            return Ending.FAILED
