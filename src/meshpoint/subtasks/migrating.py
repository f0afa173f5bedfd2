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
from meshpoint.subtasks.secret_values import pointers_to, values_at

PublicCheckpoint: TypeAlias = dict[str, Any]

_KEY = "migrations"


class _MigrationResult(BaseModel):
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


class _InvalidResult(Exception):
    """What a migration returned cannot become a checkpoint."""


def migrates(
    from_version: str, to_version: str
) -> Callable[[Callable[[PublicCheckpoint], PublicCheckpoint]], Migration]:
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


def validate_migrations(migrations: Iterable[Migration]) -> tuple[Migration, ...]:
    """`migrations`, of which it is clear what leads where.

    Raises:
        ConfigurationError: two have the same versions, they go round in a circle, or one is no migration.
    """
    found = tuple(migrations)
    for migration in found:
        if not isinstance(migration, Migration):
            problem = f"{getattr(migration, '__name__', migration)!r} is no migration"
            raise ConfigurationError(_KEY, problem, 'write @migrates("1.0", "1.1") above it')
    duplicates = [link for link, count in Counter(map(_version_pair, found)).items() if count > 1]
    if duplicates:
        raise ConfigurationError(_KEY, f"two lead {_describe_versions(duplicates[0])}", "leave one of them out")
    targets: dict[str, list[str]] = {}
    for migration in found:
        targets.setdefault(migration.from_version, []).append(migration.to_version)
    try:
        TopologicalSorter(targets).prepare()
    except CycleError as error:
        cycle = " -> ".join(reversed(error.args[1]))
        raise ConfigurationError(_KEY, f"they go round in a circle: {cycle}", "leave one of them out") from error
    return found


def migrate_checkpoint(
    checkpoint: AgentCheckpoint, to: str | None, migrations: Sequence[Migration]
) -> AgentCheckpoint:
    """`checkpoint` as version `to` of its agent reads it; itself, if it is of that version, or of none.

    The shortest way through the migrations is taken, and of two of the same length the one listed first. What is
    stored is not touched: whoever goes on writes the next checkpoint in the new version.

    Raises:
        IncompatibleState: no migrations lead there, or one of them raised or returned what is no checkpoint.
    """
    if to is None or checkpoint.agent_version is None or checkpoint.agent_version == to:
        return checkpoint
    public = _to_public(checkpoint)
    for migration in _find_path(checkpoint.agent, checkpoint.agent_version, to, migrations):
        public = _apply(migration, public, checkpoint.agent)
    return _rebuild_checkpoint(checkpoint, public)


# ── the way ────────────────────────────────────────────────────────────────────────────────────────


def _find_path(agent: str, start: str, to: str, migrations: Sequence[Migration]) -> list[Migration]:
    paths = _shortest_paths(start, migrations)
    if to not in paths:
        reverse_paths = _shortest_paths(
            to, [Migration(each.to_version, each.from_version, each.function) for each in migrations]
        )
        available = f"there is {', '.join(map(_arrow, migrations))}" if migrations else "there are none"
        missing = f'write @migrates("{list(paths)[-1]}", "{list(reverse_paths)[-1]}")'
        raise IncompatibleState(f"agent {agent!r}: no migration leads from {start} to {to}; {available}; {missing}")
    return paths[to]


def _shortest_paths(start: str, migrations: Sequence[Migration]) -> dict[str, list[Migration]]:
    """A shortest way to each version that can be reached, the farthest last."""
    paths: dict[str, list[Migration]] = {start: []}
    queue = deque([start])
    while queue:
        version = queue.popleft()
        for migration in migrations:
            if migration.from_version == version and migration.to_version not in paths:
                paths[migration.to_version] = [*paths[version], migration]
                queue.append(migration.to_version)
    return paths


def _version_pair(migration: Migration) -> tuple[str, str]:
    return migration.from_version, migration.to_version


def _arrow(migration: Migration) -> str:
    return " -> ".join(_version_pair(migration))


def _describe_versions(versions: tuple[str, str]) -> str:
    return f"from {versions[0]} to {versions[1]}"


# ── one step ───────────────────────────────────────────────────────────────────────────────────────


def _to_public(checkpoint: AgentCheckpoint) -> PublicCheckpoint:
    progress = checkpoint.progress
    return {
        "completed_subtasks": list(progress.completed),
        "pending_subtasks": list(progress.pending),
        "interim_results": {each.name: _parse_result(each) for each in checkpoint.subtasks if each.completed},
        "saved_progress": {name: json.loads(text) for name, text in checkpoint.saved_progress.items()},
        "subject": checkpoint.subject,
        "agent_config": json.loads(json_text(checkpoint.agent_config)),
        "agent_version": checkpoint.agent_version,
        "retry_count": checkpoint.retry_count,
    }


def _apply(migration: Migration, public: PublicCheckpoint, agent: str) -> PublicCheckpoint:
    try:
        returned = migration(public)
        if returned is None:
            raise _InvalidResult("it returned None; return the dict")
        return _validate_result(returned) | {"agent_version": migration.to_version}
    except Exception as error:  # its author's code, which may raise anything: the task is parked, not lost
        name = getattr(migration.function, "__name__", repr(migration.function))
        problem = str(error) if isinstance(error, _InvalidResult) else f"{type(error).__name__}: {error}"
        raise IncompatibleState(f"agent {agent!r}: migration {name} ({_arrow(migration)}): {problem}") from error


def _validate_result(returned: Any) -> PublicCheckpoint:
    """What a migration returned, as plain JSON of its own, known to describe a checkpoint."""
    try:
        public: PublicCheckpoint = _MigrationResult.model_validate(check_json(returned, "checkpoint")).model_dump()
    except ValidationError as error:
        raise _InvalidResult(first_problem(error)) from cause_of(error)
    except NotJson as error:
        raise _InvalidResult(str(error)) from error
    completed, pending = public["completed_subtasks"], public["pending_subtasks"]
    results, saved = public["interim_results"], public["saved_progress"]
    duplicates = [name for name, count in Counter([*completed, *pending]).items() if count > 1]
    problems = (
        ([name for name in completed if name not in results], "completed without an entry in interim_results"),
        ([name for name in results if name not in completed], "in interim_results and not in completed_subtasks"),
        ([name for name in saved if name not in (*completed, *pending)], "in saved_progress and nowhere else"),
        (duplicates, "listed twice"),
    )
    for names, problem in problems:
        if names:
            raise _InvalidResult(f"{names[0]!r} is {problem}")
    return public


# ── back to a checkpoint ───────────────────────────────────────────────────────────────────────────


def _rebuild_checkpoint(before: AgentCheckpoint, public: PublicCheckpoint) -> AgentCheckpoint:
    completed, pending = public["completed_subtasks"], public["pending_subtasks"]
    secrets = [secret for record in before.subtasks for secret in values_at(record.secrets, _parse_result(record))]
    records = _match_records(
        completed, public["interim_results"], [each for each in before.subtasks if each.completed]
    )
    done = [
        _completed_record(name, public["interim_results"][name], records.get(name), secrets) for name in completed
    ]
    started = [record for record in before.subtasks if not record.completed and record.name in pending]
    saved = {
        name: _preserve_text(before.saved_progress.get(name), state)
        for name, state in public["saved_progress"].items()
    }
    unchanged = {key: public[key] for key in ("subject", "agent_config", "agent_version", "retry_count")}
    rebuilt = {
        "planned": (*completed, *pending),
        "subtasks": (*done, *started),
        "saved_progress": saved,
        "current_subtask": before.current_subtask if before.current_subtask in pending else None,
    }
    return before.model_copy(update=unchanged | rebuilt)


def _match_records(
    names: Sequence[str], results: Mapping[str, JsonValue], before: Sequence[SubtaskRecord]
) -> dict[str, SubtaskRecord]:
    """The record that each completed subtask goes on from: of its name, its result or its place; else none."""
    unmatched = {record.name: record for record in before if record.name not in results}
    matched = {record.name: record for record in before if record.name in results}
    for index, name in enumerate(names):
        if name not in matched:
            same_result = [
                each for each in unmatched.values() if json_text(_parse_result(each)) == json_text(results[name])
            ]
            same_position = [before[index]] if len(names) == len(before) and before[index].name in unmatched else []
            for record in same_result if len(same_result) == 1 else same_position:
                matched[name] = record
    return matched


def _completed_record(
    name: str, result: JsonValue, before: SubtaskRecord | None, secrets: Sequence[JsonValue]
) -> SubtaskRecord:
    if before is None:
        before = SubtaskRecord(name=name, status=SubtaskStatus.COMPLETED, function=None, inputs={})
    unchanged = [at for at in before.secrets if values_at((at,), result)]
    update = {
        "name": name,
        "function": None,
        "inputs": before.inputs if before.name == name else {},
        "result": _preserve_text(before.result, result),
        "secrets": tuple(dict.fromkeys((*unchanged, *pointers_to(secrets, result)))),
    }
    return before.model_copy(update=update)


def _parse_result(record: SubtaskRecord) -> JsonValue:
    value: JsonValue = None if record.result is None else json.loads(record.result)
    return value


def _preserve_text(before: str | None, value: JsonValue) -> str:
    """The text of `value`: as it was written, if it is what was written."""
    text = json_text(value)
    return before if before is not None and json_text(json.loads(before)) == text else text
