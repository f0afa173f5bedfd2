"""The benchmark's contenders do all the work; if one fails, it is reported."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from benchmarks.rivals import job
from benchmarks.rivals.contender import Contender, RivalFailed
from meshpoint.adapters.sql import migrations


@pytest.mark.parametrize(
    ("agents", "framework"),
    [
        ("mesh_agents", None),
        ("frameworks.mesh_pydantic_ai", "pydantic_ai"),
        ("frameworks.mesh_langgraph", "langchain"),
    ],
)
async def test_a_mesh_contender_completes_a_round(
    tmp_path: Path, agents: str, framework: str | None
) -> None:
    if framework is not None:
        pytest.importorskip(framework)
    url = f"sqlite:///{tmp_path}/meshpoint.db"
    await asyncio.to_thread(migrations.upgrade, url)
    mesh = [sys.executable, "-m", "benchmarks.rivals.mesh", url, url]
    contender = await Contender.start("mesh", [*mesh, "--agents", f"benchmarks.rivals.{agents}"])
    try:
        done = await contender.run_round(fan_out=3, in_flight=2, seconds=0.1)
        assert len(done.latencies) >= 2
        assert done.latencies == sorted(done.latencies)
    finally:
        await contender.close()


async def test_a_rival_that_does_not_start_is_reported() -> None:
    with pytest.raises(RivalFailed, match="nobody: its process has ended"):
        await Contender.start("nobody", [sys.executable, "-c", ""])


def test_a_lost_answer_is_not_accepted() -> None:
    job.check(3, job.summary([job.answer()] * 3))
    with pytest.raises(AssertionError, match="2 answers"):
        job.check(3, job.summary([job.answer()] * 2))
