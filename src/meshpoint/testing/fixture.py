"""A `TestMesh` as a pytest fixture."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from meshpoint import extras
from meshpoint.agents.peer import Addressable
from meshpoint.testing.mesh import TestMesh


def mesh_fixture(
    *agents: Addressable[Any, Any], auto_advance: bool = True, always_replay: bool = False
) -> Any:
    """Create a pytest fixture: a `TestMesh` of its own for each test that uses it.

        mesh = mesh_fixture(travel)

        async def test_it_asks_for_a_flight(mesh: TestMesh) -> None:
            mesh.stub(flights).returns(Quote(price=120))

    It needs pytest-asyncio. With another plugin, write `async with TestMesh(travel) as mesh`.

    Args:
        agents: See `TestMesh`.
        auto_advance: See `TestMesh`.
        always_replay: See `TestMesh`.

    Raises:
        ConfigurationError: pytest or pytest-asyncio is not installed.
    """
    extras.MESH_FIXTURE.require("mesh_fixture")
    import pytest_asyncio

    @pytest_asyncio.fixture
    async def mesh() -> AsyncIterator[TestMesh]:
        async with TestMesh(
            *agents, auto_advance=auto_advance, always_replay=always_replay
        ) as opened:
            yield opened

    return mesh
