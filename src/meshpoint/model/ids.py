"""Identifiers of agents, tasks, runs and replicas."""

from __future__ import annotations

import re
from typing import NewType

import uuid_utils

from meshpoint.errors import ConfigurationError

AgentName = NewType("AgentName", str)
TaskId = NewType("TaskId", str)
"""Identifies a task across the mesh. A peer call's `sub_task_id` is the peer's `TaskId`."""
RunId = NewType("RunId", str)
"""Identifies one run of one segment. Every write carries it, so a repeated write is recognized."""
ReplicaId = NewType("ReplicaId", str)
"""Identifies one incarnation of a replica. Never reused after the process ends."""

_AGENT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")


def new_id() -> str:
    """A time-ordered UUID (version 7), which keeps consecutive ids close together in indexes."""
    return str(uuid_utils.uuid7())


_RESUMED = re.compile(r"(.+)~resume-(\d+)", re.DOTALL)


def resumed_id(task_id: TaskId, retry: int) -> TaskId:
    """The id under which the `retry`-th attempt of a resumed operation knows a peer's task.

    The peer does not see it: it replies under its own id and echoes the attempt from the request.
    A late reply to an earlier attempt therefore matches no call.
    """
    return TaskId(f"{task_id}~resume-{retry}")


def plain_id(task_id: str) -> tuple[TaskId, int | None]:
    """Split an id from `resumed_id` into task id and attempt; the attempt is `None` if absent."""
    marked = _RESUMED.fullmatch(task_id)
    return (TaskId(task_id), None) if marked is None else (TaskId(marked[1]), int(marked[2]))


def agent_name(name: str) -> AgentName:
    """Check `name`: letters, digits, `_` and `-`, at most 63 characters.

    Raises:
        ConfigurationError: the name has other characters, which queue names do not support.
    """
    if not _AGENT_NAME.fullmatch(name):
        raise ConfigurationError(
            "agent.name",
            f"{name!r} is not a valid agent name",
            "use letters, digits, '_' and '-' (63 at most)",
        )
    return AgentName(name)
