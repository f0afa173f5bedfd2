"""`run_with_timeout` limits how long closing a resource may take."""

from __future__ import annotations

import asyncio

import pytest

from meshpoint.engine.background import run_with_timeout


@pytest.mark.parametrize("cancelled", [False, True], ids=["late", "cancelled"])
async def test_a_cancelled_step_has_cleaned_up_when_bounded_returns(cancelled: bool) -> None:
    started, cleaned_up = asyncio.Event(), False

    async def step() -> None:
        nonlocal cleaned_up
        try:
            started.set()
            await asyncio.Event().wait()
        finally:
            for _ in range(20):
                await asyncio.sleep(0)
            cleaned_up = True

    closing = asyncio.create_task(run_with_timeout(step(), 3600 if cancelled else 0.1, "closing"))
    await started.wait()
    if cancelled:
        closing.cancel()
    await asyncio.wait({closing})

    assert closing.cancelled() is cancelled
    assert cleaned_up


async def test_a_step_that_swallows_its_cancellation_is_abandoned(
    caplog: pytest.LogCaptureFixture,
) -> None:
    released = asyncio.Event()

    async def step() -> None:
        while not released.is_set():
            try:
                await released.wait()
            except asyncio.CancelledError:
                continue

    before = asyncio.all_tasks()
    await run_with_timeout(step(), 0.1, "closing")

    assert caplog.messages == ["closing did not end within 0.1 s and is cancelled"]
    (abandoned,) = asyncio.all_tasks() - before
    released.set()
    await abandoned
