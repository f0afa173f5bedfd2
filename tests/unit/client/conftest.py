from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from .calling import Call, open_call


@pytest_asyncio.fixture
async def call() -> AsyncIterator[Call]:
    """A connected caller, and an agent that the test plays."""
    async with open_call() as opened:
        yield opened
