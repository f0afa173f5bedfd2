"""The checkpointer of a graph that runs as a task.

It keeps the latest checkpoint of each namespace while a segment runs. A pause stores what the next
segment needs.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    WRITES_IDX_MAP,
    BaseCheckpointSaver,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    copy_checkpoint,
    writes_sort_key,
)
from pydantic import JsonValue

from meshpoint.frameworks.langgraph.codec import decode, encode

ROOT = ""
"""Namespace of the graph itself. Its subgraphs have others."""
MESSAGES = "messages"
"""The channel whose messages are appended at each pause."""


@dataclass(slots=True)
class _Latest:
    """The latest checkpoint of a namespace, and the writes of the tasks after it.

    The key of a write is the id of its task and its index there; the value is the path of the
    task, the channel and the value.
    """

    checkpoint: Checkpoint
    metadata: CheckpointMetadata
    writes: dict[tuple[str, int], tuple[str, str, Any]] = field(default_factory=dict)


class Checkpoints(dict[str, _Latest]):
    """The checkpoints of one run of a graph, by namespace."""

    def messages(self) -> list[Any]:
        """The messages of the graph."""
        found = self[ROOT].checkpoint["channel_values"].get(MESSAGES)
        return found if isinstance(found, list) else []

    def dump(self, open_tasks: Collection[str]) -> list[JsonValue]:
        """What the next segment needs, without the messages.

        Subgraphs of tasks that are not open have ended.
        """
        return [
            encode([namespace, *_parts(namespace, latest)])
            for namespace, latest in self.items()
            if (task := namespace.partition("|")[0].partition(":")[2]) in open_tasks or not task
        ]

    @classmethod
    def load(cls, dumped: Any, messages: list[Any]) -> Checkpoints:
        """Read what `dump` has written, and put the messages back."""
        checkpoints = cls()
        for namespace, checkpoint, metadata, writes in decode(dumped):
            latest = _Latest(checkpoint, metadata)
            for task, index, *write in writes:
                latest.writes[task, index] = (write[0], write[1], write[2])
            checkpoints[namespace] = latest
        if messages:
            checkpoints[ROOT].checkpoint["channel_values"][MESSAGES] = messages
        return checkpoints


def _parts(namespace: str, latest: _Latest) -> tuple[Any, Any, list[Any]]:
    checkpoint = copy_checkpoint(latest.checkpoint)
    if namespace == ROOT and isinstance(checkpoint["channel_values"].get(MESSAGES), list):
        del checkpoint["channel_values"][MESSAGES]
    return checkpoint, latest.metadata, [[*key, *write] for key, write in latest.writes.items()]


current_checkpoints: ContextVar[Checkpoints] = ContextVar("meshpoint_langgraph_checkpoints")


class TaskSaver(BaseCheckpointSaver[int]):
    """The checkpointer of every graph that `durable` has wrapped.

    It has no history: a task resumes only where it has paused.
    """

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """The latest checkpoint of a namespace."""
        configured = config["configurable"]
        namespace = configured.get("checkpoint_ns", ROOT)
        latest = current_checkpoints.get().get(namespace)
        if latest is None:
            return None
        found = latest.checkpoint["id"]
        if (configured.get("checkpoint_id") or found) != found:
            return None
        writes = sorted(
            latest.writes.items(), key=lambda each: writes_sort_key(each[1][0], *each[0])
        )
        return CheckpointTuple(
            _with_id(config, namespace, found),
            copy_checkpoint(latest.checkpoint),
            latest.metadata,
            pending_writes=[(key[0], channel, value) for key, (_, channel, value) in writes],
        )

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Replace the latest checkpoint of a namespace."""
        namespace = config["configurable"].get("checkpoint_ns", ROOT)
        current_checkpoints.get()[namespace] = _Latest(copy_checkpoint(checkpoint), metadata)
        return _with_id(config, namespace, checkpoint["id"])

    async def aput_writes(
        self,
        config: RunnableConfig,
        writes: Sequence[tuple[str, Any]],
        task_id: str,
        task_path: str = "",
    ) -> None:
        """Add the writes of a task after the latest checkpoint."""
        configured = config["configurable"]
        latest = current_checkpoints.get().get(configured.get("checkpoint_ns", ROOT))
        if latest is None or latest.checkpoint["id"] != configured.get("checkpoint_id"):
            return
        for position, (channel, value) in enumerate(writes):
            index = WRITES_IDX_MAP.get(channel, position)
            if index < 0 or (task_id, index) not in latest.writes:
                latest.writes[task_id, index] = (task_path, channel, value)


def _with_id(config: RunnableConfig, namespace: str, checkpoint_id: str) -> RunnableConfig:
    configured = {"checkpoint_ns": namespace, "checkpoint_id": checkpoint_id}
    return {"configurable": {"thread_id": config["configurable"]["thread_id"], **configured}}
