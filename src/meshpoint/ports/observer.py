"""Events for logs, metrics and tests, emitted as they happen."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

from pydantic import JsonValue

from meshpoint.model.error_text import describe_exception, type_name
from meshpoint.model.events import Event, Phase, Step
from meshpoint.model.ids import AgentName, ReplicaId, TaskId

log = logging.getLogger("meshpoint.observer")


class Observer(Protocol):
    """Receives every event synchronously, at the point in the code where it happens.

    Lease renewals are emitted from their own thread; all other events come from the event loop.
    """

    def emit(self, event: Event) -> None:
        """Handle one event. Must neither raise nor block."""


EventKind: TypeAlias = tuple[Step, Phase]
Handler: TypeAlias = Callable[[Event], None]
MoreDetails: TypeAlias = Callable[[], Mapping[str, JsonValue]]
"""Builds details of an event, for observers that need them."""


class SelectiveObserver:
    """An observer with a function for each kind of event that it handles."""

    handlers: Mapping[EventKind, Handler]

    def emit(self, event: Event) -> None:
        """Handle one event; see `Observer`."""
        if (handle := self.handlers.get((event.step, event.phase))) is not None:
            handle(event)


class Observers:
    """Pass every event to each of `observers`, in order."""

    def __init__(self, observers: Sequence[Observer]) -> None:
        self.observers = observers
        self._routes = _Routes(self)

    def emit(self, event: Event) -> None:
        """Handle one event. The failure of one observer is logged, and the others still get it."""
        _pass_on(event, self._routes[event.step, event.phase])


class _Routes(dict[EventKind, Sequence[Handler]]):
    """The handlers of `observer` for each kind of event, found when one is first emitted."""

    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self._observer = observer

    def __missing__(self, kind: EventKind) -> Sequence[Handler]:
        handlers = self[kind] = [*_find_handlers(self._observer, kind)]
        return handlers


def _find_handlers(observer: Observer, kind: EventKind) -> Iterator[Handler]:
    match observer:
        case Observers():
            for each in observer.observers:
                yield from _find_handlers(each, kind)
        case SelectiveObserver():
            if (handle := observer.handlers.get(kind)) is not None:
                yield handle
        case _:
            yield observer.emit


def _pass_on(event: Event, handlers: Sequence[Handler]) -> None:
    for handle in handlers:
        try:
            handle(event)
        except Exception:  # a faulty observer must not break the step
            log.exception("an observer failed at %s %s", event.step.value, event.phase.value)


@dataclass(slots=True)
class _SearchResult:
    """The due work found in a `Steps.search` block. Empty until the block fills it in."""

    task_ids: tuple[TaskId, ...] = ()
    detail: dict[str, JsonValue] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Steps:
    """Emits the events of one agent's worker in one replica."""

    observer: Observer
    agent: AgentName
    replica: ReplicaId
    _routes: _Routes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_routes", _Routes(self.observer))

    @contextmanager
    def step(
        self,
        step: Step,
        task_ids: Iterable[TaskId] = (),
        more: MoreDetails = dict,
        /,
        **detail: JsonValue,
    ) -> Iterator[dict[str, JsonValue]]:
        """Emit `BEFORE` on entry, and `AFTER` or `FAILED` on exit.

        `more` builds details that few observers need. What the block puts into the yielded dict is
        added to the details of the event on exit.
        """
        ids = tuple(task_ids)
        result: dict[str, JsonValue] = {}
        self._emit(step, Phase.BEFORE, ids, detail, more)
        try:
            yield result
        except BaseException as error:
            self._failed(step, ids, detail | result, error, more)
            raise
        self._emit(step, Phase.AFTER, ids, detail | result if result else detail, more)

    @contextmanager
    def search(self, step: Step) -> Iterator[_SearchResult]:
        """Emit `BEFORE`, and `AFTER` only if the block puts due work into the yielded result.

        Emits `FAILED` if the block raises.
        """
        result = _SearchResult()
        self._emit(step, Phase.BEFORE, (), {})
        try:
            yield result
        except BaseException as error:
            self._failed(step, (), {}, error)
            raise
        if result.task_ids or result.detail:
            self._emit(step, Phase.AFTER, result.task_ids, result.detail)

    def emit(self, step: Step, *task_ids: TaskId, **detail: JsonValue) -> None:
        """Emit a single `INFO` event for a step without an effect."""
        self._emit(step, Phase.INFO, task_ids, detail)

    def _failed(
        self,
        step: Step,
        ids: tuple[TaskId, ...],
        detail: dict[str, JsonValue],
        error: BaseException,
        more: MoreDetails = dict,
    ) -> None:
        failure: dict[str, JsonValue] = {
            "error": describe_exception(error),
            "error_type": type_name(error),
        }
        self._emit(step, Phase.FAILED, ids, {**detail, **failure}, more)

    def _emit(
        self,
        step: Step,
        phase: Phase,
        ids: tuple[TaskId, ...],
        detail: dict[str, JsonValue],
        more: MoreDetails = dict,
    ) -> None:
        if handlers := self._routes[step, phase]:  # else no observer needs the event
            _pass_on(Event(step, phase, self.agent, self.replica, ids, detail, more), handlers)
