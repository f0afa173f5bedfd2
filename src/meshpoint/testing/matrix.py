"""Kill an agent's replica at each point of a task, one run per point."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import isawaitable
from typing import Any, Generic, TypeAlias, TypeVar

from meshpoint.agents.peer import Addressable
from meshpoint.model.events import Event, Phase, Step
from meshpoint.model.outcomes import Failed, Ok
from meshpoint.testing.crash_points import CrashPoint, PlannedCrash, When, find_point
from meshpoint.testing.errors import CrashChanges, MeshIdle
from meshpoint.testing.mesh import TestMesh
from meshpoint.testing.replica import Replica

In = TypeVar("In")
Out = TypeVar("Out")

_Setup: TypeAlias = Callable[[TestMesh], object] | None
_Check: TypeAlias = Callable[[TestMesh, Ok[Out] | Failed], object] | None

_TASK_ID = "crash-matrix"
"""The same in each run, because `ctx.uuid4`, `ctx.random` and question ids depend on it."""
_MAY_REPEAT = frozenset({("after", "step"), ("after", "subtask"), ("before", "record")})
"""Between the end of a step and the commit of its record, a crash runs it twice."""


@dataclass(frozen=True, slots=True)
class CrashRun(Generic[Out]):
    """One run of `crash_matrix`.

    Attributes:
        when: Whether the replica died before or after the point.
        point: Where it died; see `CrashPoint`.
        number: At which pass of the point, from 1.
        outcome: The task's outcome, or `None` if the task did not end.
        repeated: The steps and subtasks whose function ran again.
        problems: What differs from the run without a crash.
    """

    when: When
    point: CrashPoint
    number: int
    outcome: Ok[Out] | Failed | None
    repeated: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    def __str__(self) -> str:
        number = f", pass {self.number}" if self.number > 1 else ""
        return f"{self.when}={self.point!r}{number}"


@dataclass(frozen=True, slots=True)
class CrashReport(Generic[Out]):
    """The result of `crash_matrix`: one run per point, in the order of the points.

    Attributes:
        agent: The agent's name.
        outcome: The outcome without a crash.
        runs: The runs with a crash.
    """

    agent: str
    outcome: Ok[Out] | Failed
    runs: tuple[CrashRun[Out], ...]

    def __str__(self) -> str:
        lines = [f"{self.agent}: {len(self.runs)} crashes"]
        for run in self.runs:
            notes = list(run.problems)
            if run.repeated:
                notes.append(f"ran again: {', '.join(run.repeated)}")
            lines.append(f"  {run}: {'; '.join(notes) or 'same result'}")
        return "\n".join(lines)


async def crash_matrix(
    agent: Addressable[In, Out],
    request: In,
    /,
    *,
    setup: Callable[[TestMesh], object] | None = None,
    check: Callable[[TestMesh, Ok[Out] | Failed], object] | None = None,
) -> CrashReport[Out]:
    """Run a task once, and again for each point at which its replica can die.

        await crash_matrix(shop, Order(id="17"), setup=stubs)

    Each run has a `TestMesh` of its own. A run fails if the outcome differs from the run without a
    crash, if a peer got further requests, or if a recorded step or subtask ran again. Steps may
    run again only if the replica died between their end and their record; the report lists those.

    Args:
        agent: The agent.
        request: The input of its task.
        setup: Called with each mesh, to prepare stubs. May be async.
        check: Called with each mesh and its outcome, instead of the comparison of outcomes. May be
            async. Needed if the outcome contains clocks or random numbers of its own.

    Returns:
        All runs. `print(report)` lists them.

    Raises:
        CrashChanges: A run differs. Or the task fails without a crash, and there is no `check`.
        AssertionError: `check` fails without a crash.
    """
    reference = await _run(agent, request, None, setup, check)
    if reference.outcome is None:
        raise CrashChanges(f"without a crash, {reference.problem}")
    if check is None and isinstance(reference.outcome, Failed):
        failure = reference.outcome.message
        raise CrashChanges(f"without a crash, {reference.agent!r} fails: {failure}")
    runs = []
    for (when, point), count in Counter(reference.passes).items():
        for skip in range(count):
            crash = PlannedCrash(when, point, skip=skip)
            observed = await _run(agent, request, crash, setup, check)
            if crash.times == 0:  # otherwise messages arrived in fewer batches
                runs.append(_compare(reference, observed, crash, skip + 1, check))
    report = CrashReport(reference.agent, reference.outcome, tuple(runs))
    if failed := [f"{run}: {'; '.join(run.problems)}" for run in runs if run.problems]:
        head = f"{len(failed)} of {len(runs)} crashes change what {report.agent!r} does:"
        raise CrashChanges("\n  ".join([head, *failed]))
    return report


@dataclass
class _Observed(Generic[Out]):
    """What one run did. `problem` is what `check` or the wait for the outcome raised."""

    agent: str
    outcome: Ok[Out] | Failed | None = None
    problem: str | None = None
    requests: dict[str, Counter[str]] = field(default_factory=dict)
    passes: list[tuple[When, CrashPoint]] = field(default_factory=list)
    work: Counter[str] = field(default_factory=Counter)


class _ObservedMesh(TestMesh):
    """A mesh that records the points that its replicas pass, and the steps that they run."""

    def __init__(self, agent: Addressable[Any, Any], observed: _Observed[Any]) -> None:
        super().__init__(agent)
        self._observed = observed

    def plan(self, crash: PlannedCrash) -> None:
        """Let a replica die."""
        self._crashes.append(crash)

    def forget_crash(self) -> None:
        """Do not fail at the end if the crash did not happen."""
        self._crashes.clear()

    def _handle_event(self, replica: Replica, event: Event) -> None:
        if (point := find_point(event)) is not None:
            self._observed.passes.append(point)
        if event.phase is Phase.AFTER and event.step in {Step.STEP, Step.SUBTASK}:
            name = event.detail.get("name", event.detail.get("subtask"))
            self._observed.work[f"{event.step.value} {name!r}"] += 1
        super()._handle_event(replica, event)

    def count_requests(self) -> dict[str, Counter[str]]:
        """The requests to each stub, as JSON."""
        return {
            name: Counter(
                json.dumps(stub._peer.write(request), sort_keys=True) for request in stub.requests
            )
            for name, stub in self._stubs.items()
        }


async def _run(
    agent: Addressable[In, Out],
    request: In,
    crash: PlannedCrash | None,
    setup: _Setup,
    check: _Check[Out],
) -> _Observed[Out]:
    observed: _Observed[Out] = _Observed(agent.peer.name)
    async with _ObservedMesh(agent, observed) as mesh:
        await _await_if_needed(setup(mesh) if setup is not None else None)
        if crash is not None:
            mesh.plan(crash)
        task = await mesh.send(agent, request, task_id=_TASK_ID)
        try:
            observed.outcome = await task.outcome()
            await mesh.advance(0)
            if check is not None:
                await _await_if_needed(check(mesh, observed.outcome))
        except AssertionError as error:
            if crash is None and not isinstance(error, MeshIdle):
                raise
            observed.problem = str(error) or "check failed"
        observed.requests = mesh.count_requests()
        mesh.forget_crash()
    return observed


async def _await_if_needed(result: object) -> None:
    if isawaitable(result):
        await result


def _compare(
    reference: _Observed[Out],
    observed: _Observed[Out],
    crash: PlannedCrash,
    number: int,
    check: _Check[Out],
) -> CrashRun[Out]:
    repeated = tuple(sorted((observed.work - reference.work).keys()))
    problems = [] if observed.problem is None else [observed.problem]
    if check is None and observed.outcome is not None and observed.outcome != reference.outcome:
        problems.append(f"{observed.outcome} instead of {reference.outcome}")
    problems += _compare_requests(reference.requests, observed.requests)
    if (crash.when, crash.point) not in _MAY_REPEAT:
        problems += [f"{name} ran again" for name in repeated]
    return CrashRun(crash.when, crash.point, number, observed.outcome, repeated, tuple(problems))


def _compare_requests(
    reference: Mapping[str, Counter[str]], observed: Mapping[str, Counter[str]]
) -> list[str]:
    return [
        f"{name!r} was also asked {', '.join(more)}"
        for name, counts in observed.items()
        if (more := sorted((counts - reference.get(name, Counter())).elements()))
    ]
