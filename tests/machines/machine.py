"""The machine: replicas pause, claim, crash, return as zombies and sweep, in any order."""

from __future__ import annotations

import hypothesis.strategies as st
from hypothesis.stateful import initialize, precondition, rule

from machines import passing
from machines.stage import PLENTY, Stage, pick
from machines.story import CallStory
from machines.wishes import READS_ALL, REPLICAS, Shape
from meshpoint.model.checkpoint import (
    Begin,
    Cancel,
    Claim,
    End,
    Pause,
    Progress,
    Release,
    Replica,
    Reply,
    Run,
    TaskState,
)
from meshpoint.model.ids import TaskId
from meshpoint.testing.conformance.build import AGENT, FORMAT, OTHER_FORMAT, SECOND


def picks(*kinds: str) -> st.SearchStrategy[list[tuple[str, int]]]:
    """A batch of one to six pairs: a kind, and an index into the candidates of that kind."""
    return st.lists(st.tuples(st.sampled_from(kinds), numbers), min_size=1, max_size=6)


numbers = st.one_of(st.integers(0, 1), st.integers(0, 40))
replicas = st.sampled_from((*REPLICAS[:2], *REPLICAS))
shapes = st.builds(
    Shape,
    failed=st.lists(st.sampled_from([False, False, False, True]), min_size=1, max_size=5).map(tuple),
    needed=st.sampled_from([None, None, 1, 2]),
    join_seconds=st.sampled_from([None, None, 8, 90]),
    times=st.integers(0, 5),
    state_format=st.sampled_from([FORMAT, FORMAT, OTHER_FORMAT]),
)


class StoreMachine(Stage):
    """Drives the store from `open_store` and checks every answer against the ledger."""

    @initialize(shape=shapes, number=numbers)
    def start(self, shape: Shape, number: int) -> None:
        """One task waits from the start."""
        self.pause([("new", number, shape)])

    @rule(items=picks("new", "again", "other"), replica=replicas)
    def begin(self, items: list[tuple[str, int]], replica: Replica) -> None:
        """Write requests before their runs: new, repeated, and for a task that exists."""
        begins: list[Begin] = []
        for kind, number in items:
            requester = self.wishes.requester(number, self.clock.now())
            if kind == "new":
                begins.append(self.wishes.begin(self.wishes.run(), replica, requester))
            for story in pick(self.stories, number) if kind == "other" else []:
                begins.append(self.wishes.begin(self.wishes.run(story.task_id), replica, requester))
            for run in (
                pick([run for run in self.runs(replica) if run.generation == 0], number) if kind == "again" else []
            ):
                story = self.ledger.stories[run.task_id]
                begins.append(self.wishes.begin(story.runs[0][0], replica, story.requester))
        results = self.do(self.store.begin(begins))
        for wish, result in zip(begins, results, strict=True):
            self.tell([wish.run.task_id], self.ledger.began, wish, result)

    @rule(
        items=st.lists(
            st.tuples(st.sampled_from(["new", "new", "own", "own", "again", "zombie", "other"]), numbers, shapes),
            min_size=1,
            max_size=6,
        ),
        after=st.sampled_from([0, 0, 0, 41]),
    )
    def pause(self, items: list[tuple[str, int, Shape]], after: int = 0) -> None:
        """Write checkpoints: of new tasks, owners and zombies, repeated ones, over existing rows."""
        self.wait(after)
        pauses = [pause for kind, number, shape in items for pause in self._pauses(kind, number, shape)]
        results = self.do(self.store.pause(pauses))
        for pause, result in zip(pauses, results, strict=True):
            self.tell([pause.run.task_id], self.ledger.paused, pause, result)
            self.sends += getattr(result, "dispatches", ())

    def _pauses(self, kind: str, number: int, shape: Shape) -> list[Pause]:
        match kind:
            case "new":
                requester = self.wishes.requester(number, self.clock.now())
                return [self.wishes.pause(self.wishes.run(), requester, shape)]
            case "own" | "zombie":
                return [self._pause_of(run, shape) for run in pick(self._writers(kind), number)]
            case "other":
                stories = pick(self.stories, number)
                return [self.wishes.pause(self.wishes.run(s.task_id), s.requester, shape) for s in stories]
            case _:
                return pick([pause for story in self.stories for pause in story.pauses], number)

    def _writers(self, kind: str) -> list[Run]:
        return self.owners() if kind == "own" else self.runs()

    def _pause_of(self, run: Run, shape: Shape) -> Pause:
        pause = self.written.get(f"pause {run.id}")
        if not isinstance(pause, Pause):
            pause = self.wishes.pause(run, self.ledger.stories[run.task_id].requester, shape)
            self.written[f"pause {run.id}"] = pause
        return pause

    @rule(
        items=picks("fresh", "fresh", "fresh", "any", "again", "wrong", "mesh", "nobody"),
        replica=replicas,
        slots=st.sampled_from([0, 1, 2, PLENTY]),
    )
    def claim(self, items: list[tuple[str, int]], replica: Replica, slots: int) -> None:
        """Claim a batch of responses: fresh, duplicate, late, repeated, forged or misdirected."""
        claims = {claim.id: claim for kind, number in items for claim in self._claims(kind, number, replica)}
        self._claim(list(claims.values()), replica, slots)

    @precondition(lambda self: self.ledger.in_state(TaskState.WAITING))
    @rule(count=st.integers(1, 4), number=numbers, replica=replicas, slots=st.sampled_from([0, 1, 2, PLENTY]))
    def answer(self, count: int, number: int, replica: Replica, slots: int) -> None:
        """Claim every response that some tasks wait for, in one batch."""
        stories = self.ledger.in_state(TaskState.WAITING)[-count:]
        calls = [(index, story, call) for story in stories for index, call in enumerate(story.pending)]
        calls.sort(key=lambda each: each[0])
        self._claim([self._response(s.task_id, call, index + number) for index, s, call in calls], replica, slots)

    @precondition(lambda self: self.batches)
    @rule(replica=replicas, number=st.integers(0, 2))
    def repeat(self, replica: Replica, number: int) -> None:
        """Repeat a whole batch of claims, as after a commit whose response was lost."""
        for claims, slots in pick(self.batches.get(replica, []), number):
            self._claim(claims, replica, slots)

    def _claims(self, kind: str, number: int, replica: Replica) -> list[Claim]:
        match kind:
            case "again":
                mine = [claim for batch, _ in self.batches.get(replica, []) for claim in batch]
                return pick(sorted(mine, key=lambda claim: claim.task_id in self.ledger.stories), number)
            case "nobody":
                return [self.wishes.claim(TaskId("nobody"), TaskId("nobody"), None, number)]
            case "wrong" | "mesh":
                sender = "mallory" if kind == "wrong" else None
                found = pick(self.all_calls() if kind == "wrong" else self.pending(), number)
                return [self.wishes.claim(task_id, call.id, sender, number) for task_id, call in found]
            case _:
                found = pick(self.pending() if kind == "fresh" else self.all_calls(), number)
                return [self._response(task_id, call, number) for task_id, call in found]

    def _response(self, task_id: TaskId, call: CallStory, number: int) -> Claim:
        return self.wishes.claim(task_id, call.id, call.planned.peer, number)

    def _claim(self, claims: list[Claim], replica: Replica, slots: int) -> None:
        arrivals = self.do(self.store.claim(claims, replica, slots))
        self.batches.setdefault(replica, []).append((claims, slots))
        self.tell([c.task_id for c in claims], self.ledger.claimed, claims, replica, slots, arrivals)
        self.sends += [notice for arrival in arrivals for notice in getattr(arrival, "cancels", ())]

    @rule(items=picks("fresh", "any", "wrong"))
    def progress(self, items: list[tuple[str, int]]) -> None:
        """Record status updates."""
        updates: list[Progress] = []
        for kind, number in items:
            for task_id, call in pick(self.all_calls() if kind == "any" else self.pending(), number):
                updates.append(Progress(task_id, call.id, "mallory" if kind == "wrong" else call.planned.peer))
        noted = self.do(self.store.progress(updates))
        self.tell([u.task_id for u in updates], passing.progressed, self.ledger, updates, noted)

    @precondition(lambda self: self.runs())
    @rule(items=picks("own", "own", "zombie"))
    def end(self, items: list[tuple[str, int]]) -> None:
        """End tasks, by owners and zombies; a run that ends again ends in the same way."""
        ends = [self._end_of(run, number) for kind, number in items for run in pick(self._writers(kind), number)]
        results = self.do(self.store.end(ends))
        for end, result in zip(ends, results, strict=True):
            self.tell([end.run.task_id], self.ledger.ended, end, result)
            self.sends += [result.reply] if hasattr(result, "reply") else []

    def _end_of(self, run: Run, number: int) -> End:
        end = self.written.get(f"end {run.id}")
        if not isinstance(end, End):
            end = self.written[f"end {run.id}"] = self.wishes.end(run, number)
        return end

    @precondition(lambda self: self.runs())
    @rule(
        items=picks("own", "own", "zombie"),
        wait=st.sampled_from([0, 0, 30]),
        incompatible=st.sampled_from([None, None, "travel/9"]),
    )
    def release(self, items: list[tuple[str, int]], wait: int, incompatible: str | None) -> None:
        """Release tasks."""
        runs = [run for kind, number in items for run in pick(self._writers(kind), number)]
        releases = [Release(run, wait * SECOND, incompatible) for run in runs]
        results = self.do(self.store.release(releases))
        for release, result in zip(releases, results, strict=True):
            self.tell([release.run.task_id], self.ledger.released, release, result)

    @rule(items=picks("any", "running", "running", "again", "unknown"))
    def cancel(self, items: list[tuple[str, int]]) -> None:
        """Cancel tasks in any state, tasks not known yet, and tasks already cancelled."""
        cancels: list[Cancel] = []
        for kind, number in items:
            if kind == "again":
                known = [cancel for cancel in self.cancels if cancel.task_id in self.ledger.stories]
                cancels += pick(known, number)
            elif kind == "unknown":
                cancels.append(self.wishes.cancel(TaskId(self.wishes.id("task"))))
            else:
                stories = self.ledger.in_state(TaskState.RUNNING) if kind == "running" else self.stories
                cancels += [self.wishes.cancel(story.task_id) for story in pick(stories, number)]
        results = self.do(self.store.cancel(cancels))
        self.cancels += cancels
        for cancel, result in zip(cancels, results, strict=True):
            self.tell([cancel.task_id], self.ledger.cancelled, cancel, result)
            self.sends += getattr(result, "cancels", ())

    @rule(replica=replicas, chosen=st.lists(numbers, min_size=1, max_size=6))
    def renew(self, replica: Replica, chosen: list[int]) -> None:
        """Extend leases, including lost ones."""
        runs = list(dict.fromkeys(run for number in chosen for run in pick(self.runs(replica), number)))
        lost = self.do(self.store.renew(runs, replica))
        self.tell([run.task_id for run in runs], passing.renewed, self.ledger, runs, replica, lost)

    @precondition(lambda self: self.ledger.in_state(TaskState.WAITING))
    @rule(count=st.integers(1, 4), replica=st.sampled_from(REPLICAS[:2]), slots=st.sampled_from([1, 2, PLENTY]))
    def resume(self, count: int, replica: Replica, slots: int) -> None:
        """Complete joins in a replica that has slots for some of the tasks or for all."""
        self.answer(count, 0, replica, slots)

    @precondition(lambda self: self.owners())
    @rule(replica=replicas, write=st.sampled_from(["pause", "end", "release", "renew"]))
    def lose(self, replica: Replica, write: str) -> None:
        """Let a lease expire, another replica rescue the task, and the old run write as a zombie."""
        self.take_over(replica, PLENTY, PLENTY, 16)
        match write:
            case "pause":
                self.pause([("zombie", 0, Shape((False,), None, None, 0, FORMAT))])
            case "end":
                self.end([("zombie", 0)])
            case "release":
                self.release([("zombie", 0)], 0, None)
            case _:
                for each in REPLICAS:
                    self.renew(each, [0])

    @precondition(lambda self: self.owners())
    @rule(replica=replicas, hours=st.lists(st.integers(0, 1), min_size=1, max_size=3))
    def puzzle(self, replica: Replica, hours: list[int]) -> None:
        """Pass an unreadable state from replica to replica."""
        for hour in hours:
            self.release([("own", 0)], 0, "travel/9")
            self.wait(hour * 3_600)
            self.take(replica, PLENTY, PLENTY)

    @precondition(lambda self: self.owners())
    @rule(number=numbers, shape=shapes)
    def stop(self, number: int, shape: Shape) -> None:
        """Cancel a running task whose owner pauses before it has seen the cancel."""
        self.cancel([("running", number)])
        self.pause([("own", 0, shape)])

    @rule(replica=replicas)
    def crash(self, replica: Replica) -> None:
        """A replica forgets its runs, which write nothing from now on except as zombies."""
        self.crashed |= {run.id for run in self.runs(replica)}

    @rule(seconds=st.sampled_from([1, 3, 6, 11, 16, 31, 61]))
    def wait(self, seconds: int) -> None:
        """Advance the clock."""
        self.clock.advance(seconds * SECOND)

    @precondition(lambda self: self.ledger.in_state(TaskState.WAITING))
    @rule(replica=replicas, slots=st.sampled_from([0, 1, PLENTY]), after=st.sampled_from([0, 6, 13, 21, 61, 91]))
    def expire(self, replica: Replica, slots: int, after: int) -> None:
        """Enforce deadlines."""
        self.wait(after)
        due = [story.task_id for story in self.stories if story.late(self.clock.now())]
        slots = PLENTY if 0 < slots < len(due) else slots
        counted = self.do(self.store.due(replica, PLENTY))
        assert counted.expired >= len(due), "too low a count would leave due tasks waiting"
        results = self.do(self.store.expire(replica, PLENTY, slots))
        self.tell(due, passing.expired, self.ledger, replica, slots, results)
        self.sends += [notice for result in results for notice in result.cancels]
        self.do(self._not_looked_at_in_vain())

    @precondition(lambda self: self.ledger.in_state(TaskState.READY))
    @rule(replica=replicas, limit=st.sampled_from([1, 2, PLENTY]), suspects=st.sampled_from([0, PLENTY]))
    def take(self, replica: Replica, limit: int, suspects: int) -> None:
        """Acquire ready tasks."""
        due = passing.takeable(self.ledger, replica, suspects)
        limit = passing.untied(due, limit)
        assert self.do(self.store.due(replica, PLENTY)).ready >= len(due)
        tasks = self.do(self.store.take(replica, limit, suspects))
        touched = [story.task_id for story in due]
        self.tell(touched, passing.taken, self.ledger, replica, limit, suspects, tasks)

    @precondition(lambda self: self.ledger.in_state(TaskState.RUNNING))
    @rule(
        replica=replicas,
        limit=st.sampled_from([1, 2, PLENTY]),
        suspects=st.sampled_from([0, PLENTY]),
        after=st.sampled_from([0, 3, 16]),
    )
    def take_over(self, replica: Replica, limit: int, suspects: int, after: int) -> None:
        """Rescue tasks whose lease has expired."""
        self.wait(after)
        due = passing.runnable(self.ledger, replica, TaskState.RUNNING)
        limit = passing.untied(due, limit)
        assert self.do(self.store.due(replica, PLENTY)).lapsed == len(due)
        tasks = self.do(self.store.take_over(replica, limit, suspects))
        touched = [story.task_id for story in due]
        self.tell(touched, passing.rescued, self.ledger, replica, limit, suspects, tasks)

    @rule(after=st.sampled_from([0, 11]))
    def keep_alives(self, after: int) -> None:
        """Send keep-alives to the requesters."""
        self.wait(after)
        self.tell([], passing.kept_alive, self.ledger, self.do(self.store.keep_alives(READS_ALL, PLENTY)))

    @precondition(lambda self: any(story.state.ended for story in self.stories))
    @rule(hours=st.sampled_from([0, 2, 4]))
    def purge(self, hours: int) -> None:
        """Purge tombstones."""
        self.wait(hours * 3_600 + 1)
        count = self.do(self.store.purge(AGENT, PLENTY))
        self.tell([], passing.purged, self.ledger, count)

    @rule(after=st.sampled_from([0, 11, 21]))
    def unsent(self, after: int) -> None:
        """Lease everything due for sending."""
        self.wait(after)
        sends = self.do(self.store.unsent(AGENT, PLENTY))
        self.tell([send.task_id for send in sends], passing.offered, self.ledger, sends)
        self.sends += sends

    @precondition(lambda self: self.sends)
    @rule(chosen=st.lists(numbers, min_size=1, max_size=6), replies=st.booleans())
    def mark_sent(self, chosen: list[int], replies: bool) -> None:
        """Confirm some sends, recent or old ones, and some twice."""
        sends = [send for number in chosen for send in pick(self.sends, number)]
        sends += [send for send in self.sends if isinstance(send, Reply)] if replies else []
        self.do(self.store.mark_sent(sends))
        self.tell([send.task_id for send in sends], passing.marked, self.ledger, sends)
