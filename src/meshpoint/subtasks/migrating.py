"""Checkpoints of an earlier version of an agent, made readable for this one by functions that its author wrote."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any, TypeAlias

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from meshpoint.errors import ConfigurationError, IncompatibleState, NotJson
from meshpoint.model.json_values import check_json
from meshpoint.model.subtasks import AgentCheckpoint, Migration, SubtaskRecord, SubtaskStatus
from meshpoint.model.typed import cause_of, first_problem
from meshpoint.subtasks.deliverable import json_text
from meshpoint.subtasks.secret_values import places_of, values_at

Public: TypeAlias = dict[str, Any]

_KEY = "migrations"


class _Form(BaseModel):
    """What a migration has to return: every key, and no other one."""

    model_config = ConfigDict(extra="forbid", strict=True)

    completed_subtasks: list[str]
    pending_subtasks: list[str]
    interim_results: dict[str, JsonValue]
    saved_progress: dict[str, JsonValue]
    subject: str | None
    agent_config: dict[str, JsonValue]
    agent_version: str | None
    retry_count: int


class _Wrong(Exception):
    """What a migration returned cannot become a checkpoint."""


def migrates(from_version: str, to_version: str) -> Callable[[Callable[[Public], Public]], Migration]:
    """Make a function the migration of an agent's checkpoints from one version to the next.

        @migrates("1.0", "1.1")
        def parsing_is_called_filing(checkpoint: dict) -> dict:
            checkpoint["completed_subtasks"] = ["filing", *checkpoint["completed_subtasks"][1:]]
            checkpoint["interim_results"]["filing"] = checkpoint["interim_results"].pop("10k_parsing")
            return checkpoint

    The function gets a dict of its own, which it may change, and returns one with exactly these keys:

    - `completed_subtasks`: names in the order in which they were begun; `pending_subtasks`: the others, in order.
    - `interim_results`: by name, the deliverable of each completed subtask, as plain JSON.
    - `saved_progress`: by name, what a subtask saved within itself, as plain JSON; only of subtasks listed above.
    - `subject`, `agent_config` (a dict), `agent_version` (set for it, whatever it returns), `retry_count`.

    It may rename, drop, add and change entries. It vouches for the results: a subtask that it lists as completed does
    not run again because its function is another one now. If its name is an old one, it does when its inputs differ;
    a new name is accepted with any inputs. What a subtask set on the task's context follows its name; if that is
    gone, its unchanged result, or else its place, when as many are completed as before.
    """
    return lambda function: Migration(from_version, to_version, function)


def checked(migrations: Iterable[Migration]) -> tuple[Migration, ...]:
    """`migrations`, of which it is clear what leads where.

    Raises:
        ConfigurationError: two have the same versions, they go round in a circle, or one is no migration.
    """
    found = tuple(migrations)
    for migration in found:
        if not isinstance(migration, Migration):
            problem = f"{getattr(migration, '__name__', migration)!r} is no migration"
            raise ConfigurationError(_KEY, problem, 'write @migrates("1.0", "1.1") above it')
    twice = [link for link, count in Counter(map(_link, found)).items() if count > 1]
    if twice:
        raise ConfigurationError(_KEY, f"two lead {_told(twice[0])}", "leave one of them out")
    leads_to: dict[str, list[str]] = {}
    for migration in found:
        leads_to.setdefault(migration.from_version, []).append(migration.to_version)
    try:
        TopologicalSorter(leads_to).prepare()
    except CycleError as error:
        circle = " -> ".join(reversed(error.args[1]))
        raise ConfigurationError(_KEY, f"they go round in a circle: {circle}", "leave one of them out") from error
    return found


def migrated(checkpoint: AgentCheckpoint, to: str | None, migrations: Sequence[Migration]) -> AgentCheckpoint:
    """`checkpoint` as version `to` of its agent reads it; itself, if it is of that version, or of none.

    The shortest way through the migrations is taken, and of two of the same length the one listed first. What is
    stored is not touched: whoever goes on writes the next checkpoint in the new version.

    Raises:
        IncompatibleState: no migrations lead there, or one of them raised or returned what is no checkpoint.
    """
    if to is None or checkpoint.agent_version is None or checkpoint.agent_version == to:
        return checkpoint
    public = _public(checkpoint)
    for migration in _way(checkpoint.agent, checkpoint.agent_version, to, migrations):
        public = _applied(migration, public, checkpoint.agent)
    return _rebuilt(checkpoint, public)


# ── the way ────────────────────────────────────────────────────────────────────────────────────────


def _way(agent: str, start: str, to: str, migrations: Sequence[Migration]) -> list[Migration]:
    ways = _ways(start, migrations)
    if to not in ways:
        back = _ways(to, [Migration(each.to_version, each.from_version, each.function) for each in migrations])
        there = f"there is {', '.join(map(_arrow, migrations))}" if migrations else "there are none"
        missing = f'write @migrates("{list(ways)[-1]}", "{list(back)[-1]}")'
        raise IncompatibleState(f"agent {agent!r}: no migration leads from {start} to {to}; {there}; {missing}")
    return ways[to]


def _ways(start: str, migrations: Sequence[Migration]) -> dict[str, list[Migration]]:
    """A shortest way to each version that can be reached, the farthest last."""
    ways: dict[str, list[Migration]] = {start: []}
    waiting = deque([start])
    while waiting:
        version = waiting.popleft()
        for migration in migrations:
            if migration.from_version == version and migration.to_version not in ways:
                ways[migration.to_version] = [*ways[version], migration]
                waiting.append(migration.to_version)
    return ways


def _link(migration: Migration) -> tuple[str, str]:
    return migration.from_version, migration.to_version


def _arrow(migration: Migration) -> str:
    return " -> ".join(_link(migration))


def _told(link: tuple[str, str]) -> str:
    return f"from {link[0]} to {link[1]}"


# ── one step ───────────────────────────────────────────────────────────────────────────────────────


def _public(checkpoint: AgentCheckpoint) -> Public:
    progress = checkpoint.progress
    return {
        "completed_subtasks": list(progress.completed),
        "pending_subtasks": list(progress.pending),
        "interim_results": {each.name: _result(each) for each in checkpoint.subtasks if each.completed},
        "saved_progress": {name: json.loads(text) for name, text in checkpoint.saved_progress.items()},
        "subject": checkpoint.subject,
        "agent_config": json.loads(json_text(checkpoint.agent_config)),
        "agent_version": checkpoint.agent_version,
        "retry_count": checkpoint.retry_count,
    }


def _applied(migration: Migration, public: Public, agent: str) -> Public:
    try:
        returned = migration(public)
        if returned is None:
            raise _Wrong("it returned None; return the dict")
        return _sound(returned) | {"agent_version": migration.to_version}
    except Exception as error:  # its author's code, which may raise anything: the task is parked, not lost
        name = getattr(migration.function, "__name__", repr(migration.function))
        problem = str(error) if isinstance(error, _Wrong) else f"{type(error).__name__}: {error}"
        raise IncompatibleState(f"agent {agent!r}: migration {name} ({_arrow(migration)}): {problem}") from error


def _sound(returned: Any) -> Public:
    """What a migration returned, as plain JSON of its own, known to describe a checkpoint."""
    try:
        public: Public = _Form.model_validate(check_json(returned, "checkpoint")).model_dump()
    except ValidationError as error:
        raise _Wrong(first_problem(error)) from cause_of(error)
    except NotJson as error:
        raise _Wrong(str(error)) from error
    completed, pending = public["completed_subtasks"], public["pending_subtasks"]
    results, saved = public["interim_results"], public["saved_progress"]
    twice = [name for name, count in Counter([*completed, *pending]).items() if count > 1]
    problems = (
        ([name for name in completed if name not in results], "completed without an entry in interim_results"),
        ([name for name in results if name not in completed], "in interim_results and not in completed_subtasks"),
        ([name for name in saved if name not in (*completed, *pending)], "in saved_progress and nowhere else"),
        (twice, "listed twice"),
    )
    for names, problem in problems:
        if names:
            raise _Wrong(f"{names[0]!r} is {problem}")
    return public


# ── back to a checkpoint ───────────────────────────────────────────────────────────────────────────


def _rebuilt(before: AgentCheckpoint, public: Public) -> AgentCheckpoint:
    completed, pending = public["completed_subtasks"], public["pending_subtasks"]
    secrets = [secret for record in before.subtasks for secret in values_at(record.secrets, _result(record))]
    records = _goes_on(completed, public["interim_results"], [each for each in before.subtasks if each.completed])
    done = [_completed(name, public["interim_results"][name], records.get(name), secrets) for name in completed]
    begun = [record for record in before.subtasks if not record.completed and record.name in pending]
    saved = {
        name: _kept_text(before.saved_progress.get(name), state) for name, state in public["saved_progress"].items()
    }
    unchanged = {key: public[key] for key in ("subject", "agent_config", "agent_version", "retry_count")}
    rebuilt = {
        "planned": (*completed, *pending),
        "subtasks": (*done, *begun),
        "saved_progress": saved,
        "current_subtask": before.current_subtask if before.current_subtask in pending else None,
    }
    return before.model_copy(update=unchanged | rebuilt)


def _goes_on(
    names: Sequence[str], results: Mapping[str, JsonValue], before: Sequence[SubtaskRecord]
) -> dict[str, SubtaskRecord]:
    """The record that each completed subtask goes on from: of its name, its result or its place; else none."""
    gone = {record.name: record for record in before if record.name not in results}
    found = {record.name: record for record in before if record.name in results}
    for index, name in enumerate(names):
        if name not in found:
            same = [each for each in gone.values() if json_text(_result(each)) == json_text(results[name])]
            in_place = [before[index]] if len(names) == len(before) and before[index].name in gone else []
            for record in same if len(same) == 1 else in_place:
                found[name] = record
    return found


def _completed(
    name: str, result: JsonValue, before: SubtaskRecord | None, secrets: Sequence[JsonValue]
) -> SubtaskRecord:
    if before is None:
        before = SubtaskRecord(name=name, status=SubtaskStatus.COMPLETED, function=None, inputs={})
    still = [at for at in before.secrets if values_at((at,), result)]
    update = {
        "name": name,
        "function": None,
        "inputs": before.inputs if before.name == name else {},
        "result": _kept_text(before.result, result),
        "secrets": tuple(dict.fromkeys((*still, *places_of(secrets, result)))),
    }
    return before.model_copy(update=update)


def _result(record: SubtaskRecord) -> JsonValue:
    value: JsonValue = None if record.result is None else json.loads(record.result)
    return value


def _kept_text(before: str | None, value: JsonValue) -> str:
    """The text of `value`: as it was written, if it is what was written."""
    text = json_text(value)
    return before if before is not None and json_text(json.loads(before)) == text else text
