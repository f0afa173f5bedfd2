"""Convert checkpoints of earlier versions of an agent, with functions written by its author."""

from __future__ import annotations

import json
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from graphlib import CycleError, TopologicalSorter
from typing import Any, TypeAlias

from pydantic import BaseModel, ConfigDict, JsonValue, ValidationError

from meshpoint.errors import ConfigurationError, IncompatibleState, NotJson
from meshpoint.model.declared_type import first_problem, loggable_cause
from meshpoint.model.json_values import check_json
from meshpoint.model.secrets import json_pointer
from meshpoint.model.subtasks import AgentCheckpoint, Migration, SubtaskRecord, SubtaskStatus
from meshpoint.subtasks.deliverable import json_text

_PublicCheckpoint: TypeAlias = dict[str, Any]

_KEY = "migrations"


class _MigrationResult(BaseModel):
    """The keys that a migration must return. Others are its own."""

    model_config = ConfigDict(extra="allow", strict=True)

    completed_subtasks: list[str]
    pending_subtasks: list[str]
    interim_results: dict[str, JsonValue]
    saved_progress: dict[str, JsonValue]
    subject: str | None
    agent_config: dict[str, JsonValue]
    agent_version: str | None
    retry_count: int


class _InvalidResult(Exception):
    """A migration returned something that is not a checkpoint."""


def migrates(
    from_version: str, to_version: str
) -> Callable[[Callable[[_PublicCheckpoint], _PublicCheckpoint]], Migration]:
    """Declare a function as the migration of an agent's checkpoints between two versions.

        @migrates("1.0", "1.1")
        def rename_parsing_to_filing(checkpoint: dict) -> dict:
            checkpoint["completed_subtasks"] = ["filing", *checkpoint["completed_subtasks"][1:]]
            results = checkpoint["interim_results"]
            results["filing"] = results.pop("10k_parsing")
            return checkpoint

    The function receives its own copy of the checkpoint as a dict, which it may change, and
    returns a dict with at least these keys:

    - `completed_subtasks`: names in the order in which they began; `pending_subtasks`: the other
      subtasks, in order.
    - `interim_results`: the deliverable of each completed subtask as plain JSON, by name.
    - `saved_progress`: the progress that subtasks have saved, as plain JSON, by name; only of the
      subtasks listed above.
    - `subject`, `agent_config` (a dict), `agent_version` (always overwritten with the target
      version), `retry_count`.

    Keys that a migration adds are kept in all later checkpoints of the task, as plain JSON, and
    later migrations receive them. Meshpoint itself does not read them.

    It may rename, drop, add and change entries, and vouches for the results: a subtask that it
    lists as completed does not run again because its function has changed. A subtask that keeps
    its name still runs again if its inputs differ; one with a new name is accepted with any
    inputs. What a subtask set on the task's context is matched to the new entry by name, else by
    an unchanged result, else by position if the number of completed subtasks is the same.
    """
    return lambda function: Migration(from_version, to_version, function)


def validate_migrations(migrations: Iterable[Migration]) -> tuple[Migration, ...]:
    """Return `migrations` after checking that they are unambiguous.

    Raises:
        ConfigurationError: Two have the same versions, they form a cycle, or one is not a
            migration.
    """
    found = tuple(migrations)
    for migration in found:
        if not isinstance(migration, Migration):
            problem = f"{getattr(migration, '__name__', migration)!r} is not a migration"
            raise ConfigurationError(_KEY, problem, 'decorate it with @migrates("1.0", "1.1")')
    duplicates = [link for link, count in Counter(map(_version_pair, found)).items() if count > 1]
    if duplicates:
        raise ConfigurationError(
            _KEY, f"two of them lead {_describe_versions(duplicates[0])}", "remove one of them"
        )
    targets: dict[str, list[str]] = {}
    for migration in found:
        targets.setdefault(migration.from_version, []).append(migration.to_version)
    try:
        TopologicalSorter(targets).prepare()
    except CycleError as error:
        cycle = " -> ".join(reversed(error.args[1]))
        raise ConfigurationError(
            _KEY, f"they form a cycle: {cycle}", "remove one of them"
        ) from error
    return found


def migrate_checkpoint(
    checkpoint: AgentCheckpoint, to: str | None, migrations: Sequence[Migration]
) -> AgentCheckpoint:
    """Convert `checkpoint` to version `to` of its agent.

    It is returned unchanged if it has that version already, or if a version is unknown. Takes the
    shortest path through the migrations; of two paths of the same length, the one listed first.
    The stored checkpoint is not changed: a resumed task writes its next checkpoint in the new
    version.

    Raises:
        IncompatibleState: No migrations lead to `to`, or one raised or returned something that is
            not a checkpoint.
    """
    if to is None or checkpoint.agent_version is None or checkpoint.agent_version == to:
        return checkpoint
    public = _to_public(checkpoint)
    for migration in _find_path(checkpoint.agent, checkpoint.agent_version, to, migrations):
        public = _apply(migration, public, checkpoint.agent)
    return _rebuild_checkpoint(checkpoint, public)


def _find_path(
    agent: str, start: str, to: str, migrations: Sequence[Migration]
) -> list[Migration]:
    paths = _shortest_paths(start, migrations)
    if to not in paths:
        reverse_paths = _shortest_paths(
            to,
            [Migration(each.to_version, each.from_version, each.function) for each in migrations],
        )
        available = (
            f"available: {', '.join(map(_arrow, migrations))}"
            if migrations
            else "no migrations are defined"
        )
        missing = f'write @migrates("{list(paths)[-1]}", "{list(reverse_paths)[-1]}")'
        raise IncompatibleState(
            f"agent {agent!r}: no migration leads from {start} to {to}; {available}; {missing}"
        )
    return paths[to]


def _shortest_paths(start: str, migrations: Sequence[Migration]) -> dict[str, list[Migration]]:
    """Return a shortest path to each reachable version, the farthest last."""
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


def _to_public(checkpoint: AgentCheckpoint) -> _PublicCheckpoint:
    progress = checkpoint.progress
    return {
        "completed_subtasks": list(progress.completed),
        "pending_subtasks": list(progress.pending),
        "interim_results": {
            each.name: _parse_result(each) for each in checkpoint.subtasks if each.completed
        },
        "saved_progress": {
            name: json.loads(text) for name, text in checkpoint.saved_progress.items()
        },
        "subject": checkpoint.subject,
        "agent_config": json.loads(json_text(checkpoint.agent_config)),
        "agent_version": checkpoint.agent_version,
        "retry_count": checkpoint.retry_count,
        **json.loads(json_text(checkpoint.extra)),
    }


def _apply(migration: Migration, public: _PublicCheckpoint, agent: str) -> _PublicCheckpoint:
    try:
        returned = migration(public)
        if returned is None:
            raise _InvalidResult("it returned None; return the dict")
        return _validate_result(returned) | {"agent_version": migration.to_version}
    except Exception as error:  # user code may raise anything: the task is parked, not lost
        name = getattr(migration.function, "__name__", repr(migration.function))
        problem = (
            str(error) if isinstance(error, _InvalidResult) else f"{type(error).__name__}: {error}"
        )
        raise IncompatibleState(
            f"agent {agent!r}: migration {name} ({_arrow(migration)}): {problem}"
        ) from error


def _validate_result(returned: Any) -> _PublicCheckpoint:
    """Check what a migration returned, and copy it as plain JSON."""
    try:
        public: _PublicCheckpoint = _MigrationResult.model_validate(
            check_json(returned, "checkpoint")
        ).model_dump()
    except ValidationError as error:
        raise _InvalidResult(first_problem(error)) from loggable_cause(error)
    except NotJson as error:
        raise _InvalidResult(str(error)) from error
    completed, pending = public["completed_subtasks"], public["pending_subtasks"]
    results, saved = public["interim_results"], public["saved_progress"]
    duplicates = [name for name, count in Counter([*completed, *pending]).items() if count > 1]
    problems = (
        (
            [name for name in completed if name not in results],
            "completed without an entry in interim_results",
        ),
        (
            [name for name in results if name not in completed],
            "in interim_results but not in completed_subtasks",
        ),
        (
            [name for name in saved if name not in (*completed, *pending)],
            "in saved_progress but is not a subtask",
        ),
        (duplicates, "listed twice"),
    )
    for names, problem in problems:
        if names:
            raise _InvalidResult(f"{names[0]!r} is {problem}")
    return public


def _rebuild_checkpoint(before: AgentCheckpoint, public: _PublicCheckpoint) -> AgentCheckpoint:
    completed, pending = public["completed_subtasks"], public["pending_subtasks"]
    secrets = [
        secret
        for record in before.subtasks
        for secret in _values_at(record.secrets, _parse_result(record))
    ]
    records = _match_records(
        completed, public["interim_results"], [each for each in before.subtasks if each.completed]
    )
    done = [
        _completed_record(name, public["interim_results"][name], records.get(name), secrets)
        for name in completed
    ]
    started = [
        record for record in before.subtasks if not record.completed and record.name in pending
    ]
    saved = {
        name: _preserve_text(before.saved_progress.get(name), state)
        for name, state in public["saved_progress"].items()
    }
    unchanged = {
        key: public[key] for key in ("subject", "agent_config", "agent_version", "retry_count")
    }
    rebuilt = {
        "extra": {
            key: value for key, value in public.items() if key not in _MigrationResult.model_fields
        },
        "planned": (*completed, *pending),
        "subtasks": (*done, *started),
        "saved_progress": saved,
        "current_subtask": before.current_subtask if before.current_subtask in pending else None,
        "records_from": None,  # the next checkpoint must store all records
    }
    return before.model_copy(update=unchanged | rebuilt)


def _match_records(
    names: Sequence[str], results: Mapping[str, JsonValue], before: Sequence[SubtaskRecord]
) -> dict[str, SubtaskRecord]:
    """Find the old record of each completed subtask: by name, else by result, else by position."""
    unmatched = {record.name: record for record in before if record.name not in results}
    matched = {record.name: record for record in before if record.name in results}
    for index, name in enumerate(names):
        if name not in matched:
            same_result = [
                each
                for each in unmatched.values()
                if json_text(_parse_result(each)) == json_text(results[name])
            ]
            same_position = (
                [before[index]]
                if len(names) == len(before) and before[index].name in unmatched
                else []
            )
            for record in same_result if len(same_result) == 1 else same_position:
                matched[name] = record
    return matched


def _completed_record(
    name: str, result: JsonValue, before: SubtaskRecord | None, secrets: Sequence[JsonValue]
) -> SubtaskRecord:
    if before is None:
        before = SubtaskRecord(name=name, status=SubtaskStatus.COMPLETED, function=None, inputs={})
    unchanged = [at for at in before.secrets if _values_at((at,), result)]
    update = {
        "name": name,
        "function": None,
        "inputs": before.inputs if before.name == name else {},
        "result": _preserve_text(before.result, result),
        "secrets": tuple(dict.fromkeys((*unchanged, *_pointers_to(secrets, result)))),
    }
    return before.model_copy(update=update)


def _parse_result(record: SubtaskRecord) -> JsonValue:
    value: JsonValue = None if record.result is None else json.loads(record.result)
    return value


def _preserve_text(before: str | None, value: JsonValue) -> str:
    """Serialize `value`, returning `before` unchanged if it has the same value."""
    text = json_text(value)
    return before if before is not None and json_text(json.loads(before)) == text else text


def _values_at(pointers: Collection[str], value: JsonValue) -> list[JsonValue]:
    """Return the values at these JSON pointers. Pointers without a target are skipped."""
    return [inner for at, inner in _walk_json(value, "") if at in pointers] if pointers else []


def _pointers_to(secrets: Sequence[JsonValue], value: JsonValue) -> list[str]:
    """Return JSON pointers to values that equal a secret, or are text that contains one."""
    searchable = [
        each for each in secrets if not isinstance(each, bool) and each not in (None, "", [], {})
    ]
    return [
        at
        for at, inner in _walk_json(value, "")
        if any(_contains_secret(secret, inner) for secret in searchable)
    ]


def _contains_secret(secret: JsonValue, inner: JsonValue) -> bool:
    return secret == inner or (
        isinstance(secret, str) and isinstance(inner, str) and secret in inner
    )


def _walk_json(value: JsonValue, at: str) -> Iterator[tuple[str, JsonValue]]:
    yield at, value
    match value:
        case dict():
            for key, inner in value.items():
                yield from _walk_json(inner, at + json_pointer(key))
        case list():
            for index, inner in enumerate(value):
                yield from _walk_json(inner, at + json_pointer(index))
