"""Identifiers of agents, tasks, runs and replicas."""

from __future__ import annotations

import re
from typing import NewType

import uuid_utils

AgentName = NewType("AgentName", str)
TaskId = NewType("TaskId", str)
"""Identifies a task across the mesh. A peer call's `sub_task_id` is the peer's `TaskId`."""
RunId = NewType("RunId", str)
"""Identifies one run of one segment. Every write carries it, so a repeated write is recognized."""
ReplicaId = NewType("ReplicaId", str)
"""Identifies one incarnation of a replica. Never reused after the process ends."""

_RESUMED_ID = re.compile(r"(.+)~resume-(\d+)", re.DOTALL)


def new_id() -> str:
    """A time-ordered UUID (version 7), which keeps consecutive ids close together in indexes."""
    return str(uuid_utils.uuid7())


def resumed_id(task_id: TaskId, retry: int) -> TaskId:
    """The id under which the `retry`-th attempt of a resumed operation knows a peer's task.

    The peer does not see it: it replies under its own id and echoes the attempt from the request.
    A late reply to an earlier attempt therefore matches no call.
    """
    return TaskId(f"{task_id}~resume-{retry}")


def split_resumed_id(task_id: str) -> tuple[TaskId, int | None]:
    """Split an id from `resumed_id` into task id and attempt; the attempt is `None` if absent."""
    match = _RESUMED_ID.fullmatch(task_id)
    return (TaskId(task_id), None) if match is None else (TaskId(match[1]), int(match[2]))
