"""Tests that every working memory must pass: one per sentence of its port, and per command.

The port is `meshpoint.ports.working_memory`.

To test a working memory of your own with pytest (and pytest-asyncio, with `asyncio_mode = auto`):

    from meshpoint.testing.conformance.working_memory import WorkingMemorySuite

    class TestMyMemory(WorkingMemorySuite):
        @pytest.fixture
        async def memory(self, namespace: str) -> AsyncIterator[WorkingMemory]:
            memory = MyMemory(..., namespace=namespace)
            yield memory
            await memory.close()

        @pytest.fixture
        async def other(self, memory: WorkingMemory, namespace: str) -> AsyncIterator[WorkingMemory]:
            ...  # a second one on the same data; leave it out if only one process can use yours

        async def pass_time(self, memory: WorkingMemory, duration: timedelta) -> None:
            ...  # advance its clock; leave it out if the clock runs by itself

Every test uses a task of its own, and nothing else may write to its memory.
"""

from __future__ import annotations

import pytest

SECTIONS = ("case", "values", "collections", "times", "owners", "whole")
pytest.register_assert_rewrite(*(f"meshpoint.testing.conformance.working_memory_{section}" for section in SECTIONS))

from meshpoint.testing.conformance.working_memory_case import WorkingMemoryCase  # noqa: E402
from meshpoint.testing.conformance.working_memory_collections import (  # noqa: E402
    HashSuite,
    ListSuite,
    SetSuite,
    SortedSetSuite,
)
from meshpoint.testing.conformance.working_memory_owners import AdoptSuite, ForgetSuite, OwnerSuite  # noqa: E402
from meshpoint.testing.conformance.working_memory_times import OwnTimeSuite  # noqa: E402
from meshpoint.testing.conformance.working_memory_values import BatchSuite, KeySuite, NumberSuite  # noqa: E402
from meshpoint.testing.conformance.working_memory_whole import ReadSuite, ReplaceSuite  # noqa: E402

__all__ = ["WorkingMemorySuite"]


class WorkingMemorySuite(
    KeySuite,
    NumberSuite,
    BatchSuite,
    ListSuite,
    HashSuite,
    SetSuite,
    SortedSetSuite,
    OwnTimeSuite,
    OwnerSuite,
    AdoptSuite,
    ForgetSuite,
    ReadSuite,
    ReplaceSuite,
    WorkingMemoryCase,
):
    """Conformance tests for a `WorkingMemory`. Subclass it in a test module."""
