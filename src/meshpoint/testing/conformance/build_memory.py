"""Builders for checkpoints that include a working memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from meshpoint.model.checkpoint import L1Snapshot, Pause, Run, Save
from meshpoint.model.ids import TaskId
from meshpoint.model.subtasks import AgentCheckpoint, Saved
from meshpoint.ports.task_store import CheckpointStore
from meshpoint.testing.conformance.build import a_checkpoint, a_pause, a_record


def digest(word: str) -> str:
    """A stand-in for the digest of the memory `word`."""
    return f"digest of {word}"


def content(word: str) -> bytes:
    """The packed content of the memory `word`."""
    return f"\0{word}\xff".encode("latin-1")


def remembering(run: Run, seq: int, word: str, **values: object) -> AgentCheckpoint:
    """A checkpoint with the memory `word`."""
    bring = {"l1_snapshot": content(word), "l1_snapshot_hash": digest(word)}
    return a_checkpoint(run, seq, a_record("fetch", f'"{word}"'), **bring, **values)


def remembering_pause(run: Run, seq: int, word: str) -> Pause:
    """A pause whose checkpoint has the memory `word`."""
    return replace(a_pause(run=run), checkpoint=remembering(run, seq, word))


async def save(store: CheckpointStore, run: Run, words: Sequence[str | None], *, first: int = 1) -> None:
    """Write a checkpoint for each of `words`, numbered from `first`. `None` means no memory."""
    for seq, word in enumerate(words, first):
        checkpoint = a_checkpoint(run, seq) if word is None else remembering(run, seq, word)
        assert await store.save(Save(run, checkpoint)) == Saved()


async def memory_of(store: CheckpointStore, task_id: TaskId) -> tuple[int, str]:
    """The stored memory: the number of its checkpoint, and its word."""
    found = await store.l1_snapshot(task_id)
    assert found is not None
    word = found.content[1:-1].decode()
    assert found == L1Snapshot(found.seq, digest(word), content(word))
    return found.seq, word


async def kept(store: CheckpointStore, task_id: TaskId) -> list[int]:
    """The numbers of the stored checkpoints, oldest first."""
    return [each.seq for each in await store.history(task_id)]


async def nothing_new(store: CheckpointStore, run: Run) -> None:
    """Assert that the operation still has only its first checkpoint and memory."""
    assert await kept(store, run.task_id) == [1]
    assert await memory_of(store, run.task_id) == (1, "first")
