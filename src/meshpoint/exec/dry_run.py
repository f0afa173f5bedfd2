"""Forecast an attempt: which steps would run, which would be reused, and why.

Nothing runs and nothing is written. The forecast can therefore compare the functions of steps with
the recorded ones, but cannot compute their arguments. These are the same if neither the input nor
the source of the flow has changed since the last attempt; otherwise the forecast is not certain.
The input is checked against the type that the agent declares.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, JsonValue

from meshpoint.errors import InvalidInput, SessionLocked
from meshpoint.exec.checkpoint_file import CheckpointDocument
from meshpoint.exec.embedded import ExecConfig
from meshpoint.exec.flows import StepFunctions
from meshpoint.exec.importing import restore_records
from meshpoint.exec.session import AttemptStatus, Session, SessionSpec
from meshpoint.exec.sessions import SessionStore, check_entrypoint
from meshpoint.model.operations import OperationStatus
from meshpoint.model.secrets import mask_secrets
from meshpoint.model.subtasks import SubtaskRecord, SubtaskStatus
from meshpoint.ports.agent import ChecksInput, list_versions
from meshpoint.subtasks.dependencies import version_with_uses
from meshpoint.subtasks.migrating import migrate_checkpoint
from meshpoint.subtasks.validity import describe_change

_INPUT_CHANGED = "unless an argument differs: the input has changed"
_FLOW_CHANGED = "unless an argument differs: the flow has changed"
_FLOW_UNKNOWN = "unless an argument differs: the earlier source of the flow is unknown"
_FUNCTION_UNKNOWN = "unless its function has changed, which is unknown before it runs"


class StepAction(StrEnum):
    """What an attempt would do with a step."""

    REUSE = "reuse"
    RUN = "run"


class StepForecast(BaseModel, extra="forbid", frozen=True):
    """The forecast for one step.

    Attributes:
        again: Whether the step would run although it has a result.
        certain: Whether only the time, random values or the environment can make the attempt
            differ.
        why: The reason, or what the forecast depends on.
    """

    name: str
    action: StepAction
    again: bool = False
    certain: bool = True
    why: str | None = None


@dataclass(frozen=True, slots=True)
class Forecast:
    """The forecast for an attempt.

    Attributes:
        session: The session that it would continue; `None` for a new one.
        attempt: Its number in that session.
        input_changed: Whether its input differs from the last attempt's.
        flow_changed: Whether the source of the flow differs; `None` if unknown.
        refusal: Why the agent would refuse the input, so that no step would run.
    """

    session: str | None
    attempt: int
    input_changed: bool
    flow_changed: bool | None
    steps: list[StepForecast]
    refusal: str | None

    @property
    def repeats_steps(self) -> bool:
        """Whether a step with a result would run again."""
        return any(step.again for step in self.steps)

    @property
    def is_certain(self) -> bool:
        """Whether the forecast of every step is certain."""
        return all(step.certain for step in self.steps)


@dataclass(frozen=True, slots=True)
class _Past:
    """What the attempt would continue."""

    session: Session | None
    input: JsonValue
    records: Sequence[SubtaskRecord] = ()
    reasons: Mapping[str, str] | None = None
    has_completed: bool = False
    input_changed: bool = False
    flow_changed: bool | None = None


async def forecast_session(
    config: ExecConfig,
    sessions: SessionStore,
    spec: SessionSpec,
    *,
    resume: bool = False,
    session_id: str | None = None,
) -> Forecast:
    """Forecast an attempt of the newest session, of a given one, or of a new one.

    Raises:
        ConfigurationError: The session belongs to another agent, or an input is missing.
        OperationNotFound: There is nothing to resume.
        OperationCompleted: The newest session has completed.
        SessionLocked: Another process runs the session.
    """
    session = sessions.require_latest(spec) if resume else None
    if session_id is not None:
        session = sessions.find(session_id)
    if session is None:
        return _forecast(config, _Past(None, spec.required_input.value))
    check_entrypoint(session, spec)
    if (holder := sessions.lock_holder(session.id)) is not None:
        raise SessionLocked(f"session {session.id} is in use by {holder}; wait for it or end it")
    return _forecast(config, await _read_past(config, sessions, spec, session))


async def forecast_import(
    config: ExecConfig, sessions: SessionStore, spec: SessionSpec, document: CheckpointDocument
) -> Forecast:
    """Forecast the first attempt of a session that continues an exported checkpoint.

    Raises:
        IncompatibleState: No migration leads from the checkpoint to this version of the agent.
    """
    checkpoint, reasons = await restore_records(config, sessions, document)
    exported = next((each for each in sessions.list_all() if each.id == document.session), None)
    past = _Past(
        None,
        spec.required_input.value,
        checkpoint.subtasks,
        reasons,
        input_changed=document.input_digest not in {None, spec.required_input.digest},
        flow_changed=None if exported is None else _has_flow_changed(config, sessions, exported),
    )
    return _forecast(config, past)


async def _read_past(
    config: ExecConfig, sessions: SessionStore, spec: SessionSpec, session: Session
) -> _Past:
    agent_input = session.input if spec.input is None else spec.input.value
    if session.last_status is AttemptStatus.COMPLETED or not config.store_file.exists():
        return _Past(session, agent_input)
    async with config.open_store(session.namespace) as store:
        checkpoint = await store.latest(session.operation_id, config.agent_name)
        operation = await store.operation(session.operation_id)
    if checkpoint is not None:
        plan = config.plan
        checkpoint = migrate_checkpoint(checkpoint, plan.version, plan.migrations)
    return _Past(
        session,
        agent_input,
        () if checkpoint is None else checkpoint.subtasks,
        session.again,
        has_completed=operation is not None and operation.status is OperationStatus.COMPLETED,
        input_changed=spec.input is not None and spec.input.digest != session.input_digest,
        flow_changed=_has_flow_changed(config, sessions, session),
    )


def _has_flow_changed(config: ExecConfig, sessions: SessionStore, session: Session) -> bool | None:
    version = session.last_flow
    kept = {} if version is None else sessions.flow_versions(session.id).read(version)
    return kept != dict(config.sources) if kept else None


def _forecast(config: ExecConfig, past: _Past) -> Forecast:
    doubt = _FLOW_UNKNOWN if past.flow_changed is None else None
    doubt = _FLOW_CHANGED if past.flow_changed else doubt
    doubt = _INPUT_CHANGED if past.input_changed else doubt
    if past.has_completed:
        why = "the operation has already completed"
        steps = [
            StepForecast(name=name, action=StepAction.REUSE, why=why)
            for name in config.plan.subtasks
        ]
    else:
        steps = forecast_steps(
            past.records,
            config.plan.subtasks,
            past.reasons or {},
            StepFunctions(config.agent).find,
            doubt,
        )
    attempts = 0 if past.session is None else len(past.session.attempts)
    session_id = None if past.session is None else past.session.id
    refusal = None if past.has_completed else _find_refusal(config, past.input)
    return Forecast(
        session_id, attempts + 1, past.input_changed, past.flow_changed, steps, refusal
    )


def _find_refusal(config: ExecConfig, agent_input: JsonValue) -> str | None:
    newest = list_versions(config.agent)[0]
    if not isinstance(newest, ChecksInput):
        return None
    try:
        newest.check_input(agent_input)
    except InvalidInput as error:
        return mask_secrets(str(error), config.secret_keys)
    return None


def forecast_steps(
    records: Iterable[SubtaskRecord],
    planned: Iterable[str],
    reasons: Mapping[str, str],
    find_function: Callable[[str], Callable[..., Any] | None],
    doubt: str | None,
) -> list[StepForecast]:
    """Forecast each step, by the rules of `meshpoint.subtasks.validity` for a new attempt.

    Args:
        records: The steps of the last checkpoint, in order.
        planned: The steps that the agent declares.
        reasons: Why steps must run again, by step.
        find_function: Returns the current function of a step; `None` if unknown.
        doubt: Why the arguments of the steps may differ; `None` if they cannot.
    """
    steps: list[StepForecast] = []
    repeated: str | None = None
    for record in records:
        if repeated is None:
            step = _forecast_step(record, reasons, find_function, doubt)
            repeated = step.name if step.again else None
        else:
            why = f"after {repeated!r}, which runs again"
            step = StepForecast(
                name=record.name, action=StepAction.RUN, again=record.completed, why=why
            )
        steps.append(step)
    known = {step.name for step in steps}
    steps += [
        StepForecast(name=name, action=StepAction.RUN, why=reasons.get(name, "it has no result"))
        for name in dict.fromkeys([*planned, *reasons])
        if name not in known
    ]
    return steps


def _forecast_step(
    record: SubtaskRecord,
    reasons: Mapping[str, str],
    find_function: Callable[[str], Callable[..., Any] | None],
    doubt: str | None,
) -> StepForecast:
    if (why := _reason_to_run(record, reasons)) is not None:
        return StepForecast(
            name=record.name, action=StepAction.RUN, again=record.completed, why=why
        )
    if record.function is None and not record.inputs:
        return StepForecast(name=record.name, action=StepAction.REUSE)  # a migration accepted it
    function = find_function(record.name)
    if record.function is not None and function is not None:
        change = describe_change(record.function, version_with_uses(function))
        if change is not None:
            return StepForecast(name=record.name, action=StepAction.RUN, again=True, why=change)
        return _reuse(record, doubt)
    # The same source has the same functions.
    return _reuse(record, None if doubt is None else _FUNCTION_UNKNOWN)


def _reason_to_run(record: SubtaskRecord, reasons: Mapping[str, str]) -> str | None:
    if record.name in reasons:
        return reasons[record.name]
    match record.status:
        case SubtaskStatus.COMPLETED:
            return "its deliverable is missing" if record.result is None else None
        case SubtaskStatus.FAILED:
            return "it failed"
        case SubtaskStatus.OUTDATED:
            return record.again
        case SubtaskStatus.STARTED:
            return "it has not finished"


def _reuse(record: SubtaskRecord, doubt: str | None) -> StepForecast:
    return StepForecast(
        name=record.name, action=StepAction.REUSE, certain=doubt is None, why=doubt
    )
