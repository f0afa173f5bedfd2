from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dashboard import scene as scenes
from dashboard.client import Browser
from dashboard.scene import Scene
from meshpoint.adapters.sql.operator_store import SqlOperatorStore
from meshpoint.dashboard import Access, Dashboard, LocalAccess


@dataclass(frozen=True)
class Written:
    """A scene, and the folder with its files."""

    scene: Scene
    folder: Path


@pytest.fixture(scope="session")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """The scene, written once. Each test has a copy."""
    folder = tmp_path_factory.mktemp("scene")

    async def write() -> Scene:
        store = await scenes.open_store(f"sqlite:///{folder}/mesh.db")
        scene = await scenes.write_scene(store)
        await store.close()
        await scenes.write_letters(
            folder / "mesh-queues.db", ["not JSON", "not JSON", "too large"]
        )
        return scene

    return Written(asyncio.run(write()), folder)


@pytest.fixture
def scene(written: Written) -> Scene:
    """The ids of the scene."""
    return written.scene


@pytest.fixture
def config(written: Written, tmp_path: Path) -> Path:
    """The configuration of a copy of the scene."""
    for file in written.folder.glob("*.db*"):
        shutil.copy(file, tmp_path)
    return scenes.write_config(tmp_path)


@pytest.fixture
async def store(config: Path) -> AsyncIterator[SqlOperatorStore]:
    """The database of the scene, as others see it."""
    opened = await scenes.open_store(f"sqlite:///{config.parent}/mesh.db")
    yield opened
    await opened.close()


@pytest.fixture
async def make_browser(config: Path) -> AsyncIterator[Any]:
    """Opens the dashboard of the scene in a browser."""
    apps: list[Dashboard] = []

    def make(
        access: Access | None = None, /, *, client: str = "127.0.0.1", **options: Any
    ) -> Browser:
        host = options.pop("host", "localhost:8400")
        app = Dashboard(config, access=access or LocalAccess("ada"), **options)
        apps.append(app)
        return Browser(app, host=host, client=client)

    yield make
    for app in apps:
        await app.aclose()


@pytest.fixture
def browser(make_browser: Any) -> Any:
    """A browser of an operator."""
    return make_browser()
