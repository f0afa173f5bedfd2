"""An operations handle that fails to open leaves nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshpoint import operations
from meshpoint.adapters.sql import SqlStore
from meshpoint.errors import MeshpointError


async def test_a_database_that_cannot_be_opened_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = list[SqlStore]()
    original = SqlStore.close

    async def close(self: SqlStore) -> None:
        closed.append(self)
        await original(self)

    monkeypatch.setattr(SqlStore, "close", close)
    (tmp_path / "tasks.db").write_bytes(b"no database" * 100)
    with pytest.raises(MeshpointError):
        await operations.Operations(f"sqlite:///{tmp_path}/tasks.db").__aenter__()
    assert len(closed) == 1
