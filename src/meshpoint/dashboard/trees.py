"""Trees of tasks that wait for each other, across the databases of a mesh."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from meshpoint.dashboard.sources import Source
from meshpoint.errors import MeshpointError
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.operator_views import TreeNode, TreeTask
from meshpoint.model.waits import is_wait

_MAX_NODES = 600
_MAX_SHOWN = 25
"""Calls of one task that a tree shows."""
_MAX_HOPS = 3
"""Changes from one database to another within a tree."""


@dataclass(slots=True)
class Branch:
    """A task or a call, and the calls that the task waits for."""

    node: TreeNode
    source: Source
    task: TreeTask | None
    calls: list[Branch] = field(default_factory=list)

    @property
    def shown(self) -> list[Branch]:
        """The calls that a page shows."""
        return self.calls[:_MAX_SHOWN]

    @property
    def hidden(self) -> int:
        """Number of known open calls that a page does not show."""
        return len(self.calls) - len(self.shown)

    @property
    def limit(self) -> datetime | None:
        """The first deadline of the call, its task and its join."""
        limits = [self.node.deadline, self.task.limit if self.task else None]
        own = min((each for each in limits if each is not None), default=None)
        if self.node.depth == 0 or own is None:
            calls = [each.node.deadline for each in self.calls if each.node.deadline is not None]
            return min([*calls, *([own] if own else [])], default=None)
        return own

    def walk(self) -> Iterator[Branch]:
        """The branch and all below it, from the top."""
        yield self
        for call in self.calls:
            yield from call.walk()


async def grow(source: Source, roots: Sequence[TaskId]) -> list[Branch]:
    """The trees below `roots`, in their order. A root that does not exist is left out."""
    branches = _assemble(source, await (await source.open()).trees(roots, limit=_MAX_NODES))
    unresolved = branches
    for _ in range(_MAX_HOPS):
        missing = {
            each.node.task_id: each
            for branch in unresolved
            for each in branch.walk()
            if each.task is None and not is_wait(each.node.peer)
        }
        unresolved = await _graft(source, missing) if missing else []
        if not unresolved:
            break
    by_id = {branch.node.task_id: branch for branch in branches}
    return [by_id[each] for each in roots if each in by_id]


async def _graft(source: Source, missing: dict[TaskId, Branch]) -> list[Branch]:
    """Add tasks that other databases of the mesh have, and return their branches."""
    grafted: list[Branch] = []
    for other in [source, *source.siblings]:
        wanted = [each for each in missing if missing[each].task is None]
        if not wanted or all(missing[each].source is other for each in wanted):
            continue
        try:
            nodes = await (await other.open()).trees(wanted, limit=_MAX_NODES)
        except MeshpointError:
            continue  # its own pages say why it cannot be read
        for found in _assemble(other, nodes):
            place = missing[found.node.task_id]
            place.task, place.calls, place.source = found.task, found.calls, other
            grafted.append(place)
    return grafted


def _assemble(source: Source, nodes: Sequence[TreeNode]) -> list[Branch]:
    """The branches of a listing that has parents before their calls."""
    branches: dict[TaskId, Branch] = {}
    roots: list[Branch] = []
    for node in nodes:
        branch = Branch(node, source, node.task)
        if node.parent_id is None:
            roots.append(branch)
        elif node.parent_id in branches:
            branches[node.parent_id].calls.append(branch)
        if node.parent_id is None or not is_wait(node.peer):
            branches.setdefault(node.task_id, branch)
    return roots


def unended(branch: Branch) -> list[tuple[Source, TaskId, AgentName]]:
    """The tasks of a tree that have not ended, each before the tasks that it waits for."""
    return [
        (each.source, each.node.task_id, each.task.agent)
        for each in branch.walk()
        if each.task is not None and not each.task.state.is_final
    ]
