"""A checkpoint's working memory is stored in the database and nowhere else."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from meshpoint.model.subtasks import AgentCheckpoint
from meshpoint.testing.conformance.build import a_checkpoint, a_run

RUN = a_run()
WITH_MEMORY = a_checkpoint(RUN, l1_snapshot=b"\xff\0memory", l1_snapshot_hash="digest")


def test_the_json_of_a_checkpoint_contains_only_the_hash_of_the_memory() -> None:
    without = WITH_MEMORY.model_copy(update={"l1_snapshot": None})
    assert "l1_snapshot" not in WITH_MEMORY.model_dump()
    assert AgentCheckpoint.model_validate_json(WITH_MEMORY.model_dump_json()) == without
    assert without.l1_snapshot_hash == "digest"


def test_the_repr_of_a_checkpoint_omits_the_memory() -> None:
    assert "xff" not in repr(WITH_MEMORY)
    assert "digest" in repr(WITH_MEMORY)


def test_a_memory_without_its_hash_is_refused() -> None:
    with pytest.raises(ValidationError, match="needs l1_snapshot_hash"):
        a_checkpoint(RUN, l1_snapshot=b"memory")


def test_a_checkpoint_of_the_previous_release_has_no_memory() -> None:
    fields = a_checkpoint(RUN).model_dump(
        exclude={"l1_snapshot_hash", "l1_in_sql", "memory_writes"}
    )
    read = AgentCheckpoint.model_validate(fields)
    assert (read.l1_snapshot_hash, read.l1_snapshot) == (None, None)
