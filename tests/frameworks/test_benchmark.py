"""The benchmark of frameworks measures complete tasks; a pause writes only its additions."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from scenario import FRAMEWORKS, load_framework

from benchmarks.framework_agents import MAKERS
from benchmarks.frameworks import bytes_per_pause, measure_bytes
from benchmarks.rivals import job
from benchmarks.rivals.frameworks import specs
from meshpoint.adapters.sql import migrations

FEW, MANY = 4, 16


@pytest.fixture(params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> str:
    load_framework(request.param)
    return str(request.param)


async def test_an_agent_completes_its_task_without_meshpoint(framework: str) -> None:
    job.check(3, (await MAKERS[framework](3).run()).strip())


async def test_a_late_pause_writes_no_more_than_an_early_one(
    framework: str, tmp_path: Path
) -> None:
    written: dict[int, int] = {}
    for pauses in (FEW, MANY):
        url = f"sqlite:///{tmp_path}/{pauses}.db"
        await asyncio.to_thread(migrations.upgrade, url)
        written[pauses] = await measure_bytes(framework, pauses, url)
    first, later = bytes_per_pause(written)
    assert later < first * 1.2, (first, later)


def test_each_contender_says_what_it_promises() -> None:
    rivals = [name for names in specs.RIVALS_OF.values() for name in names]
    assert specs.GUARANTEES.keys() == {*specs.RIVALS_OF, *rivals}
