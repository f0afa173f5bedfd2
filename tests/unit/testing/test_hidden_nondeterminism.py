"""Agents with hidden dependencies, each of which the test kit's checks find."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import random
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from meshpoint import Failed, Ok, Peer, TaskExecutionContext, agent
from meshpoint.testing import CrashChanges, ReplayDiffers, TestMesh, crash_matrix
from meshpoint.testing.nondeterminism import find_nondeterminism

flights = Peer("flights", str, str)
weather = Peer("weather", str, str)
Draw = Callable[[], object]


def helper(read: Draw) -> object:
    return [read() for _ in range(2)][-1]


@pytest.mark.parametrize(
    ("read", "place"),
    [
        (random.random, "random.random() → ctx.random()"),
        (lambda: datetime.now(UTC), "datetime.now() → ctx.now()"),
        (uuid.uuid4, "uuid.uuid4() → ctx.uuid4()"),
        (time.time, "time.time() → ctx.now()"),
        (lambda: os.urandom(4).hex(), "os.urandom() → ctx.random()"),
    ],
    ids=["random", "now", "uuid4", "time", "urandom"],
)
async def test_a_value_between_two_calls_is_found_in_a_helper(read: Draw, place: str) -> None:
    @agent("travel")
    async def travel(ctx: TaskExecutionContext, city: str) -> str:
        await flights(city)
        return await weather(f"{city} {helper(read)}")

    async with TestMesh(travel, always_replay=True) as mesh:
        mesh.stub(flights).returns("120")
        mesh.stub(weather).returns("sunny")
        with pytest.raises(ReplayDiffers) as error:
            await mesh.call(travel, "Rome")
    assert str(error.value).startswith(
        "replay differs at call 2 (input); test_hidden_nondeterminism.py:"
    )
    assert place in str(error.value)


async def test_a_random_path_is_found() -> None:
    draws = itertools.cycle([0.1, 0.9])

    @agent("travel")
    async def travel(ctx: TaskExecutionContext, city: str) -> str:
        await flights(city)
        if next(draws) < 0.5:
            await flights(city)
        return await weather(city)

    async with TestMesh(travel, always_replay=True) as mesh:
        mesh.stub(flights).returns("120")
        mesh.stub(weather).returns("sunny")
        with pytest.raises(ReplayDiffers, match=r"expected \w+, recorded|the first run called"):
            await mesh.call(travel, "Rome")


async def test_a_global_counter_is_found() -> None:
    tasks = itertools.count()

    @agent("travel")
    async def travel(ctx: TaskExecutionContext, city: str) -> str:
        return await weather(f"{city} {next(tasks)}")

    async with TestMesh(travel, always_replay=True) as mesh:
        mesh.stub(weather).returns("sunny")
        with pytest.raises(ReplayDiffers, match=r"^replay differs at call 1 \(input\)"):
            await mesh.call(travel, "Rome")


async def test_a_random_value_from_a_thread_is_found() -> None:
    @agent("travel")
    async def travel(ctx: TaskExecutionContext, city: str) -> str:
        drawn = await asyncio.to_thread(random.random)
        return await weather(f"{city} {drawn}")

    async with TestMesh(travel, always_replay=True) as mesh:
        mesh.stub(weather).returns("sunny")
        with pytest.raises(ReplayDiffers, match=r"^replay differs at call 1 \(input\)"):
            await mesh.call(travel, "Rome")


async def test_threads_that_finish_in_another_order_are_found() -> None:
    orders = itertools.cycle([("a", "b"), ("b", "a")])

    @agent("travel")
    async def travel(ctx: TaskExecutionContext, city: str) -> str:
        finished = list[str]()
        turns = {name: asyncio.Event() for name in ("a", "b")}

        async def work(name: str) -> None:
            await turns[name].wait()
            await asyncio.to_thread(finished.append, name)

        tasks = {name: asyncio.create_task(work(name)) for name in turns}
        for name in next(orders):
            turns[name].set()
            await tasks[name]
        await ctx.gather(*[weather(name) for name in finished])
        return city

    async with TestMesh(travel, always_replay=True) as mesh:
        mesh.stub(weather).returns("sunny")
        with pytest.raises(ReplayDiffers, match=r"^replay differs at call 1, weather \(input\)"):
            await mesh.call(travel, "Rome")


SET_AGENT = """
import asyncio, json, sys
from datetime import timedelta
from pathlib import Path

from meshpoint import Peer, TaskExecutionContext, agent
from meshpoint.engine.history import collect_history
from meshpoint.model.ids import TaskId
from meshpoint.testing import ReplayDiffers, TestMesh, replay_history

weather = Peer("weather", str, str)

@agent("travel")
async def travel(ctx: TaskExecutionContext, city: str) -> str:
    cities = {f"{city} {number}" for number in range(8)}
    ordered = sorted(cities) if "sorted" in sys.argv else cities
    await ctx.gather(*[weather(each) for each in ordered])
    return city

async def export(path):
    async with TestMesh(travel, auto_advance=False) as mesh:
        mesh.stub(weather)
        await mesh.send(travel, "Rome", task_id="order-17")
        await mesh.advance(0)
        history = await collect_history(mesh._store, TaskId("order-17"), mesh.now())
        path.write_text(history.to_json())

async def replay(path):
    try:
        print(await replay_history(travel, path))
    except ReplayDiffers as error:
        print(error)

asyncio.run({"export": export, "replay": replay}[sys.argv[1]](Path(sys.argv[2])))
"""


def run_script(tmp_path: Path, seed: int, *arguments: str) -> str:
    script = tmp_path / "set_agent.py"
    script.write_text(SET_AGENT)
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        env={**os.environ, "PYTHONHASHSEED": str(seed)},
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_the_order_of_a_set_is_found_by_a_replay_in_another_process(tmp_path: Path) -> None:
    path = tmp_path / "history.json"
    run_script(tmp_path, 1, "export", str(path))
    assert len(json.loads(path.read_text())["calls"]) == 8
    assert "1 of 1 recorded pauses" not in run_script(tmp_path, 2, "replay", str(path))
    assert run_script(tmp_path, 2, "replay", str(path)).startswith(
        "replay differs at call 1, weather (input)"
    )
    run_script(tmp_path, 1, "export", str(path), "sorted")
    assert "its last pause" in run_script(tmp_path, 2, "replay", str(path), "sorted")


def stubs(mesh: TestMesh) -> None:
    mesh.stub(weather).returns("sunny")
    mesh.stub(flights).returns("120")


async def test_work_marked_before_it_is_done_is_lost_in_a_crash() -> None:
    marked, charged = set[str](), list[str]()

    async def forget(mesh: TestMesh) -> None:
        marked.clear()
        charged.clear()
        stubs(mesh)

    @agent("shop")
    async def shop(ctx: TaskExecutionContext, order: str) -> str:
        if order not in marked:  # a table of its own, written before the work
            marked.add(order)
            await ctx.step("charge", charged.append, order)
        return f"{await weather(order)}, {len(charged)} charged"

    with pytest.raises(CrashChanges) as error:
        await crash_matrix(shop, "17", setup=forget)
    text = str(error.value)
    assert "before='step': Ok(value='sunny, 0 charged'" in text


async def test_work_kept_in_the_process_is_lost_in_a_crash() -> None:
    replicas = itertools.count()

    @agent("shop")
    async def shop(ctx: TaskExecutionContext, order: str) -> str:
        drafts = dict[str, int]()  # lost with the run, unlike a step or a subtask
        drafts[order] = next(replicas)
        await weather(order)
        return f"draft {drafts[order]}"

    with pytest.raises(CrashChanges, match=r"Ok\(value='draft \d+'"):
        await crash_matrix(shop, "17", setup=stubs)


async def test_a_failure_that_only_a_crash_causes_is_found() -> None:
    opened = set[str]()

    async def close_all(mesh: TestMesh) -> None:
        opened.clear()
        stubs(mesh)

    def open_order(order: str) -> str:
        if order in opened:
            raise ValueError(f"{order} is open already")
        opened.add(order)
        return order

    @agent("shop")
    async def shop(ctx: TaskExecutionContext, order: str) -> str:
        await ctx.step("open", open_order, order)
        return await weather(order)

    with pytest.raises(CrashChanges, match="17 is open already"):
        await crash_matrix(shop, "17", setup=close_all)

    def open_once(order: str) -> str:
        opened.add(order)
        return order

    @agent("shop")
    async def fixed(ctx: TaskExecutionContext, order: str) -> str:
        await ctx.step("open", open_once, order)
        return await weather(order)

    def check(mesh: TestMesh, outcome: Ok[str] | Failed) -> None:
        assert isinstance(outcome, Ok)
        assert opened == {"17"}

    assert (await crash_matrix(fixed, "17", setup=close_all, check=check)).runs


async def test_a_clock_that_a_garbage_collection_reads_is_not_named() -> None:
    def watch(*_: object) -> None:
        time.perf_counter()

    gc.callbacks.append(watch)
    try:
        with find_nondeterminism() as places:
            gc.collect()
            assert not places
            watch()
        assert len(places) == 1
    finally:
        gc.callbacks.remove(watch)
