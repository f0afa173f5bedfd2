"""Files that only their owner may read."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import text

from meshpoint.adapters.sql import migrations
from meshpoint.adapters.sql.engine import engine_for
from meshpoint.errors import ConfigurationError
from meshpoint.files import create_private


@pytest.fixture(autouse=True)
def _open_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


def file_mode(path: Path) -> str:
    return oct(path.stat().st_mode & 0o777)


def test_a_private_file_is_created_once(tmp_path: Path) -> None:
    path = tmp_path / "new"
    assert create_private(path)
    assert file_mode(path) == "0o600"
    path.write_text("kept")
    path.chmod(0o640)
    assert not create_private(path)
    assert (path.read_text(), file_mode(path)) == ("kept", "0o640")


def test_a_link_is_not_followed_to_create_its_target(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(FileExistsError, match="dangling symbolic link"):
        create_private(tmp_path / "link")
    assert not (tmp_path / "target").exists()
    (tmp_path / "target").touch()
    assert not create_private(tmp_path / "link")


def test_migrations_create_a_private_file(tmp_path: Path) -> None:
    migrations.upgrade(f"sqlite:///{tmp_path}/tasks.db")
    assert file_mode(tmp_path / "tasks.db") == "0o600"
    (tmp_path / "link.db").symlink_to(tmp_path / "target.db")
    with pytest.raises(ConfigurationError, match="dangling symbolic link"):
        migrations.upgrade(f"sqlite:///{tmp_path}/link.db")


def test_a_store_creates_private_files(tmp_path: Path) -> None:
    async def modes() -> dict[str, str]:
        engine = engine_for(
            f"sqlite:///{tmp_path}/tasks.db", command_timeout=timedelta(seconds=5), pool_size=1
        )
        async with engine.connect() as connection:
            await connection.execute(text("CREATE TABLE some (thing TEXT)"))
            found = {path.name: file_mode(path) for path in tmp_path.iterdir()}
        await engine.dispose()
        return found

    assert asyncio.run(modes()) == dict.fromkeys(
        ("tasks.db", "tasks.db-wal", "tasks.db-shm"), "0o600"
    )
