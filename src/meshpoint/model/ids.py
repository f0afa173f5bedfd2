"""Names and identities."""

from __future__ import annotations

import re
from typing import NewType

import uuid_utils

from meshpoint.errors import ConfigurationError

AgentName = NewType("AgentName", str)
TaskId = NewType("TaskId", str)
"""Names one piece of work across the mesh. A peer call's `sub_task_id` is the peer's `TaskId`."""
RunId = NewType("RunId", str)
"""Names one run of one segment. Every write of the run carries it, so a repeated write finds itself."""
ReplicaId = NewType("ReplicaId", str)
"""Names one incarnation of a replica; never used again after the process ends."""

_AGENT_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")


def new_id() -> str:
    """A time-ordered UUID (version 7): neighbours in time are neighbours in the index."""
    return str(uuid_utils.uuid7())


_RESUMED = re.compile(r"(.+)~resume-(\d+)", re.DOTALL)


def resumed_id(task_id: TaskId, retry: int) -> TaskId:
    """`task_id` as a resumed operation's `retry`-th attempt knows the task of a peer that is to go on.

    The peer knows nothing of it: it answers under its own id, and echoes in which attempt it was asked. So what it
    had answered to an earlier attempt, and comes late, is the answer to nothing.
    """
    return TaskId(f"{task_id}~resume-{retry}")


def plain_id(task_id: str) -> tuple[TaskId, int | None]:
    """An id without the attempt that `resumed_id` put into it, and that attempt; None: it has none."""
    marked = _RESUMED.fullmatch(task_id)
    return (TaskId(task_id), None) if marked is None else (TaskId(marked[1]), int(marked[2]))


def agent_name(name: str) -> AgentName:
    """`name` as an agent name: letters, digits, `_` and `-`, at most 63 characters.

    Raises:
        ConfigurationError: the name has other characters; it would not survive as a queue name.
    """
    if not _AGENT_NAME.fullmatch(name):
        raise ConfigurationError(
            "agent.name",
            f"{name!r} is not a valid agent name",
            "use letters, digits, '_' and '-' (63 at most)",
        )
    return AgentName(name)
