"""Requests whose task must not exist yet: `if_exists="reject"`."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TypeAlias

from meshpoint.errors import TaskExists
from meshpoint.model.bodies import ResponseBody
from meshpoint.model.ids import new_id
from meshpoint.model.outcomes import Failed

_Key: TypeAlias = tuple[str, str]
"""The name of an agent, and the id of its task."""

_MAX_IN_DOUBT = 1000
REPEAT_DELAYS = (15.0, 30.0, 60.0, 120.0, 240.0, 480.0, 600.0)
"""Seconds to wait for a reply before the request is sent again. The last delay repeats."""


@dataclass(slots=True)
class Start:
    """One request for a new task, until a replica has accepted or refused it.

    Attributes:
        is_attached: a handle of this connection has attached to the task before.
        was_in_doubt: the same request was sent before, and may have been accepted.
    """

    token: str
    is_attached: bool = False
    was_in_doubt: bool = False
    fingerprint: str = ""
    decided: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )


class Starts:
    """The requests of one connection for tasks that must not exist yet.

    A request is in doubt until a reply accepts or refuses it. Repeating it uses the same token,
    so that it does not conflict with itself.
    """

    def __init__(self) -> None:
        self._running: dict[_Key, Start] = {}
        self._in_doubt: dict[_Key, str] = {}

    def begin(self, key: _Key, *, is_known: bool, is_attached: bool) -> Start:
        """Begin a request. `is_known`: this connection has already started the task.

        Raises:
            TaskExists: The task is known, or another such request for it is in progress.
        """
        token = self._in_doubt.pop(key, None)
        if key in self._running or (is_known and token is None):
            if token is not None:
                self._in_doubt[key] = token
            raise TaskExists(*key)
        was_in_doubt = token is not None
        start = self._running[key] = Start(token or new_id(), is_attached, was_in_doubt)
        self._in_doubt[key] = start.token
        if len(self._in_doubt) > _MAX_IN_DOUBT:
            del self._in_doubt[next(iter(self._in_doubt))]
        return start

    def end(self, key: _Key, *, in_doubt: bool) -> None:
        """End the request that `begin` returned."""
        self._running.pop(key, None)
        if not in_doubt:
            self._in_doubt.pop(key, None)

    def accept(self, key: _Key, token: str) -> None:
        """Record that a replica has accepted a request."""
        start = self._running.get(key)
        if start is not None and start.token == token and not start.decided.done():
            start.decided.set_result(None)

    def handle_response(self, key: _Key, body: ResponseBody) -> bool:
        """Whether a response only refuses a request of this connection, and is not an outcome.

        The outcome of a task accepts its request, unless a handle has attached to the task: the
        outcome may then be for that one.
        """
        refused = body.refused_fingerprint
        refuses_id = refused is not None and body.is_id_in_use
        start = self._running.get(key)
        if start is not None and not start.decided.done():
            if refuses_id and refused == start.fingerprint:
                outcome = body.outcome()
                problem = outcome.message if isinstance(outcome, Failed) else ""
                error = TaskExists(*key, problem, may_attach=body.may_attach)
                start.decided.set_exception(error)
            elif refused == start.fingerprint or (refused is None and not start.is_attached):
                start.decided.set_result(None)
        return refuses_id and key in self._in_doubt

    def close(self, error: Exception) -> None:
        """End all requests with `error`."""
        for start in self._running.values():
            if not start.decided.done():
                start.decided.set_exception(error)
