"""Run the live segments of one replica, each from its trigger to its checkpoint or its end.

`start` and `resume` begin a segment, `_live` drives it, `_settle` commits the result of its code,
and the `_after_…` steps publish and ack. The order is always commit, publish, ack: nothing is
published before it is committed, and nothing is acked before it is published.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeAlias, assert_never

from pydantic import JsonValue

from meshpoint.engine import checkpoint, claim, finish, receive, running
from meshpoint.engine.begin import begin
from meshpoint.engine.cancels import cancelled
from meshpoint.engine.containment import from_outside
from meshpoint.engine.dispatch import Outgoing
from meshpoint.engine.isolated import Impossible, run_apart
from meshpoint.engine.leases import LeaseKeeper
from meshpoint.engine.refusals import ID_IN_USE, internal_error, refusal
from meshpoint.engine.restore import last_checkpoint, restore, restored_memory, restored_subtasks
from meshpoint.engine.runtime import Site, Spawn
from meshpoint.engine.segment import Last, Segment, Stop
from meshpoint.engine.senders import Relation, Sender, relation
from meshpoint.engine.subtask_log import SegmentLedger
from meshpoint.errors import AgentMisbehaved, IncompatibleState, MemoryLost, MemoryRefused, Unavailable
from meshpoint.model.calls import Paused
from meshpoint.model.checkpoint import (
    AllArrived,
    Arrival,
    BeginResult,
    Begun,
    CancelFound,
    CancelNotice,
    Claim,
    Committed,
    Duplicate,
    Ended,
    Fenced,
    Locked,
    MadeReady,
    PastDeadline,
    Release,
    Reply,
    Resumable,
    Run,
    Send,
    StillWaiting,
    TaskState,
    Unknown,
    WrongSender,
)
from meshpoint.model.envelopes import unpack
from meshpoint.model.events import Step
from meshpoint.model.ids import TaskId
from meshpoint.model.options import OnLostOwner
from meshpoint.model.outcomes import Failed, FailureKind, Ok
from meshpoint.model.requesters import same_requester
from meshpoint.model.subtasks import Child, Operation
from meshpoint.ports.agent import DurableAgent
from meshpoint.ports.backend import Home
from meshpoint.ports.broker import Delivery
from meshpoint.ports.isolation import Isolation

log = logging.getLogger("meshpoint.segments")

_RESCUES_PER_ATTEMPT = 10
"""Maximum rescues of a task that ends more than its own process."""
_LONGEST_PAUSE = timedelta(seconds=30)
"""Delay before a task runs again after its own process died."""
_BEHIND = timedelta(seconds=1)
"""Delay before a second run continues, after a database outage left the task in two homes."""
_LONGEST_UNACKED = timedelta(minutes=15)
"""Maximum time a request stays unacked while its reply is undelivered.

RabbitMQ closes the channel after 30 minutes by default.
"""
Agent: TypeAlias = DurableAgent[Any, Any]
Code: TypeAlias = Callable[[], Awaitable[running.SegmentResult]]
"""The work to run in a slot.

A callable, not a coroutine: if the replica ends before it starts, there is nothing to close.
"""
Afterwards: TypeAlias = Callable[[], Awaitable[None]]
"""The steps left after a segment has committed: publish, then ack."""


class Segments:
    """Runs agent code in slots and settles the results.

    `make_room` adapts the prefetch to the number of held tasks.
    """

    def __init__(
        self,
        site: Site,
        agent: Agent,
        outgoing: Outgoing,
        leases: LeaseKeeper | None,
        spawn: Spawn,
        make_room: Callable[[], None],
        isolation: Isolation | None = None,
    ) -> None:
        self._site = site
        self._isolation = isolation
        self._agent = agent
        self._outgoing = outgoing
        self._leases = leases
        self._spawn = spawn
        self._make_room = make_room
        self.live: dict[TaskId, Segment] = {}
        self.held = outgoing.held
        self.unfinished: dict[asyncio.Task[object], Run] = {}  # code that did not stop in a drain
        self._none_left = asyncio.Event()
        self.draining = self._gave_back = False
        self._claiming = 0  # claims in progress
        self._replying: Counter[TaskId] = Counter()  # tasks in memory whose reply is being sent
        self.ready_somewhere = asyncio.Event()

    def arrive(self, segment: Segment) -> None:
        """Register a task as soon as its request is looked up, so that a cancel finds it."""
        self.live[segment.run.task_id] = segment

    def asked_for(self, task_id: TaskId) -> tuple[str | None, str | None] | None:
        """The requester and input digest of a task in this process's memory, or `None`."""
        if (live := self.live.get(task_id)) is not None:
            return live.requester.app_id, live.digest
        if (request := self.held.request(task_id)) is not None:
            asked = receive.request(request, self._site.options)
            return asked.requester.app_id, asked.digest
        return None

    async def id_is_taken(self, segment: Segment) -> bool:
        """Whether the existing row for a new request's id belongs to another request."""
        task_id, asked_by = segment.run.task_id, Sender(segment.requester.app_id)
        for home in self._site.homes:
            rows = await self._site.patience.until_answered(partial(home.store.lookup, [task_id]))
            if (known := rows.get(task_id)) is not None:
                found = relation(asked_by, segment.digest, known.requester, known.digest)
                return known.agent != self._site.agent or found is not Relation.SAME
        return False

    async def adopt(self, task_id: TaskId, delivery: Delivery) -> None:
        """Keep a request that arrived again for a task this process has in memory.

        If a running task already keeps a copy unacked, a new copy is acked: it would only use up
        prefetch that other requests need.
        """
        if (live := self.live.get(task_id)) is not None:
            if live.deliveries and delivery.count == 1:
                await self._settle_requests(task_id, [delivery])
            else:
                live.deliveries.append(delivery)
        else:
            await self.hold(task_id, [delivery])

    async def hold(self, task_id: TaskId, deliveries: Sequence[Delivery]) -> None:
        """Keep the requests of a task in memory unacked until it ends, and make room for others.

        Once the replica has released all its tasks, the requests are requeued instead, but only
        after the task's code has ended.
        """
        surplus = self.held.hold(task_id, deliveries)
        if self._gave_back and not self._is_at_work(task_id):
            for delivery in surplus:
                await delivery.requeue()
            await self._requeue_held()
            return
        self._make_room()
        if surplus:
            await self._settle_requests(task_id, surplus)

    async def unless_draining(self, *deliveries: Delivery) -> Sequence[Delivery]:
        """Return `deliveries`, or requeue them and return none while the replica drains.

        Nothing new may begin here during a drain.
        """
        if not self.draining:
            return deliveries
        for delivery in deliveries:
            await delivery.requeue()
        return ()

    def leave(self, segment: Segment) -> None:
        """Forget a task: it ended, was released, or never started here."""
        if self._leases is not None:
            self._leases.let_go(segment.run)
        if self.live.get(segment.run.task_id) is segment:
            del self.live[segment.run.task_id]
        segment.decided.set()
        segment.left.set()
        self._tell_if_none_left()

    def give_up(self, segment: Segment) -> None:
        """Forget a task that has not started.

        If its row says that it runs here, a drain releases it first.
        """
        if not self.draining or segment.home is None or not segment.home.durable:
            self.leave(segment)
            return
        self._site.slots.give_back(-1)  # it holds no slot
        self._begin(segment, partial(_already, running.Stopped(Stop.DRAINING)))

    def _tell_if_none_left(self) -> None:
        if not self.live and not self.held and not self._claiming:
            self._none_left.set()

    def start(self, segment: Segment, request: receive.Request) -> None:
        """Run the first segment of an arrived task. The caller's slot passes to it."""
        segment.decided.set()
        self._begin(segment, partial(self._first, segment, request))

    def resume(self, home: Home, task: Resumable, *, taken_over: bool = False, apart: bool = False) -> None:
        """Run the next segment of a task that this replica has acquired.

        The segment inherits the caller's slot and, with `apart`, its place for suspects. A task in
        memory does not continue once its request was requeued.
        """
        if self._gave_back and not home.durable:
            self._site.slots.give_back()
            self._site.apart.give_back(apart)
            return
        segment = Segment(run=task.run, requester=task.requester, home=home, known_digest=task.digest)
        segment.decided.set()
        if earlier := self.live.get(task.run.task_id):
            if earlier.home is not None and earlier.home.durable is not home.durable:
                self._site.slots.give_back()
                self._site.apart.give_back(apart)
                self._spawn(self._put_behind(home, task.run))
                return
            self.lose(earlier.run)  # this replica stalled, then rescued its own task
        self.arrive(segment)
        code = self._next(segment, task, taken_over=taken_over, apart=apart)
        self._begin(segment, partial(self._apart, code) if apart else code)

    async def _put_behind(self, home: Home, run: Run) -> None:
        """Release a task that also has an active run here in the other home.

        Its request was redelivered.
        """
        await self._release(home, Release(run, _BEHIND), "its other run is at work here")

    def _next(self, segment: Segment, task: Resumable, *, taken_over: bool, apart: bool) -> Code:
        if task.cancel_requested:
            return partial(_already, running.Stopped(Stop.CANCELLED))
        if task.refused is not None:
            return partial(_already, Failed(FailureKind.ERROR, task.refused))
        if exhausted := self._exhausted(task):
            segment.dead_reason = exhausted + _advice(task)
            return partial(_already, Failed(FailureKind.ERROR, segment.dead_reason))
        if taken_over and task.checkpoint is not None and self._fails_lost_operations:
            reason = f"the replica that ran it is gone{_advice(task)}"
            self._site.steps.note(Step.OWNER_LOST, task.run.task_id, reason=reason)
            return partial(_already, Failed(FailureKind.ERROR, reason))
        again = self._started_again if task.run.generation == 0 else self._restored
        code = partial(again, segment, task)
        if not apart:
            return code
        alone = partial(self._alone, code)
        return alone if self._isolation is None else partial(self._isolated, self._isolation, segment, task, alone)

    def _exhausted(self, task: Resumable) -> str | None:
        """Why a task that lost too many owners is not run again, or `None` if it may run."""
        if task.attempt > self._site.options.max_attempts:
            reason = f"its segment was run {task.attempt - 1} times and no run came to its end"
            return f"{reason}; its last process {task.death}" if task.death else reason
        if task.rescues > _RESCUES_PER_ATTEMPT * self._site.options.max_attempts:
            return f"its replica was lost {task.rescues} times and no run came to its end"
        return None

    async def _apart(self, code: Code) -> running.SegmentResult:
        try:
            return await code()
        finally:
            self._site.apart.give_back()
            self.ready_somewhere.set()  # a suspect may be waiting

    async def _isolated(
        self, isolation: Isolation, segment: Segment, task: Resumable, alone: Code
    ) -> running.SegmentResult:
        """Run a suspect in its own process.

        If the agent cannot be imported there, the suspect runs alone in this process.
        """
        options = self._site.options
        segment.attempt = task.attempt
        self._site.steps.note(Step.ISOLATED, task.run.task_id, attempt=task.attempt, rescues=task.rescues)
        renewed_there = partial(self._leases.let_go, segment.run) if self._leases is not None else _nothing
        try:
            return await run_apart(segment, isolation, options.release_timeout.total_seconds() / 2, renewed_there)
        except Impossible as error:
            log.warning("task %s: runs alone in its replica, its own process %s", task.run.task_id, error)
            return await alone()

    async def _alone(self, code: Code) -> running.SegmentResult:
        """Run a suspect while nothing else runs here.

        If it kills this process, no other task is lost.
        """
        async with self._site.slots.alone():
            return await code()

    @property
    def _fails_lost_operations(self) -> bool:
        return self._site.options.on_lost_owner is OnLostOwner.FAIL

    async def _started_again(self, segment: Segment, task: Resumable) -> running.SegmentResult:
        assert task.request is not None
        request = receive.request(unpack(task.request), self._site.options).asked_by(task.requester)
        if refused := refusal(request, self._site.options, self._site.clock.now()):
            return refused
        return await self._first(segment, request, task)

    async def _first(
        self, segment: Segment, request: receive.Request, task: Resumable | None = None
    ) -> running.SegmentResult:
        segment.context = request.context(self._outgoing.report_to(request.task_id, request.requester))
        try:
            await self._with_subtasks(segment, task, request.input)
        except IncompatibleState as error:
            return running.Unreadable(str(error), of_checkpoint=True)
        options = self._site.options
        return await running.first_segment(self._agent, segment, request.input, self._site.steps, options.secret_keys)

    async def _restored(self, segment: Segment, task: Resumable) -> running.SegmentResult:
        try:
            with self._site.steps.step(Step.RESTORE, [task.run.task_id], generation=task.run.generation):
                segment.context, outcomes = restore(task, self._outgoing.report_to(task.run.task_id, task.requester))
                await self._with_subtasks(segment, task)
        except IncompatibleState as error:
            return running.Unreadable(str(error))
        options = self._site.options
        return await running.next_segment(self._agent, segment, task, outcomes, self._site.steps, options.secret_keys)

    async def _with_subtasks(self, segment: Segment, task: Resumable | None, parameters: JsonValue = None) -> None:
        """Attach the subtask runner, with the recorded subtasks, and the working memory."""
        assert segment.context is not None
        last = await last_checkpoint(segment, task, self._site)
        ledger = SegmentLedger(segment, self._site, self.begin_within)
        segment.subtasks = restored_subtasks(segment, task, last, ledger, self._site, parameters)
        segment.memory = restored_memory(segment, last, segment.subtasks, self._site)
        segment.context.run_subtasks_with(segment.subtasks)
        segment.context.remember_with(segment.memory)

    async def begin_within(self, segment: Segment, operation: Operation) -> BeginResult:
        """Write a running task whose first subtask is about to run, and ack its request.

        The write continues even if the waiting code is stopped, because whether a row exists
        decides how the task can end.
        """
        if segment.beginning is None:
            segment.beginning = asyncio.create_task(self._begun(segment, operation))
        return await asyncio.shield(segment.beginning)

    async def _begun(self, segment: Segment, operation: Operation) -> BeginResult:
        home, result = await begin(segment, self._site, operation)
        if isinstance(result, Begun):
            segment.run, segment.home = result.run, home
            if home.durable:
                self.own(segment)
                await self.ack(segment)
        return result

    def own(self, segment: Segment) -> None:
        """Renew the lease of a task's run from now on."""
        if self._leases is not None and segment.home is not None and segment.home.durable:
            self._leases.keep(segment.run)

    def _begin(self, segment: Segment, code: Code) -> None:
        if self._gave_back:
            segment.stop(Stop.DRAINING)
        self.own(segment)
        self._spawn(self._live(segment, code))

    async def _live(self, segment: Segment, code: Code) -> None:
        task_id = segment.run.task_id
        try:
            afterwards = await self._settled(segment, code)
            self._let_go(segment)
            await afterwards()
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            # The consumer edge: a defect here must not affect other tasks.
            if from_outside(error):
                raise
            log.exception("task %s: left to its lease, or to its request coming again", task_id)
            await self._put_off(segment)
        finally:
            self._let_go(segment)
            await self._close(segment)
        self.leave(segment)
        await self._requeue(segment)  # requests not acked yet
        if self._gave_back:
            await self._requeue_held()

    async def _put_off(self, segment: Segment) -> None:
        """Retry an in-memory task later.

        It has no lease that could expire, and its request stays unacked.
        """
        if segment.home is not None and not segment.home.durable:
            try:
                release = Release(segment.run, self._site.options.incompatible_pause, counted=True)
                await self._release(segment.home, release, "a defect")
            except Exception:
                log.exception("task %s: it cannot be rescheduled", segment.run.task_id)

    async def _close(self, segment: Segment) -> None:
        try:
            if segment.memory is not None:
                await segment.memory.close()
        except Exception:
            log.exception("task %s: its working memory could not be left", segment.run.task_id)
        finally:
            segment.close()

    def _let_go(self, segment: Segment) -> None:
        """Stop renewing the lease, unless the code is still running.

        As long as it runs, no other replica may run the task.
        """
        code = segment.code
        if code is not None and not code.done():
            if code not in self.unfinished:
                self.unfinished[code] = segment.run
                code.add_done_callback(partial(self._ended_late, segment.run))
        elif self._leases is not None:
            self._leases.let_go(segment.run)

    def _ended_late(self, run: Run, code: asyncio.Task[object]) -> None:
        self.unfinished.pop(code, None)
        if self._leases is not None:
            self._leases.let_go(run)

    async def _settled(self, segment: Segment, code: Code) -> Afterwards:
        try:
            result = await self._in_slot(code)
            if segment.subtasks is not None:
                await segment.subtasks.cancel_running()
            segment.settling = True
            return await self._settle(segment, await self._unless_begun_elsewhere(segment, result))
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            # A result that cannot be committed becomes a failure.
            if from_outside(error):
                raise
            log.exception("task %s: its segment could not be settled", segment.run.task_id)
            return await self._settle(segment, Failed(FailureKind.ERROR, internal_error(error)))

    async def _in_slot(self, code: Code) -> running.SegmentResult:
        # A slot limits running code, not waiting for the database: in an outage, in-memory tasks
        # need it.
        try:
            return await code()
        finally:
            self._site.slots.give_back()

    async def _unless_begun_elsewhere(self, segment: Segment, result: running.SegmentResult) -> running.SegmentResult:
        """Return `result`, unless writing the row found another owner or a cancel.

        The code may have ended without waiting for that write.
        """
        match await segment.beginning if segment.beginning is not None else None:
            case Fenced():
                return running.Stopped(Stop.LOST)
            case CancelFound():
                return running.Stopped(Stop.CANCELLED)
            case _:
                return result

    async def _settle(self, segment: Segment, result: running.SegmentResult) -> Afterwards:
        """Commit the result of the code. Returns the steps that publish and ack."""
        match result:
            case Paused() if segment.stopped is Stop.CANCELLED:  # too late to stop the code
                return await self._stopped(segment, Stop.CANCELLED)
            case Paused():
                return await self._pause(segment, result)
            case Ok() | Failed() if segment.stopped is Stop.LOST:
                # The code ignored its cancellation. A zombie must not answer.
                return partial(self._lost, segment)
            case Ok() | Failed():
                return await self._end(segment, result)
            case running.Stopped(why=why):
                return await self._stopped(segment, why)
            case running.Unreadable(reason=reason, of_checkpoint=False) if segment.run.generation == 0:
                return await self._end(segment, Failed(FailureKind.ERROR, f"a new task has no state: {reason}"))
            case running.Unreadable(reason=reason) if segment.home is None or not segment.home.durable:
                # No other replica has the task.
                return await self._end(segment, Failed(FailureKind.ERROR, reason))
            case running.Unreadable(reason=reason):
                return await self._give_back(segment, reason)
            case running.Forgotten(reason=reason) if segment.home is None or not segment.home.durable:
                return await self._end(segment, Failed(FailureKind.ERROR, reason))
            case running.Forgotten():
                return await self._give_back_forgotten(segment, result)
            case running.Settled() | running.Died():
                return await self._left_its_process(segment, result)
            case _:
                assert_never(result)

    async def _stopped(self, segment: Segment, why: Stop) -> Afterwards:
        match why:
            case Stop.CANCELLED:
                self._site.steps.note(Step.CODE_CANCELLED, segment.run.task_id)
                return await self._end(segment, cancelled(segment))
            case Stop.DRAINING:
                return await self._give_back(segment, None)
            case Stop.LOST:
                return partial(self._lost, segment)
            case _:
                assert_never(why)

    async def _pause(self, segment: Segment, paused: Paused) -> Afterwards:
        if len(paused.calls) > self._site.options.max_fan_out:
            too_many = f"it makes {len(paused.calls)} calls at once; max_fan_out is {self._site.options.max_fan_out}"
            return await self._end(segment, Failed(FailureKind.ERROR, too_many))
        try:
            last = await checkpoint.last(segment)
        except MemoryLost as error:
            return await self._settle(segment, running.Forgotten(str(error), lost=True))
        except MemoryRefused as error:
            return await self._end(segment, Failed(FailureKind.ERROR, str(error)))
        earlier = await self._earlier_children(segment)
        pause = checkpoint.plan(segment, paused, self._agent.state_format, self._site.options, earlier, last)
        try:
            home, saved = await checkpoint.save(pause, segment.home, self._site)
        except AgentMisbehaved as error:
            return await self._end(segment, Failed(FailureKind.ERROR, str(error)))
        match saved:
            case Committed():
                return partial(self._after_pause, segment, home, saved, last)
            case Fenced():
                self._site.steps.note(Step.FENCED, segment.run.task_id, what="pause", fence=segment.run.fence)
                return partial(self._lost, segment)
            case CancelFound(run=still_ours):
                # Without a row of this run there is a tombstone, and only the answer is left to
                # send.
                segment.run, segment.home = still_ours or segment.run, home if still_ours else None
                return await self._end(segment, cancelled(segment))
            case PastDeadline():
                return await self._end(segment, Failed(FailureKind.TIMEOUT, "the task's deadline has passed"))
            case _:
                assert_never(saved)

    async def _earlier_children(self, segment: Segment) -> Sequence[Child]:
        """The peer tasks that an operation had before it was resumed."""
        home, subtasks = segment.home, segment.subtasks
        if home is None or subtasks is None or not subtasks.retry_count:
            return ()
        found = await self._site.patience.until_answered(lambda: home.store.operation(segment.run.task_id))
        return found.children if found is not None else ()

    async def _end(self, segment: Segment, outcome: Ok[JsonValue] | Failed) -> Afterwards:
        reply = finish.reply_for(segment, outcome, self._site.options)
        if segment.home is None:
            return partial(self._answer, segment, reply)
        failed = outcome if isinstance(outcome, Failed) else None
        ended = await finish.end(segment, segment.home, reply, self._site, failed)
        match ended:
            case Ended(reply=committed):
                return partial(self._after_end, segment, segment.home, committed)
            case Fenced():
                return partial(self._lost, segment)
            case _:
                assert_never(ended)

    async def _give_back(self, segment: Segment, unreadable: str | None) -> Afterwards:
        """Hand the task to another replica.

        A task with a durable row becomes `ready`. Any other task's request is requeued.
        """
        home = segment.home
        if home is None or not home.durable:
            return partial(self._requeue, segment)
        not_before = self._site.options.incompatible_pause if unreadable else timedelta()
        await self._release(home, Release(segment.run, not_before, unreadable), unreadable or "drain")
        return partial(self._after_release, segment, home, unreadable)

    async def _give_back_forgotten(self, segment: Segment, forgotten: running.Forgotten) -> Afterwards:
        """Release a task whose working memory could not be loaded.

        It resumes later from its last checkpoint, here or on another replica.
        """
        assert segment.home is not None
        deadline = segment.requester.deadline
        if deadline is not None and deadline <= self._site.clock.now():
            return await self._end(segment, Failed(FailureKind.TIMEOUT, "the task's deadline has passed"))
        self._site.steps.note(Step.MEMORY_TROUBLE, segment.run.task_id, what="away", why=forgotten.reason)
        release = Release(segment.run, self._site.options.incompatible_pause, counted=forgotten.lost)
        await self._release(segment.home, release, forgotten.reason)
        return partial(self._lost, segment)

    async def _left_its_process(self, segment: Segment, died: running.Settled | running.Died) -> Afterwards:
        """Record the death of a task's own process. The task runs again after a delay, or ends."""
        if isinstance(died, running.Settled):
            return partial(self.ack, segment)
        assert segment.home is not None
        options, attempt = self._site.options, segment.attempt
        pause = min(options.sweep_interval * 2 ** min(attempt - 1, 10), _LONGEST_PAUSE)
        if not died.counted:
            pause = options.incompatible_pause
        elif attempt >= options.max_attempts:
            pause = timedelta()  # its next owner ends it
        reason = died.reason if died.counted else None
        release = Release(segment.run, pause, counted=died.counted, death=reason)
        if await self._release(segment.home, release, f"its process {died.reason}"):
            self._site.steps.note(
                Step.ISOLATED_DIED, segment.run.task_id, reason=died.reason, attempt=attempt, counted=died.counted
            )
        self.ready_somewhere.set()
        return partial(self.ack, segment)

    async def _release(self, home: Home, release: Release, reason: str) -> bool:
        with self._site.steps.step(Step.RELEASE, [release.run.task_id], reason=reason):
            released = await self._site.patience.until_answered(lambda: home.store.release([release]))
        return released[0]

    async def _after_pause(self, segment: Segment, home: Home, saved: Committed, last: Last | None) -> None:
        if not home.durable:
            await self._hold_requests(segment)
            self.leave(segment)
        await self._copy(segment, home, last)  # before a peer's answer lets another replica resume
        await self.send(home, saved.dispatches)
        if saved.state is TaskState.READY:
            self.ready_somewhere.set()
        await self.ack(segment)

    async def _after_release(self, segment: Segment, home: Home, unreadable: str | None) -> None:
        if unreadable is not None:
            found = await self._site.patience.until_answered(lambda: home.store.task(segment.run.task_id))
            if found is not None and found[0].state is TaskState.PARKED:
                self._site.steps.note(Step.PARKED, segment.run.task_id, reason=unreadable)
        else:
            await self._outgoing.wake_others()
        await self.ack(segment)

    async def _after_end(self, segment: Segment, home: Home, reply: Reply) -> None:
        if not home.durable:
            await self._hold_requests(segment)
        await self.send(home, [reply])
        if not home.durable and reply.task_id in self.held:
            await self._hold_requests(segment)  # redelivered meanwhile
        await self.ack(segment)
        if reply.state is TaskState.COMPLETED:
            if segment.subtasks is not None and segment.subtasks.is_operation:
                await self._site.checkpointer(home).forget(reply.task_id, reply.agent)
            if segment.memory is not None:
                await segment.memory.on_completed()
        elif segment.last is not None:
            await self._copy(segment, home, segment.last)

    async def _copy(self, segment: Segment, home: Home, last: Last | None) -> None:
        """Cache the checkpoint and the working memory of a task that may resume."""
        if segment.memory is None:
            return
        if last is not None:
            await self._site.checkpointer(home).write_to_cache(last.checkpoint)
            await segment.memory.on_stored(last.mark)
        await segment.memory.on_paused()

    async def _lost(self, segment: Segment) -> None:
        """Settle a request whose run owns no row.

        Another run answers it, unless the row is for another request: then it is refused.
        """
        if segment.run.fence == 0 and segment.request is not None and await self.id_is_taken(segment):
            await self._outgoing.refuse(finish.refusal_for(segment, ID_IN_USE))
        await self.ack(segment)

    async def _answer(self, segment: Segment, reply: Reply) -> None:
        """Answer a task without a row: ack its request once its reply is confirmed or stored.

        If another replica may be running the same request, only the first run to store its reply
        answers.
        """
        durable = self._site.durable
        if durable is not None and segment.may_run_elsewhere:
            if await self._outgoing.store(durable, reply, segment.run.id, segment.digest):
                await self._after_end(segment, durable, reply)
            else:
                await self._lost(segment)
        elif await self._outgoing.answer(
            reply, segment.run.id, digest=segment.digest, may_run_elsewhere=lambda: segment.may_run_elsewhere
        ):
            await self.ack(segment)
        else:
            await self._hold_requests(segment)

    async def _hold_requests(self, segment: Segment) -> None:
        deliveries, segment.deliveries = segment.deliveries, []
        await self.hold(segment.run.task_id, deliveries)

    async def ack(self, segment: Segment) -> None:
        """Settle the task's requests: their consequences are committed and sent."""
        while segment.deliveries:  # a redelivery during the acks must be acked too
            deliveries, segment.deliveries = segment.deliveries, []
            await self._settle_requests(segment.run.task_id, deliveries)

    async def _requeue(self, segment: Segment) -> None:
        while segment.deliveries:
            await segment.deliveries.pop().requeue()

    async def _settle_requests(self, task_id: TaskId, deliveries: Sequence[Delivery]) -> None:
        with self._site.steps.step(Step.ACK, [task_id]):
            for delivery in deliveries:
                try:
                    await delivery.ack()
                except Exception:  # a redelivery is settled by the task's row or its run
                    log.exception("task %s: a request could not be acked", task_id)
                    with suppress(Exception):
                        await delivery.requeue()

    async def send(self, home: Home, sends: Sequence[Send], *, again: bool = False) -> None:
        """Send the messages that a home committed.

        An undeliverable call is claimed as such at once.

        `again`: the messages were overdue, so those for addresses in back-off may wait.
        """
        if home.durable:
            await self._send(home, sends, again=again)
            return
        if self._gave_back:
            sends = list(filter(self._is_still_sent, sends))
        replying = [each.task_id for each in sends if isinstance(each, Reply)]
        self._replying.update(replying)
        try:
            await self._send(home, sends, again=again)
        finally:
            self._replying.subtract(replying)
            for task_id in replying:
                if not self._replying[task_id]:
                    del self._replying[task_id]
        if self._gave_back:
            await self._requeue_held()

    def _is_still_sent(self, send: Send) -> bool:
        """Whether to send a message of a task in memory after its replica has released all tasks.

        Another replica answers requeued requests, and no task here continues with the results of
        its calls.
        """
        return isinstance(send, CancelNotice) or (isinstance(send, Reply) and send.task_id in self.held)

    async def _send(self, home: Home, sends: Sequence[Send], *, again: bool) -> None:
        undeliverable, settled = await self._outgoing.send(home, sends, again=again)
        for task_id in [*settled, *await self._put_away(home, sends, settled)]:
            # A run in the database, begun by another replica, does not own the requests of the
            # in-memory run.
            if not home.durable and (deliveries := self.held.let_go(task_id)):
                await self._settle_requests(task_id, deliveries)
        if not home.durable:
            self._make_room()
        self._tell_if_none_left()
        if undeliverable and not (home.durable and self.draining):  # else another replica claims
            await self.claim(home, undeliverable)

    async def _put_away(self, home: Home, sends: Sequence[Send], settled: Sequence[TaskId]) -> list[TaskId]:
        """Keep the replies of in-memory tasks whose address is in back-off.

        Returns the tasks with requests to ack.
        """
        if home.durable:
            return []
        put_away: list[TaskId] = []
        for send in sends:
            if not isinstance(send, Reply) or send.task_id in settled or send.task_id not in self.held:
                continue
            if self.held.has_ended(send.task_id):
                if send.age >= _LONGEST_UNACKED:
                    await self._settle_requests(send.task_id, self.held.part_from(send.task_id))
            elif self._outgoing.is_refused(send) and await self._outgoing.put_away(home, send):
                put_away.append(send.task_id)
        return put_away

    async def claim(self, home: Home, claims: Sequence[Claim]) -> list[Arrival]:
        """Record outcomes and resume the tasks whose join they complete."""
        self._claiming += 1
        try:
            arrivals = await claim.claim(home, claims, self._site)
            self.all_arrived(home, arrivals)
        finally:
            self._claiming -= 1
            self._tell_if_none_left()
        return arrivals

    def all_arrived(self, home: Home, arrivals: Sequence[Arrival]) -> None:
        """Handle `arrivals`.

        A defect in one arrival frees its slot and is raised after the others have started.
        """
        defects: list[Exception] = []
        for arrival in arrivals:
            try:
                self.arrived(home, arrival)
            except Exception as error:
                if isinstance(arrival, AllArrived):
                    self._site.slots.give_back()
                defects.append(error)
        if defects:
            raise defects[0]

    def arrived(self, home: Home, arrival: Arrival) -> None:
        """Act on one recorded or refused outcome."""
        match arrival:
            case AllArrived(task=task, cancels=cancels):
                if self._runs_already(task.run):
                    # A repeated claim found its own commit after the task had resumed.
                    self._site.slots.give_back()
                else:
                    self.resume(home, task)
                if cancels:
                    self._spawn(self.send(home, cancels))
            case MadeReady(cancels=cancels):
                self.ready_somewhere.set()
                if home.durable:
                    self._spawn(self._outgoing.wake_others())
                if cancels:
                    self._spawn(self.send(home, cancels))
            case StillWaiting() | Locked():
                # The response to a locked task is retried. Unsent messages stay due.
                pass
            case Duplicate():
                self._site.steps.note(Step.DUPLICATE, arrival.task_id, sub_task_id=arrival.sub_task_id)
            case Unknown():
                self._site.steps.note(Step.LATE, arrival.task_id, sub_task_id=arrival.sub_task_id)
            case WrongSender():
                pass  # the delivery is dead-lettered with this as its reason
            case _:
                assert_never(arrival)

    def _runs_already(self, run: Run) -> bool:
        segment = self.live.get(run.task_id)
        return segment is not None and segment.run == run

    def cancel(self, task_id: TaskId, parent: str | None = None, sender: str | None = None) -> bool | None:
        """Stop a live task's code, or keep it from starting.

        A task that runs for another parent task than `parent`, or for another attempt at it, is
        not stopped.

        Returns:
            Whether the sender may cancel the task, or `None` if the task is not live.
        """
        segment = self.live.get(task_id)
        if segment is None:
            return None
        if sender not in {None, self._site.agent} and not same_requester(segment.requester.app_id, sender):
            return False
        if parent is None or segment.requester.parent_task_id in {None, parent}:
            segment.stop(Stop.CANCELLED)
        return True

    def lose(self, run: Run) -> None:
        """Stop the code of a run whose task another replica owns.

        Even if the code ends first, the fence rejects its write.
        """
        segment = self.live.get(run.task_id)
        if segment is not None and segment.run == run and not segment.settling:
            self._site.steps.note(Step.LEASE_LOST, run.task_id, fence=run.fence)
            segment.stop(Stop.LOST)

    async def none_left(self) -> None:
        """Wait until every task has ended or is paused in the database.

        No claim that could start another task is in progress then.
        """
        while self.live or self.held or self._claiming:
            self._none_left.clear()
            await self._none_left.wait()

    async def give_all_back(self) -> None:
        """Stop running code and hand its tasks, and tasks waiting in memory, to other replicas.

        After that, no code starts here, and nothing here answers a requeued request.
        """
        for segment in list(self.live.values()):
            segment.stop(Stop.DRAINING)
        self._gave_back = True
        await self._requeue_held()

    async def _requeue_held(self) -> None:
        """Requeue the requests of tasks in memory, except tasks that may still answer."""
        for delivery in self._outgoing.release_held(self._is_at_work):
            with suppress(Unavailable):  # its connection is lost, which requeues it too
                await delivery.requeue()
        self._tell_if_none_left()

    def _is_at_work(self, task_id: TaskId) -> bool:
        """Whether a task has code that may not have stopped, or its reply is being sent."""
        live = self.live.get(task_id)
        return task_id in self._replying or (live is not None and live.decided.is_set())


def _advice(task: Resumable) -> str:
    if task.checkpoint is None:
        return ""
    if task.checkpoint == 0:
        return "; no checkpoint"
    return f"; checkpoint available: resume with `meshpoint tasks resume {task.run.task_id}`"


def _nothing() -> None:
    pass


async def _already(result: running.SegmentResult) -> running.SegmentResult:
    return result
