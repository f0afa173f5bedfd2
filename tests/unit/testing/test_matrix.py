"""A task survives a crash at each of its points, or the matrix says where it does not."""

from __future__ import annotations

from collections import Counter

import pytest

from meshpoint import Failed, Ok, Peer, Question, TaskExecutionContext, agent
from meshpoint.testing import CrashChanges, TestMesh, crash_matrix

warehouse = Peer("warehouse", str, str)
mailer = Peer("mailer", str, str)
runs: Counter[str] = Counter()


def charge(order: str) -> str:
    runs["charge"] += 1
    return f"receipt of {order}"


def shout(text: str) -> str:
    return text.upper()


@agent("shop")
async def shop(ctx: TaskExecutionContext, order: str) -> str:
    receipt = await ctx.step("charge", charge, order)
    shelf = await warehouse(order)
    text = await ctx.subtask("write", shout, receipt)
    await ctx.gather(mailer(text), mailer(shelf))
    return f"{text}, {shelf}"


def stubs(mesh: TestMesh) -> None:
    mesh.stub(warehouse).returns("shelf 7")
    mesh.stub(mailer).calls(lambda text: text)


async def test_every_crash_leaves_one_invoice() -> None:
    report = await crash_matrix(shop, "17", setup=stubs)
    assert report.outcome == Ok("RECEIPT OF 17, shelf 7")
    points = {(run.when, run.point) for run in report.runs}
    assert {("before", "checkpoint"), ("after", "dispatch"), ("before", "subtask")} <= points
    repeating = [str(run) for run in report.runs if run.repeated]
    assert repeating == [
        "after='step'",
        "before='record'",
        "before='record', pass 3",
        "after='subtask'",
    ]
    assert "before='checkpoint', pass 2: same result" in str(report)


async def test_effects_outside_steps_are_found() -> None:
    runs.clear()

    @agent("naive")
    async def naive(ctx: TaskExecutionContext, order: str) -> str:
        charge(order)
        return f"{await warehouse(order)}, charged {runs['charge']} times"

    with pytest.raises(CrashChanges) as error:
        await crash_matrix(naive, "17", setup=stubs)
    assert "before='checkpoint': Ok(value='shelf 7, charged" in str(error.value)


async def test_another_request_is_found() -> None:
    @agent("impure")
    async def impure(ctx: TaskExecutionContext, order: str) -> str:
        runs["impure"] += 1
        return await warehouse(f"{order}-{runs['impure']}")

    def check(mesh: TestMesh, outcome: Ok[str] | Failed) -> None:
        assert isinstance(outcome, Ok | Failed)

    runs.clear()
    with pytest.raises(CrashChanges, match=r"'warehouse' was also asked \"17-\d+\""):
        await crash_matrix(impure, "17", setup=stubs, check=check)


async def test_check_replaces_the_comparison() -> None:
    checked: list[object] = []

    @agent("counting")
    async def counting(ctx: TaskExecutionContext, order: str) -> int:
        runs["counting"] += 1
        await warehouse(order)
        return runs["counting"]

    async def check(mesh: TestMesh, outcome: Ok[int] | Failed) -> None:
        assert isinstance(outcome, Ok)
        assert mesh.stub(warehouse).requests == ["17"]
        checked.append(outcome.value)

    report = await crash_matrix(counting, "17", setup=stubs, check=check)
    assert len(checked) == 1 + len(report.runs)


async def test_a_check_that_fails_without_a_crash_is_raised() -> None:
    def check(mesh: TestMesh, outcome: Ok[str] | Failed) -> None:
        assert outcome == Ok("nothing")

    with pytest.raises(AssertionError, match="nothing"):
        await crash_matrix(shop, "17", setup=stubs, check=check)


async def test_a_failing_task_is_not_a_reference() -> None:
    @agent("broken")
    async def broken(ctx: TaskExecutionContext, order: str) -> str:
        raise RuntimeError("no shelf")

    with pytest.raises(CrashChanges, match=r"without a crash, 'broken' fails: .*no shelf"):
        await crash_matrix(broken, "17")


async def test_a_task_that_never_ends_is_not_a_reference() -> None:
    with pytest.raises(CrashChanges, match="without a crash, idle: 'warehouse' is not served"):
        await crash_matrix(shop, "17")


clerk = Peer("clerk", str, str)
approval = Question("approval", bool)
reminder = Question("reminder", bool)


@agent("buyer")
async def buyer(ctx: TaskExecutionContext, item: str) -> str:
    began = ctx.now()
    await ctx.sleep(3600)
    wait = ctx.wait_for(approval, prompt=item)
    approved, _ = await ctx.gather(wait, clerk(wait.id))
    try:
        await ctx.wait_for(reminder, timeout=60)
    except TimeoutError:
        approved = not approved
    await ctx.first(ctx.sleep(10), warehouse(item))
    return f"{approved} after {(ctx.now() - began).total_seconds() >= 3660}"


async def test_sleeps_and_questions_survive_a_crash_at_each_point() -> None:
    def answering(mesh: TestMesh) -> None:
        async def answer(question_id: str) -> str:
            await mesh.complete(question_id, True)
            return "done"

        mesh.stub(clerk).calls(answer)
        mesh.stub(warehouse)  # silent, so that the sleep wins

    report = await crash_matrix(buyer, "a chair", setup=answering)
    assert report.outcome == Ok("False after True")
    points = Counter((run.when, run.point) for run in report.runs)
    assert points["before", "checkpoint"] == 4
    assert points["after", "resume"] == 4
    assert {("before", "response"), ("after", "response")} <= set(points)
