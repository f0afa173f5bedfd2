"""The machine: replicas pause, claim, crash, return as zombies and sweep, in any order."""

from __future__ import annotations

import dataclasses

import hypothesis.strategies as st
from hypothesis.stateful import initialize, precondition, rule

from machines import mail_checks, sweeper_checks
from machines.inputs import READS_ALL, REPLICAS, SIGNALS, PauseShape
from machines.machine_base import BATCH_LIMIT, StoreMachineBase, pick
from machines.task_model import CallModel
from meshpoint.model.ids import TaskId
from meshpoint.model.mailbox import RecordAnswer, SendSignal
from meshpoint.model.tasks import Replica, Reply, Run, TaskState
from meshpoint.model.transitions import Append, Begin, Cancel, Claim, End, Pause, Progress, Release
from meshpoint.model.waits import is_question, is_signal
from meshpoint.testing.conformance.build import AGENT, FORMAT, OTHER_FORMAT, SECOND


def item_batches(*kinds: str) -> st.SearchStrategy[list[tuple[str, int]]]:
    """A batch of one to six pairs: a kind, and an index into the candidates of that kind."""
    return st.lists(st.tuples(st.sampled_from(kinds), numbers), min_size=1, max_size=6)


numbers = st.one_of(st.integers(0, 1), st.integers(0, 40))
replicas = st.sampled_from((*REPLICAS[:2], *REPLICAS))
shapes = st.builds(
    PauseShape,
    failed=st.lists(st.sampled_from([False, False, False, True]), min_size=1, max_size=5).map(
        tuple
    ),
    needed=st.sampled_from([None, None, 1, 2]),
    join_seconds=st.sampled_from([None, None, 8, 90]),
    times=st.integers(0, 5),
    state_format=st.sampled_from([FORMAT, FORMAT, OTHER_FORMAT]),
    entries=st.sampled_from([0, 1, 2]),
    replaces=st.booleans(),
    keeps_state=st.booleans(),
    waits=st.lists(
        st.sampled_from(["peer", "peer", "sleep", "question", "signal"]), min_size=0, max_size=5
    ).map(tuple),
)


class StoreMachine(StoreMachineBase):
    """Drives the store from `open_store` and checks every answer against the ledger."""

    @initialize(shape=shapes, number=numbers)
    def start(self, shape: PauseShape, number: int) -> None:
        """One task waits from the start."""
        self.pause([("new", number, shape)])

    @rule(items=item_batches("new", "again", "other"), replica=replicas)
    def begin(self, items: list[tuple[str, int]], replica: Replica) -> None:
        """Write requests before their runs: new, repeated, and for a task that exists."""
        begins: list[Begin] = []
        for kind, number in items:
            requester = self.inputs.make_requester(number, self.clock.now())
            if kind == "new":
                begins.append(self.inputs.make_begin(self.inputs.make_run(), replica, requester))
            for model in pick(self.models, number) if kind == "other" else []:
                begins.append(
                    self.inputs.make_begin(self.inputs.make_run(model.task_id), replica, requester)
                )
            for run in (
                pick([run for run in self.runs(replica) if run.generation == 0], number)
                if kind == "again"
                else []
            ):
                model = self.ledger.models[run.task_id]
                begins.append(self.inputs.make_begin(model.runs[0][0], replica, model.requester))
        results = self.run_step(self.store.begin(begins))
        for command, result in zip(begins, results, strict=True):
            self.check_answer([command.run.task_id], self.ledger.check_begin, command, result)

    @rule(
        items=st.lists(
            st.tuples(
                st.sampled_from(["new", "new", "own", "own", "again", "zombie", "other"]),
                numbers,
                shapes,
            ),
            min_size=1,
            max_size=6,
        ),
        after=st.sampled_from([0, 0, 0, 41]),
    )
    def pause(self, items: list[tuple[str, int, PauseShape]], after: int = 0) -> None:
        """Write checkpoints of new tasks, owners and zombies, also over existing rows."""
        self.wait(after)
        pauses = [
            pause
            for kind, number, shape in items
            for pause in self._make_pauses(kind, number, shape)
        ]
        results = self.run_step(self.store.pause(pauses))
        for pause, result in zip(pauses, results, strict=True):
            self.check_answer([pause.run.task_id], self.ledger.check_pause, pause, result)
            self.sends += getattr(result, "dispatches", ())

    def _make_pauses(self, kind: str, number: int, shape: PauseShape) -> list[Pause]:
        match kind:
            case "new":
                requester = self.inputs.make_requester(number, self.clock.now())
                return [self.inputs.make_pause(self.inputs.make_run(), requester, shape)]
            case "own" | "zombie":
                return [
                    self._pause_of(run, shape) for run in pick(self._writing_runs(kind), number)
                ]
            case "other":
                models = pick(self.models, number)
                return [
                    self.inputs.make_pause(self.inputs.make_run(m.task_id), m.requester, shape)
                    for m in models
                ]
            case _:
                return pick([pause for model in self.models for pause in model.pauses], number)

    def _writing_runs(self, kind: str) -> list[Run]:
        return self.owners() if kind == "own" else self.runs()

    def _pause_of(self, run: Run, shape: PauseShape) -> Pause:
        pause = self.written.get(f"pause {run.id}")
        if not isinstance(pause, Pause):
            model = self.ledger.models[run.task_id]
            pause = self.inputs.make_pause(run, model.requester, shape, model)
            self.written[f"pause {run.id}"] = pause
        return pause

    @precondition(lambda self: self.runs())
    @rule(
        items=st.lists(
            st.tuples(st.sampled_from(["own", "own", "again", "zombie"]), numbers, shapes),
            min_size=1,
            max_size=6,
        )
    )
    def append(self, items: list[tuple[str, int, PauseShape]]) -> None:
        """Append to logs, by owners and zombies, also repeatedly."""
        appends: list[Append] = []
        for kind, number, shape in items:
            for run in pick(self._writing_runs("zombie" if kind == "zombie" else "own"), number):
                model = self.ledger.models[run.task_id]
                again = model.appends[-1:] if kind == "again" else []
                appends += again or [self.inputs.make_append(run, model, shape)]
        results = self.run_step(self.store.append(appends))
        for append, result in zip(appends, results, strict=True):
            self.check_answer([append.run.task_id], self.ledger.check_append, append, result)

    @rule(
        items=item_batches("fresh", "fresh", "fresh", "any", "again", "wrong", "mesh", "nobody"),
        replica=replicas,
        slots=st.sampled_from([0, 1, 2, BATCH_LIMIT]),
    )
    def claim(self, items: list[tuple[str, int]], replica: Replica, slots: int) -> None:
        """Claim a batch of responses: fresh, duplicate, late, repeated, forged or misdirected."""
        claims = {
            claim.id: claim
            for kind, number in items
            for claim in self._make_claims(kind, number, replica)
        }
        self._claim(list(claims.values()), replica, slots)

    @precondition(lambda self: self.ledger.in_state(TaskState.WAITING))
    @rule(
        count=st.integers(1, 4),
        number=numbers,
        replica=replicas,
        slots=st.sampled_from([0, 1, 2, BATCH_LIMIT]),
    )
    def answer_waiting_calls(self, count: int, number: int, replica: Replica, slots: int) -> None:
        """Claim every response that some tasks wait for, in one batch."""
        models = self.ledger.in_state(TaskState.WAITING)[-count:]
        calls = [
            (index, model, call)
            for model in models
            for index, call in enumerate(model.pending_calls)
        ]
        calls.sort(key=lambda each: each[0])
        self._claim(
            [self._response(s.task_id, call, index + number) for index, s, call in calls],
            replica,
            slots,
        )

    @precondition(lambda self: any(call.planned.retry for _, call in self.pending()))
    @rule(
        failures=st.lists(numbers, min_size=1, max_size=4),
        results=st.sampled_from([0, 1, 2]),
        advice=st.sampled_from([3, 3, 3, 11, 15]),
        replica=replicas,
        slots=st.sampled_from([0, 1, BATCH_LIMIT]),
    )
    def fail_attempts(
        self,
        failures: list[int],
        results: int,
        advice: int,
        replica: Replica,
        slots: int,
    ) -> None:
        """Let attempts at calls fail, then let earlier ones have results after all."""
        retried = [(id_, call) for id_, call in self.pending() if call.planned.retry]
        failed = [each for number in failures for each in pick(retried, number)]
        self._claim([self._response(id_, call, advice) for id_, call in failed], replica, slots)
        earlier = [
            (model.task_id, call)
            for model in self.ledger.in_state(TaskState.WAITING)
            for call in model.calls.values()
            if call.superseded and any(call.seq == each.seq for each in model.pending_calls)
        ]
        claims = [self._response(id_, call, 0) for id_, call in earlier[:results]]
        self._claim(claims, replica, slots)

    @precondition(lambda self: self.batches)
    @rule(replica=replicas, number=st.integers(0, 2))
    def repeat_claims(self, replica: Replica, number: int) -> None:
        """Repeat a whole batch of claims, as after a commit whose response was lost."""
        for claims, slots in pick(self.batches.get(replica, []), number):
            self._claim(claims, replica, slots)

    def _make_claims(self, kind: str, number: int, replica: Replica) -> list[Claim]:
        match kind:
            case "again":
                mine = [claim for batch, _ in self.batches.get(replica, []) for claim in batch]
                return pick(
                    sorted(mine, key=lambda claim: claim.task_id in self.ledger.models), number
                )
            case "nobody":
                return [self.inputs.make_claim(TaskId("nobody"), TaskId("nobody"), None, number)]
            case "wrong" | "mesh":
                sender = "mallory" if kind == "wrong" else None
                found = pick(self.all_calls() if kind == "wrong" else self.pending(), number)
                return [
                    self.inputs.make_claim(task_id, call.id, sender, number)
                    for task_id, call in found
                ]
            case _:
                found = pick(self.pending() if kind == "fresh" else self.all_calls(), number)
                return [self._response(task_id, call, number) for task_id, call in found]

    def _response(self, task_id: TaskId, call: CallModel, number: int) -> Claim:
        return self.inputs.make_claim(task_id, call.id, call.planned.peer, number)

    def _claim(self, claims: list[Claim], replica: Replica, slots: int) -> None:
        arrivals = self.run_step(self.store.claim(claims, replica, slots))
        self.batches.setdefault(replica, []).append((claims, slots))
        self.check_answer(
            [claim.task_id for claim in claims],
            self.ledger.check_claims,
            claims,
            replica,
            slots,
            arrivals,
        )
        self.sends += [
            notice for arrival in arrivals for notice in getattr(arrival, "cancels", ())
        ]

    @rule(items=item_batches("fresh", "any", "wrong"))
    def progress(self, items: list[tuple[str, int]]) -> None:
        """Record status updates."""
        updates: list[Progress] = []
        for kind, number in items:
            for task_id, call in pick(
                self.all_calls() if kind == "any" else self.pending(), number
            ):
                updates.append(
                    Progress(task_id, call.id, "mallory" if kind == "wrong" else call.planned.peer)
                )
        results = self.run_step(self.store.record_progress(updates))
        self.check_answer(
            [update.task_id for update in updates],
            sweeper_checks.check_progress,
            self.ledger,
            updates,
            results,
        )

    @precondition(lambda self: self.runs())
    @rule(items=item_batches("own", "own", "zombie"))
    def end(self, items: list[tuple[str, int]]) -> None:
        """End tasks, by owners and zombies; a run that ends again ends in the same way."""
        ends = [
            self._end_of(run, number)
            for kind, number in items
            for run in pick(self._writing_runs(kind), number)
        ]
        results = self.run_step(self.store.end(ends))
        for end, result in zip(ends, results, strict=True):
            self.check_answer([end.run.task_id], self.ledger.check_end, end, result)
            self.sends += [result.reply] if hasattr(result, "reply") else []

    def _end_of(self, run: Run, number: int) -> End:
        end = self.written.get(f"end {run.id}")
        if not isinstance(end, End):
            end = self.written[f"end {run.id}"] = self.inputs.make_end(run, number)
        return end

    @precondition(lambda self: self.runs())
    @rule(
        items=item_batches("own", "own", "zombie"),
        wait=st.sampled_from([0, 0, 30]),
        parked_by=st.sampled_from([None, None, "A", "B", "C"]),
    )
    def release(self, items: list[tuple[str, int]], wait: int, parked_by: str | None) -> None:
        """Release tasks, or park them."""
        runs = [run for kind, number in items for run in pick(self._writing_runs(kind), number)]
        reason = None if parked_by is None else f"{parked_by} cannot read it"
        releases = [Release(run, wait * SECOND, reason, version=parked_by or "") for run in runs]
        results = self.run_step(self.store.release(releases))
        for release, result in zip(releases, results, strict=True):
            self.check_answer([release.run.task_id], self.ledger.check_release, release, result)

    @rule(items=item_batches("any", "running", "running", "again", "unknown"))
    def cancel(self, items: list[tuple[str, int]]) -> None:
        """Cancel tasks in any state, tasks not known yet, and tasks already cancelled."""
        cancels: list[Cancel] = []
        for kind, number in items:
            if kind == "again":
                known = [cancel for cancel in self.cancels if cancel.task_id in self.ledger.models]
                cancels += pick(known, number)
            elif kind == "unknown":
                cancels.append(self.inputs.make_cancel(TaskId(self.inputs.new_id("task"))))
            else:
                models = (
                    self.ledger.in_state(TaskState.RUNNING) if kind == "running" else self.models
                )
                cancels += [
                    self.inputs.make_cancel(model.task_id) for model in pick(models, number)
                ]
        results = self.run_step(self.store.cancel(cancels))
        self.cancels += cancels
        for cancel, result in zip(cancels, results, strict=True):
            self.check_answer([cancel.task_id], self.ledger.check_cancel, cancel, result)
            self.sends += getattr(result, "cancels", ())

    @rule(items=item_batches("open", "open", "any", "suspended", "unknown"))
    def attach(self, items: list[tuple[str, int]]) -> None:
        """Attach to tasks in any state, and to unknown ones."""
        numbered = [
            (id_, number)
            for kind, number in items
            for id_ in self._pick_task_ids([(kind, number)])
        ]
        attaches = [self.inputs.make_attach(task_id, number) for task_id, number in numbered]
        results = self.run_step(self.store.attach(attaches))
        for attach, result in zip(attaches, results, strict=True):
            self.check_answer([attach.task_id], self.ledger.check_attach, attach, result)

    @rule(replica=replicas, chosen=st.lists(numbers, min_size=1, max_size=6))
    def renew(self, replica: Replica, chosen: list[int]) -> None:
        """Extend leases, including lost ones."""
        runs = list(
            dict.fromkeys(run for number in chosen for run in pick(self.runs(replica), number))
        )
        lost = self.run_step(self.store.renew(runs, replica))
        self.check_answer(
            [run.task_id for run in runs],
            sweeper_checks.check_renewed,
            self.ledger,
            runs,
            replica,
            lost,
        )

    @precondition(lambda self: self.ledger.in_state(TaskState.WAITING))
    @rule(
        count=st.integers(1, 4),
        replica=st.sampled_from(REPLICAS[:2]),
        slots=st.sampled_from([1, 2, BATCH_LIMIT]),
    )
    def complete_joins(self, count: int, replica: Replica, slots: int) -> None:
        """Complete joins in a replica that has slots for some of the tasks or for all."""
        self.answer_waiting_calls(count, 0, replica, slots)

    @precondition(lambda self: self.owners())
    @rule(replica=replicas, write=st.sampled_from(["pause", "end", "release", "renew"]))
    def rescue_and_write_as_zombie(self, replica: Replica, write: str) -> None:
        """Let a lease expire, another replica rescue the task, and the old run write late."""
        self.rescue(replica, BATCH_LIMIT, BATCH_LIMIT, 16)
        match write:
            case "pause":
                self.pause([("zombie", 0, PauseShape((False,), None, None, 0, FORMAT))])
            case "end":
                self.end([("zombie", 0)])
            case "release":
                self.release([("zombie", 0)], 0, None)
            case _:
                for each in REPLICAS:
                    self.renew(each, [0])

    @precondition(lambda self: self.owners())
    @rule(replica=replicas, versions=st.lists(st.sampled_from("ABC"), min_size=1, max_size=3))
    def park_repeatedly(self, replica: Replica, versions: list[str]) -> None:
        """Park a task for several versions, and let `replica` try it after each."""
        for version in versions:
            self.release([("own", 0)], 0, version)
            self.acquire_parked(replica, BATCH_LIMIT)

    @precondition(lambda self: self.ledger.in_state(TaskState.PARKED))
    @rule(replica=replicas, suspects=st.sampled_from([0, BATCH_LIMIT]))
    def acquire_parked(self, replica: Replica, suspects: int) -> None:
        """Try the parked tasks that the replica's version has not tried."""
        due = sweeper_checks.untried(self.ledger, replica, suspects)
        tasks = self.run_step(self.store.acquire_parked(replica, BATCH_LIMIT, suspects))
        self.check_answer(
            [model.task_id for model in due],
            sweeper_checks.check_parked_acquired,
            self.ledger,
            replica,
            suspects,
            tasks,
        )

    @precondition(lambda self: self.ledger.in_state(TaskState.PARKED, TaskState.READY))
    @rule(replica=replicas, hours=st.sampled_from([0, 1, 6]))
    def acquire_overdue(self, replica: Replica, hours: int) -> None:
        """Acquire the tasks that only need to be ended."""
        self.wait(hours * 3_600)
        due = [model.task_id for model in self.models if model.is_overdue(self.clock.now())]
        assert self.run_step(self.store.due(replica, BATCH_LIMIT)).overdue == len(due)
        overdue = self.run_step(self.store.acquire_overdue(replica, BATCH_LIMIT))
        self.check_answer(due, sweeper_checks.check_overdue, self.ledger, replica, overdue)

    @precondition(lambda self: self.ledger.in_state(TaskState.PARKED))
    @rule(items=st.lists(numbers, min_size=1, max_size=4))
    def unpark(self, items: list[int]) -> None:
        """Offer tasks again, including some that are not parked."""
        by_state = sorted(self.models, key=lambda model: model.state is TaskState.PARKED)
        picked = [model.task_id for number in items for model in pick(by_state, number)]
        task_ids = list(dict.fromkeys(picked))
        results = self.run_step(self.store.unpark(task_ids))
        self.check_answer(task_ids, self.ledger.check_unparked, task_ids, results)

    @rule(items=item_batches("open", "open", "any", "suspended", "unknown"))
    def suspend(self, items: list[tuple[str, int]]) -> None:
        """Suspend tasks, including some that cannot be suspended or are already."""
        task_ids = self._pick_task_ids(items)
        results = self.run_step(self.store.suspend(task_ids))
        self.check_answer(task_ids, self.ledger.check_suspended, task_ids, results)

    @precondition(lambda self: any(model.suspended_at for model in self.models))
    @rule(items=item_batches("suspended", "suspended", "any", "unknown"))
    def unsuspend(self, items: list[tuple[str, int]]) -> None:
        """Resume suspended tasks, including some that are not suspended."""
        task_ids = self._pick_task_ids(items)
        results = self.run_step(self.store.unsuspend(task_ids))
        self.check_answer(task_ids, self.ledger.check_unsuspended, task_ids, results)

    def _pick_task_ids(self, items: list[tuple[str, int]]) -> list[TaskId]:
        pools = {
            "any": self.models,
            "open": [model for model in self.models if not model.state.is_final],
            "suspended": [model for model in self.models if model.suspended_at],
        }
        return [
            task_id
            for kind, number in items
            for task_id in (
                [model.task_id for model in pick(pools[kind], number)]
                if kind in pools
                else [TaskId("nobody")]
            )
        ]

    @precondition(lambda self: self.ledger.in_state(TaskState.WAITING))
    @rule(count=st.integers(1, 4), replica=st.sampled_from(REPLICAS[:2]))
    def complete_joins_of_suspended(self, count: int, replica: Replica) -> None:
        """Suspend the tasks that get all their responses next."""
        models = self.ledger.in_state(TaskState.WAITING)[-count:]
        task_ids = [model.task_id for model in models]
        results = self.run_step(self.store.suspend(task_ids))
        self.check_answer(task_ids, self.ledger.check_suspended, task_ids, results)
        self.answer_waiting_calls(count, 0, replica, BATCH_LIMIT)

    @precondition(lambda self: self.owners())
    @rule(number=numbers, shape=shapes)
    def pause_suspending(self, number: int, shape: PauseShape) -> None:
        """Suspend a running task, whose owner pauses it next."""
        task_ids = [run.task_id for run in pick(self.owners(), number)]
        results = self.run_step(self.store.suspend(task_ids))
        self.check_answer(task_ids, self.ledger.check_suspended, task_ids, results)
        self.pause([("own", number, shape)])

    @precondition(lambda self: self.owners())
    @rule(number=numbers, shape=shapes)
    def cancel_running(self, number: int, shape: PauseShape) -> None:
        """Cancel a running task whose owner pauses before it has seen the cancel."""
        self.cancel([("running", number)])
        self.pause([("own", 0, shape)])

    @rule(
        items=item_batches("waiting", "waiting", "open", "any", "again", "other", "unknown"),
        name=st.sampled_from(SIGNALS),
    )
    def signal(self, items: list[tuple[str, int]], name: str) -> None:
        """Send signals: new, repeated, under a used id, and to tasks in any state."""
        commands: list[SendSignal] = []
        for kind, number in items:
            if kind in {"again", "other"}:
                chosen = pick(self.signals, number)
                if kind == "other":
                    chosen = [dataclasses.replace(each, value=b'"other"') for each in chosen]
                commands += chosen
                continue
            waiting = [
                model.task_id
                for model in self.ledger.in_state(TaskState.WAITING)
                if any(is_signal(call.planned.peer) for call in model.pending_calls)
            ]
            ids = (
                pick(waiting, number)
                if kind == "waiting"
                else self._pick_task_ids([(kind, number)])
            )
            commands += [self.inputs.make_signal(task_id, name, number) for task_id in ids]
        self._signal(commands)

    def _signal(self, commands: list[SendSignal]) -> None:
        self.signals += [each for each in commands if each not in self.signals]
        results = self.run_step(self.store.signal(commands))
        self.check_answer(
            [each.task_id for each in commands],
            mail_checks.check_signals,
            self.ledger,
            commands,
            results,
        )
        self.sends += [notice for each in results for notice in getattr(each, "cancels", ())]

    @rule(count=st.integers(1, 4), shape=shapes, replica=replicas)
    def receive(self, count: int, shape: PauseShape, replica: Replica) -> None:
        """Send signals to a running task, which then waits for some of them, and more."""
        self.begin([("new", 0)], replica)
        for run in pick(self.owners(), 0):
            names = [SIGNALS[n // 2 % len(SIGNALS)] for n in range(count)]
            self._signal([self.inputs.make_signal(run.task_id, name, 0) for name in names])
        shape = dataclasses.replace(
            shape, waits=("signal", "question", "signal", "peer", "signal")
        )
        self.pause([("own", 0, shape)])
        self.acquire(replica, BATCH_LIMIT, BATCH_LIMIT)

    @rule(shape=shapes, replica=replicas, waits_first=st.booleans())
    def ask_again(self, shape: PauseShape, replica: Replica, waits_first: bool) -> None:
        """Answer a question after its timeout. Then the task asks it again, or another one."""
        self.begin([("new", 0)], replica)
        asking = PauseShape((False,), None, None, 1, FORMAT, waits=("question",))
        self.pause([("own", 0, asking)])
        self.expire(REPLICAS[1], BATCH_LIMIT, 21)
        self.answer([("asked", 0)])
        if waits_first:
            self.pause([("own", 0, dataclasses.replace(shape, waits=()))])
            self.complete_joins(1, REPLICAS[1], BATCH_LIMIT)
        self.pause([("own", 0, dataclasses.replace(shape, waits=("question", "signal")))])

    @rule(items=item_batches("open", "asked", "asked", "again", "other", "unknown"))
    def answer(self, items: list[tuple[str, int]]) -> None:
        """Answer questions: open, asked before, answered, and never asked."""
        commands = [each for kind, number in items for each in self._make_answers(kind, number)]
        self.answers += [each for each in commands if each not in self.answers]
        results = self.run_step(self.store.answer(commands))
        self.check_answer(
            [each.key.task_id for each in commands],
            mail_checks.check_answers,
            self.ledger,
            commands,
            results,
        )
        self.sends += [notice for each in results for notice in getattr(each, "cancels", ())]

    def _make_answers(self, kind: str, number: int) -> list[RecordAnswer]:
        asked = [(model.task_id, id_) for model in self.models for id_ in model.mail.questions]
        waits = [
            (task_id, call.id)
            for task_id, call in self.pending()
            if is_question(call.planned.peer)
        ]
        match kind:
            case "again":
                return pick(self.answers, number)
            case "other":
                asked = [(each.key.task_id, each.key.sub_task_id) for each in self.answers]
            case "unknown":
                asked = [(model.task_id, TaskId("~?approval.9")) for model in self.models]
            case "open":
                asked = waits
        return [self.inputs.make_answer(*each) for each in pick(asked, number)]

    @precondition(lambda self: self.runs())
    @rule(kind=st.sampled_from(["own", "own", "zombie"]), number=numbers)
    def set_value(self, kind: str, number: int) -> None:
        """Set a value, as an owner or a zombie."""
        for run in pick(self._writing_runs(kind), number):
            command = self.inputs.make_value(run, number)
            result = self.run_step(self.store.set_value(command))
            self.check_answer(
                [run.task_id], mail_checks.check_values, self.ledger, command, result
            )

    @rule(replica=replicas)
    def crash(self, replica: Replica) -> None:
        """A replica forgets its runs, which write nothing from now on except as zombies."""
        self.crashed |= {run.id for run in self.runs(replica)}

    @rule(seconds=st.sampled_from([1, 3, 6, 11, 16, 31, 61]))
    def wait(self, seconds: int) -> None:
        """Advance the clock."""
        self.clock.advance(seconds * SECOND)

    @precondition(lambda self: self.ledger.in_state(TaskState.WAITING))
    @rule(
        replica=replicas,
        slots=st.sampled_from([0, 1, BATCH_LIMIT]),
        after=st.sampled_from([0, 6, 13, 21, 61, 91]),
    )
    def expire(self, replica: Replica, slots: int, after: int) -> None:
        """Enforce deadlines."""
        self.wait(after)
        due = [model.task_id for model in self.models if model.overdue_calls(self.clock.now())]
        slots = BATCH_LIMIT if 0 < slots < len(due) else slots
        due_counts = self.run_step(self.store.due(replica, BATCH_LIMIT))
        assert due_counts.expired >= len(due), "too low a count would leave due tasks waiting"
        results = self.run_step(self.store.expire(replica, BATCH_LIMIT, slots))
        self.check_answer(due, sweeper_checks.check_expired, self.ledger, replica, slots, results)
        self.sends += [notice for result in results for notice in result.cancels]
        self.run_step(self._check_nothing_stays_due())

    @rule(replica=replicas, shape=shapes, after=st.sampled_from([6, 41, 61]))
    def expire_waits(self, replica: Replica, shape: PauseShape, after: int) -> None:
        """Let a task wait for longer than it may: its deadline interrupts all waits."""
        waiting = dataclasses.replace(
            shape, waits=("sleep", "question", "signal", "peer", "sleep")
        )
        self.pause([("new", 1, waiting)])
        self.expire(replica, BATCH_LIMIT, after)

    @precondition(lambda self: self.ledger.in_state(TaskState.READY))
    @rule(
        replica=replicas,
        limit=st.sampled_from([1, 2, BATCH_LIMIT]),
        suspects=st.sampled_from([0, BATCH_LIMIT]),
    )
    def acquire(self, replica: Replica, limit: int, suspects: int) -> None:
        """Acquire ready tasks."""
        due = sweeper_checks.acquirable(self.ledger, replica, suspects)
        limit = sweeper_checks.limit_with_ties(due, limit)
        assert self.run_step(self.store.due(replica, BATCH_LIMIT)).ready >= len(due)
        tasks = self.run_step(self.store.acquire(replica, limit, suspects))
        touched_ids = [model.task_id for model in due]
        self.check_answer(
            touched_ids,
            sweeper_checks.check_acquired,
            self.ledger,
            replica,
            limit,
            suspects,
            tasks,
        )

    @precondition(lambda self: self.ledger.in_state(TaskState.RUNNING))
    @rule(
        replica=replicas,
        limit=st.sampled_from([1, 2, BATCH_LIMIT]),
        suspects=st.sampled_from([0, BATCH_LIMIT]),
        after=st.sampled_from([0, 3, 16]),
    )
    def rescue(self, replica: Replica, limit: int, suspects: int, after: int) -> None:
        """Rescue tasks whose lease has expired."""
        self.wait(after)
        due = sweeper_checks.runnable(self.ledger, replica, TaskState.RUNNING)
        limit = sweeper_checks.limit_with_ties(due, limit)
        assert self.run_step(self.store.due(replica, BATCH_LIMIT)).lapsed == len(due)
        tasks = self.run_step(self.store.rescue(replica, limit, suspects))
        touched_ids = [model.task_id for model in due]
        self.check_answer(
            touched_ids, sweeper_checks.check_rescued, self.ledger, replica, limit, suspects, tasks
        )

    @precondition(lambda self: self.ledger.in_state(TaskState.RUNNING))
    @rule(replica=replicas, after=st.sampled_from([0, 16, 31]))
    def release_unread(self, replica: Replica, after: int) -> None:
        """Release tasks with a lost owner that the replica does not read."""
        self.wait(after)
        due = sweeper_checks.lost_unread(self.ledger, replica)
        assert self.run_step(self.store.due(replica, BATCH_LIMIT)).lost_unread == len(due)
        released = self.run_step(self.store.release_unread(replica, BATCH_LIMIT))
        self.check_answer(
            [model.task_id for model in due],
            sweeper_checks.check_unread_released,
            self.ledger,
            replica,
            released,
        )

    @rule(after=st.sampled_from([0, 11]))
    def keep_alives(self, after: int) -> None:
        """Send keep-alives to the requesters."""
        self.wait(after)
        self.check_answer(
            [],
            sweeper_checks.check_keep_alives,
            self.ledger,
            self.run_step(self.store.keep_alives(READS_ALL, BATCH_LIMIT)),
        )

    @precondition(lambda self: any(model.state.is_final for model in self.models))
    @rule(hours=st.sampled_from([0, 2, 4]))
    def purge(self, hours: int) -> None:
        """Purge tombstones."""
        self.wait(hours * 3_600 + 1)
        count = self.run_step(self.store.purge(AGENT, BATCH_LIMIT))
        self.check_answer([], sweeper_checks.check_purged, self.ledger, count)

    @rule(after=st.sampled_from([0, 11, 21]))
    def unsent(self, after: int) -> None:
        """Lease everything due for sending."""
        self.wait(after)
        sends = self.run_step(self.store.unsent(AGENT, BATCH_LIMIT))
        self.check_answer(
            [send.task_id for send in sends], sweeper_checks.check_unsent, self.ledger, sends
        )
        self.sends += sends

    @precondition(lambda self: self.sends)
    @rule(chosen=st.lists(numbers, min_size=1, max_size=6), replies=st.booleans())
    def confirm_sent(self, chosen: list[int], replies: bool) -> None:
        """Confirm some sends, recent or old ones, and some twice."""
        sends = [send for number in chosen for send in pick(self.sends, number)]
        sends += [send for send in self.sends if isinstance(send, Reply)] if replies else []
        self.run_step(self.store.confirm_sent(sends))
        self.check_answer(
            [send.task_id for send in sends], sweeper_checks.record_confirmed, self.ledger, sends
        )
