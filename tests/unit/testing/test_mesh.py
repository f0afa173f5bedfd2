"""A mesh in virtual time."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from pydantic import BaseModel

from meshpoint import (
    AgentFailed,
    ConfigurationError,
    Failed,
    InvalidOption,
    Ok,
    Peer,
    Question,
    TaskCancelled,
    TaskExecutionContext,
    TaskFailed,
    TaskTimeout,
    agent,
)
from meshpoint.testing import MeshIdle, TestMesh, mesh_fixture

survey = Peer("survey", str, str, timeout=timedelta(days=3))
double = Peer("doubler", int, int)


@agent("trial")
async def trial(ctx: TaskExecutionContext, user: str) -> str:
    match await ctx.outcome(survey(user)):
        case Ok(value=value):
            return f"{user}: {value}"
        case Failed(kind=kind):
            return f"{user}: {kind.value}"


@agent("doubler")
async def doubler(ctx: TaskExecutionContext, number: int) -> int:
    return 2 * number


@agent("summer")
async def summer(ctx: TaskExecutionContext, numbers: list[int]) -> int:
    return sum(await ctx.gather(*[double(number) for number in numbers]))


mesh = mesh_fixture(summer)


async def test_a_fixture_gives_each_test_a_mesh(mesh: TestMesh) -> None:
    mesh.stub(double).returns(7)
    assert await mesh.call(summer, [1, 2]) == 14


async def test_agents_call_each_other() -> None:
    async with TestMesh(summer, doubler) as mesh:
        assert await mesh.call(summer, [1, 2, 3]) == 12


async def test_a_stub_answers() -> None:
    async with TestMesh(summer) as mesh:
        asked = mesh.stub(double).calls(lambda number: 10 * number)
        assert await mesh.call(summer, [1, 2]) == 30
        assert sorted(asked.requests) == [1, 2]


async def test_waiting_jumps_to_what_is_due() -> None:
    async with TestMesh(trial) as mesh:
        mesh.stub(survey)
        started_at = mesh.now()
        assert await mesh.call(trial, "ada") == "ada: timeout"
        assert timedelta(days=3) <= mesh.now() - started_at < timedelta(days=3, seconds=2)


async def test_advancing_stops_before_what_is_due_later() -> None:
    async with TestMesh(trial) as mesh:
        asked = mesh.stub(survey)
        task = await mesh.send(trial, "ada")
        await mesh.advance(timedelta(days=2, hours=23))
        assert asked.requests == ["ada"]
        asked.answer("great")
        assert await task.result() == "ada: great"


async def test_a_sleep_is_virtual() -> None:
    @agent("sleeper")
    async def sleeper(ctx: TaskExecutionContext, user: str) -> str:
        await ctx.sleep(timedelta(days=3))
        return f"{user}: {await survey(user)}"

    async with TestMesh(sleeper, always_replay=True) as mesh:
        asked = mesh.stub(survey).returns("great")
        started_at = mesh.now()
        task = await mesh.send(sleeper, "ada")
        await mesh.advance(timedelta(days=2, hours=23))
        assert asked.requests == []
        assert await task.result() == "ada: great"
        assert mesh.now() == started_at + timedelta(days=3)


@pytest.mark.parametrize("is_instant", [False, True])
async def test_a_task_begins_later_in_virtual_time(is_instant: bool) -> None:
    async with TestMesh(trial) as mesh:
        asked = mesh.stub(survey).returns("great")
        day = timedelta(days=1)
        if is_instant:
            task = await mesh.send(trial, "ada", start_at=mesh.now() + day)
        else:
            task = await mesh.send(trial, "ada", delay=day, timeout=60)
        await mesh.advance(timedelta(hours=23))
        assert asked.requests == []
        assert await task.result() == "ada: great"


async def test_several_waits_share_the_clock() -> None:
    async with TestMesh(trial) as mesh:
        mesh.stub(survey)
        started_at = mesh.now()
        calls = [mesh.call(trial, user) for user in ("ada", "bob", "eve")]
        assert await asyncio.gather(*calls) == ["ada: timeout", "bob: timeout", "eve: timeout"]
        assert mesh.now() - started_at == timedelta(days=3)


async def test_a_wait_can_be_given_up() -> None:
    async with TestMesh(trial) as mesh:
        stub = mesh.stub(survey)
        task = await mesh.send(trial, "ada")
        waiting = asyncio.create_task(task.result())
        await stub.next_request()
        waiting.cancel()
        await asyncio.wait({waiting})
        stub.answer("great")
        assert await task.result() == "ada: great"


async def test_the_deadline_of_a_task_is_virtual() -> None:
    async with TestMesh(summer) as mesh:
        mesh.stub(double)
        with pytest.raises(TaskTimeout):
            await mesh.call(summer, [1], timeout=timedelta(days=30))


async def test_a_peer_without_a_stub_is_named() -> None:
    async with TestMesh(trial) as mesh:
        task = await mesh.send(trial, "ada")
        with pytest.raises(MeshIdle) as error:
            await task.result()
        assert str(error.value) == "idle: 'survey' is not served: mesh.stub(survey).returns(…)"
        mesh.stub(survey).returns("late")
        assert await task.result() == "ada: late"


async def test_a_stub_that_does_not_answer_is_named() -> None:
    async with TestMesh(summer) as mesh:
        stub = mesh.stub(double)
        task = await mesh.send(summer, [1])
        with pytest.raises(MeshIdle) as error:
            await task.result()
        assert str(error.value) == "idle: 'summer' waits for 'doubler': answer its stub"
        assert await stub.next_request() == 1
        stub.answer(5)
        assert await task.result() == 5


async def test_without_auto_advance_the_test_moves_the_clock() -> None:
    async with TestMesh(trial, auto_advance=False) as mesh:
        mesh.stub(survey)
        task = await mesh.send(trial, "ada")
        with pytest.raises(MeshIdle, match=r"the next thing is due in 3 days.*mesh\.advance"):
            await task.result()
        await mesh.advance(timedelta(days=3))
        assert await task.result() == "ada: timeout"


async def test_an_idle_timeout_does_not_keep_a_wait_alive_forever() -> None:
    patient = Peer("summer", list[int], int, idle_timeout=timedelta(minutes=5))

    @agent("caller")
    async def caller(ctx: TaskExecutionContext, number: int) -> int:
        return await patient([number])

    async with TestMesh(caller, summer) as mesh:
        mesh.stub(double)
        with pytest.raises(MeshIdle, match="'summer' waits for 'doubler'"):
            await mesh.call(caller, 1)


async def test_code_that_waits_in_real_time_is_not_idle() -> None:
    @agent("slow")
    async def slow(ctx: TaskExecutionContext, number: int) -> int:
        await asyncio.to_thread(lambda: None)
        await asyncio.sleep(0.01)
        return number

    async with TestMesh(slow) as mesh:
        assert await mesh.call(slow, 7, timeout=timedelta(hours=1)) == 7


async def test_failures_of_stubs_end_after_their_times() -> None:
    async with TestMesh(trial) as mesh:
        mesh.stub(survey).fails("timeout", times=1).returns("fine")
        assert await mesh.call(trial, "ada") == "ada: timeout"
        assert await mesh.call(trial, "bob") == "bob: fine"


async def test_an_agent_that_fails_ends_its_task(caplog: pytest.LogCaptureFixture) -> None:
    @agent("broken")
    async def broken(ctx: TaskExecutionContext, number: int) -> int:
        raise RuntimeError("no")

    async with TestMesh(broken) as mesh:
        with pytest.raises(TaskFailed, match="no"):
            await mesh.call(broken, 1)
    assert 'raise RuntimeError("no")' in caplog.text, "the traceback helps to find the line"


def test_plain_asyncio_run_works() -> None:
    async def main() -> None:
        async with TestMesh(trial) as mesh:
            mesh.stub(survey)
            assert await mesh.call(trial, "ada") == "ada: timeout"

    asyncio.run(main())


def test_only_agents_are_served() -> None:
    with pytest.raises(ConfigurationError, match=r"write mesh\.stub\(survey\)"):
        TestMesh(survey)


async def test_a_test_can_attach_to_a_task() -> None:
    async with TestMesh(trial) as mesh:
        mesh.stub(survey)
        await mesh.send(trial, "ada", task_id="survey-1")
        assert await mesh.task(trial, "survey-1").result() == "ada: timeout"


async def test_an_unknown_task_is_not_awaited() -> None:
    async with TestMesh(trial) as mesh:
        with pytest.raises(MeshIdle, match="no task is left"):
            await mesh.task(trial, "survey-2").result()


async def test_updates_arrive_and_end() -> None:
    @agent("chatty")
    async def chatty(ctx: TaskExecutionContext, user: str) -> str:
        await ctx.update_status("asking")
        return await survey(user)

    async with TestMesh(chatty) as mesh:
        mesh.stub(survey).returns("fine")
        task = await mesh.send(chatty, "ada")
        kinds = [update.kind async for update in task.updates()]
        assert kinds[-1] == "ended"
        assert "status" in kinds


async def test_a_cancelled_task_ends_at_once() -> None:
    async with TestMesh(trial) as mesh:
        stub = mesh.stub(survey)
        task = await mesh.send(trial, "ada")
        await stub.next_request()
        await task.cancel()
        with pytest.raises(TaskCancelled):
            await task.result()
        await mesh.advance(0)
        with pytest.raises(ValueError, match="no request to 'survey'"):
            stub.answer("too late")


class Decision(BaseModel):
    approved: bool


approval = Question("approval", Decision)
mailed: list[str] = []


@agent("purchasing")
async def purchasing(ctx: TaskExecutionContext, item: str) -> str:
    for reminder in range(3):
        wait = ctx.wait_for(approval, prompt=f"Buy {item}?", timeout=timedelta(days=1))
        await ctx.step(f"mail {reminder}", mailed.append, wait.id)
        try:
            decision = await wait
        except TimeoutError:
            continue
        return "bought" if decision.approved else "refused"
    raise AgentFailed("nobody decided within three days")


@agent("asking")
async def asking(ctx: TaskExecutionContext, item: str) -> bool:
    return (await ctx.wait_for(approval, prompt=f"Buy {item}?")).approved


async def test_a_question_is_answered_by_the_test() -> None:
    mailed.clear()
    async with TestMesh(purchasing, always_replay=True) as mesh:
        task = await mesh.send(purchasing, "a chair")
        await mesh.advance(timedelta(days=1, hours=1))
        assert len(mailed) == 2
        await mesh.complete(mailed[-1], Decision(approved=True))
        assert await task.result() == "bought"


@agent("strict")
async def strict(ctx: TaskExecutionContext, item: str) -> bool:
    wait = ctx.wait_for("approval", bool, prompt=f"Buy {item}?", allow=["managers"])
    await ctx.step("mail", mailed.append, wait.id)
    return await wait


async def test_the_test_answers_questions_to_others() -> None:
    mailed.clear()
    async with TestMesh(strict) as mesh:
        task = await mesh.send(strict, "a chair")
        await mesh.advance(0)
        await mesh.complete(mailed[-1], True)
        assert await task.result() is True


async def test_a_wrong_duration_is_an_error_of_the_test() -> None:
    async with TestMesh(asking) as mesh:
        with pytest.raises(InvalidOption, match="advance is -3; it must not be negative"):
            await mesh.advance(-3)


async def test_a_question_ends_without_an_answer() -> None:
    mailed.clear()
    async with TestMesh(purchasing) as mesh:
        with pytest.raises(TaskFailed, match="nobody decided within three days"):
            await mesh.call(purchasing, "a chair")
    assert len(mailed) == 3


async def test_an_open_question_is_named() -> None:
    async with TestMesh(asking) as mesh:
        with pytest.raises(MeshIdle) as error:
            await mesh.call(asking, "a chair")
        assert str(error.value) == "idle: 'asking' waits for 'approval': complete it"
