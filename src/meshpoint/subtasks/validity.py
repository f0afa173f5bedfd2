"""Rules that decide whether a recorded subtask is reused or runs again.

Within one attempt a record holds: a recorded subtask never runs again, even if a deploy has
changed its code or its inputs. A pause, a crash, a drain and a rescue continue the attempt; only
an explicit resume begins a new one. In a new attempt, a record is valid if it was made by the same
function with the same inputs. The first completed subtask that differs runs again, and so does
everything that began after it.

The functions here are pure: they do no I/O, keep no state, and change none of their arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from meshpoint.model.declared_type import TypeMismatch
from meshpoint.model.subtasks import (
    ALL_USES,
    Child,
    SubtaskRecord,
    SubtaskStatus,
    split_uses,
)

MAX_NAME_LENGTH = 100
"""Characters."""
_FUNCTION_CHANGED = "its function has changed"

Records: TypeAlias = Mapping[str, SubtaskRecord]
"""A task's records by name, in the order in which the subtasks first began."""


@dataclass(frozen=True, slots=True)
class CurrentRun:
    """The run that requests a subtask.

    Attributes:
        retry: Attempt of the operation, starting at 0.
        generation: Number of pauses before this run in its attempt.
        replays: Whether the code runs from its top after a pause, as a function agent's does. The
            code of other agents starts in a new handler.
        requested: Names of the subtasks requested so far, including the judged subtask.
        used: Names of the subtasks whose record this run has reused or created.
    """

    retry: int
    generation: int
    replays: bool
    requested: Collection[str] = ()
    used: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class Reuse:
    """The record is valid. `deliverable` is its result, restored.

    `difference` describes inputs that differ from the record within one attempt.
    """

    record: SubtaskRecord
    deliverable: Any
    difference: str | None = None


@dataclass(frozen=True, slots=True)
class FailAgain:
    """The code has already seen the recorded failure, before it paused. Raise it again."""

    record: SubtaskRecord
    error: str
    difference: str | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """The subtask has to run.

    Attributes:
        again: Why it runs again although an earlier run completed it; `None` if none did.
        invalidated: Reasons why records no longer count, by name: the subtask's own record if it
            differs, and records of later subtasks.
    """

    again: str | None = None
    invalidated: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Park:
    """The record holds, but this code cannot read its deliverable. Another version may."""

    reason: str


Verdict: TypeAlias = Reuse | FailAgain | Run | Park


def is_valid_name(name: object, max_length: int = MAX_NAME_LENGTH) -> bool:
    """Whether `name` can name a subtask. Names are keys in the database and printed unescaped."""
    return (
        isinstance(name, str)
        and 0 < len(name) <= max_length
        and name.isprintable()
        and name.strip() == name
    )


def find_name_problem(
    name: str, outer: str | None, records: Records, run: CurrentRun
) -> str | None:
    """Return why no subtask called `name` can begin now; `None` if it can.

    Args:
        name: The requested name.
        outer: The subtask whose code requests it, `None` outside subtasks.
        records: The task's records.
        run: The current run; it has not requested this subtask yet.
    """
    if not is_valid_name(name):
        return (
            f"{name!r} is not a valid subtask name: "
            f"use printable text of 1 to {MAX_NAME_LENGTH} characters"
        )
    if outer is not None:
        return (
            f"subtask {name!r} begins inside subtask {outer!r}: record only one of them, "
            "and call plain functions inside it"
        )
    if name in run.requested or _is_from_earlier_handler(records.get(name), run):
        return (
            f"two subtasks of this run are called {name!r}: use unique names, such as '{name}-2'"
        )
    return None


def judge(
    records: Records, requested: SubtaskRecord, run: CurrentRun, read: Callable[[str], Any]
) -> Verdict:
    """Decide what happens with a subtask that the code has requested.

    Args:
        records: The task's records.
        requested: What the subtask is now: its name, and the version and inputs of its function.
        run: The current run; it has already requested this subtask.
        read: Restores a deliverable from its JSON text, or raises `TypeMismatch`.
    """
    record = records.get(requested.name)
    if record is None:
        return Run(invalidated=_not_reached_yet(records, requested.name, run))
    if record.status is SubtaskStatus.OUTDATED:
        return Run(again=record.again)
    difference = _find_input_difference(record, requested)
    if record.error is not None and _failed_before_pause(record, run):
        return FailAgain(record, record.error, difference)
    if holds(record, run.retry) and record.result is not None:
        return _judge_held(record, record.result, difference, read)
    changed = _find_code_change(record, requested)
    if changed is not None and not record.belongs_to(run.retry):
        return run_again(records, record, changed, run)
    if difference is not None:
        return run_again(records, record, difference, run)
    return _judge_unchanged(records, record, run, read)


def holds(record: SubtaskRecord, retry: int) -> bool:
    """Whether attempt `retry` has recorded the subtask, or reused the record of an earlier one."""
    return record.completed and record.belongs_to(retry)


def run_again(records: Records, record: SubtaskRecord, reason: str, run: CurrentRun) -> Run:
    """Return the verdict for a record that is not valid, for `reason`.

    If it was completed, all records after it are not valid either, except those this run has used.
    """
    if not record.completed:
        return Run(reason_in_attempt(record, run.retry), {record.name: reason})
    names = list(records)
    later = names[names.index(record.name) + 1 :]
    after = f"after {record.name!r}, which runs again"
    return Run(
        reason, {record.name: reason} | {name: after for name in later if name not in run.used}
    )


def invalidate(record: SubtaskRecord, reason: str, retry: int) -> SubtaskRecord:
    """Return `record` without its result, so that its subtask runs again in attempt `retry`.

    A record that is not completed has no result and stays as it is.
    """
    if not record.completed:
        return record
    return record.model_copy(
        update={
            "status": SubtaskStatus.OUTDATED,
            "again": reason,
            "retry": retry,
            "result": None,
            "context": None,
            "secrets": (),
            "seconds": 0.0,
        }
    )


def find_reusable_children(
    children: Iterable[Child], records: Iterable[SubtaskRecord], retry: int
) -> list[Child]:
    """Return the peer tasks of earlier attempts that attempt `retry` may use, the latest first.

    A call of a subtask that is completed is not made again. A call of a subtask that was completed
    and runs again goes to a new task: the earlier outcome is outdated with its record.
    """
    excluded = {
        record.name
        for record in records
        if record.completed or reason_in_attempt(record, retry) is not None
    }
    reusable = [
        child for child in children if child.retry < retry and child.subtask not in excluded
    ]
    return sorted(reusable, key=lambda child: -child.retry)


def _is_from_earlier_handler(record: SubtaskRecord | None, run: CurrentRun) -> bool:
    return (
        record is not None
        and not run.replays
        and record.completed
        and record.retry == run.retry
        and record.generation < run.generation
    )


def _not_reached_yet(records: Records, new: str, run: CurrentRun) -> dict[str, str]:
    """Return why records of earlier attempts no longer count if the subtask `new` comes first."""
    if run.generation > 0 and not run.replays:
        return {}  # an earlier handler of this attempt may have reached them
    after = f"after {new!r}, which is new"
    return {
        name: after
        for name, record in records.items()
        if not record.belongs_to(run.retry) and name not in run.requested
    }


def _find_code_change(record: SubtaskRecord, requested: SubtaskRecord) -> str | None:
    if record.function is None or requested.function is None:
        return None  # a migration has accepted it
    return describe_change(record.function, requested.function)


def _find_input_difference(record: SubtaskRecord, requested: SubtaskRecord) -> str | None:
    if record.function is None and not record.inputs:
        return None  # a migration has accepted it
    return describe_difference(record.inputs, requested.inputs)


def describe_change(recorded: str, current: str) -> str | None:
    """Describe how two results of `version_with_uses` differ; `None` if they count as equal.

    The previous release did not record what a function uses. Such a record counts as equal.
    """
    if recorded == current:
        return None
    (own, uses), (current_own, current_uses) = split_uses(recorded), split_uses(current)
    if own != current_own:
        return _FUNCTION_CHANGED
    if uses is None:
        return None
    before, after = _parse_uses(uses), _parse_uses(current_uses or "")
    changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    if not changed:
        return _FUNCTION_CHANGED
    if ALL_USES in changed:
        return "a helper or a constant that it uses has changed"
    *first, last = map(repr, sorted(changed))
    return (
        f"{', '.join(first)} and {last}, which it uses, have changed"
        if first
        else f"{last}, which it uses, has changed"
    )


def _parse_uses(text: str) -> dict[str, str]:
    """Return the digest of each name. Accepts any text, because a record may hold anything."""
    parts = (item.partition("=") for item in text.split())
    return {name: digest for name, _, digest in parts}


def describe_difference(recorded: Mapping[str, str], now: Mapping[str, str]) -> str | None:
    """Describe how two results of `input_digests` differ; `None` if they are equal."""
    changes = (
        (
            [key for key in recorded if key in now and recorded[key] != now[key]],
            "differs",
            "differ",
        ),
        ([key for key in now if key not in recorded], "is new", "are new"),
        ([key for key in recorded if key not in now], "is gone", "are gone"),
    )
    parts = [_format_change(keys, one, several) for keys, one, several in changes if keys]
    return "; ".join(parts) or None


def _format_change(keys: list[str], singular: str, plural: str) -> str:
    *first, last = map(repr, keys)
    return (
        f"inputs {', '.join(first)} and {last} {plural}" if first else f"input {last} {singular}"
    )


def _judge_held(
    record: SubtaskRecord, result: str, difference: str | None, read: Callable[[str], Any]
) -> Reuse | Park:
    try:
        return Reuse(record, read(result), difference)
    except TypeMismatch as error:
        return Park(f"subtask {record.name!r}: its recorded result no longer fits: {error}")


def _judge_unchanged(
    records: Records, record: SubtaskRecord, run: CurrentRun, read: Callable[[str], Any]
) -> Verdict:
    if not record.completed:
        return Run(reason_in_attempt(record, run.retry))
    if record.result is None:
        return run_again(records, record, "its deliverable is missing", run)
    try:
        return Reuse(record, read(record.result))
    except TypeMismatch as error:
        return run_again(records, record, f"its deliverable no longer fits: {error}", run)


def _failed_before_pause(record: SubtaskRecord, run: CurrentRun) -> bool:
    return run.replays and record.retry == run.retry and record.generation < run.generation


def reason_in_attempt(record: SubtaskRecord, retry: int) -> str | None:
    """Return why a subtask that was completed runs again in attempt `retry`, or `None`.

    Reasons from earlier attempts no longer apply.
    """
    is_current = record.retry == retry or record.status is SubtaskStatus.OUTDATED
    return record.again if is_current else None
