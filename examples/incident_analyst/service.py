"""The HTTP service in front of the analyst: `uvicorn service:app`."""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import AsyncIterable, AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

from fastapi import Depends, FastAPI, Header, Path, Request
from fastapi.responses import JSONResponse
from fastapi.sse import EventSourceResponse, ServerSentEvent
from incident import ID_PATTERN, Decision, Incident, Report, approval, ask_analyst
from pydantic import BaseModel

import meshpoint
from meshpoint import (
    AnswerRefused,
    Failed,
    InvalidInput,
    Mesh,
    MeshpointError,
    Ok,
    QuestionNotOpen,
    TaskHandle,
    TaskNotFound,
)

log = logging.getLogger("incidents")
MAX_FOLLOWED = 1000
followed: OrderedDict[str, TaskHandle[Report]] = OrderedDict()
"""By task id. A handle keeps the last updates of its task for a reader that reconnects."""


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[dict[str, Mesh]]:
    config = os.environ.get("INCIDENT_CONFIG", "sqlite.yaml")
    async with meshpoint.connect(config=config, name="incidents") as mesh:  # once per process
        yield {"mesh": mesh}


def get_mesh(request: Request) -> Mesh:
    mesh: Mesh = request.state.mesh
    return mesh


MeshDep = Annotated[Mesh, Depends(get_mesh)]
IncidentId = Annotated[str, Path(pattern=ID_PATTERN)]
app = FastAPI(title="Incident analyst", lifespan=lifespan)
ENDED = ("completed", "failed", "cancelled")


@app.exception_handler(MeshpointError)
async def refuse(request: Request, error: Exception) -> JSONResponse:
    """Map errors to status codes. A request that fails with 503 can be repeated safely."""
    match error:
        case TaskNotFound():
            code = 404
        case AnswerRefused() | QuestionNotOpen():
            code = 409
        case InvalidInput():
            code = 422
        case _:
            code = 503
    return JSONResponse({"detail": str(error)}, code)


class Progress(BaseModel):
    state: str
    waits_for: list[str] = []
    report: Report | None = None
    problem: str | None = None


def task_id(incident_id: str) -> str:
    """The same id for the same incident, so a repeated POST starts no second task."""
    return f"incident-{incident_id}"


def keep(task: TaskHandle[Report]) -> None:
    """Keep the handle of an existing task. Requests for unknown ids must not displace it."""
    followed[task.id] = task
    followed.move_to_end(task.id)
    if len(followed) > MAX_FOLLOWED:
        dropped, _ = followed.popitem(last=False)
        log.info("%s: a reader that reconnects may miss updates: too many incidents", dropped)


@app.post("/incidents", status_code=202)
async def start(incident: Incident, mesh: MeshDep) -> dict[str, str]:
    task = await mesh.send(ask_analyst, incident, task_id=task_id(incident.id))
    return {"task_id": task.id}


@app.get("/incidents/{id}")
async def read(id: IncidentId, mesh: MeshDep) -> Progress:
    """The state, and the report if the incident is closed."""
    task = mesh.task(ask_analyst, task_id(id))
    status = await task.status()
    if status.state not in ENDED:
        return Progress(state=status.state, waits_for=[wait.name for wait in status.waits])
    match await task.outcome():
        case Ok(value=report):
            return Progress(state=status.state, report=report)
        case Failed(message=problem):
            return Progress(state=status.state, problem=problem)


@app.get("/incidents/{id}/updates", response_class=EventSourceResponse)
async def updates(
    id: IncidentId, mesh: MeshDep, last_event_id: Annotated[str | None, Header()] = None
) -> AsyncIterable[ServerSentEvent]:
    """Status updates, the question and the end. Browsers send `Last-Event-ID` on a reconnect."""
    task = mesh.task(ask_analyst, task_id(id))
    try:
        async for update in task.updates(after=last_event_id):
            keep(task)
            yield ServerSentEvent(data=update, event=update.kind, id=update.id)
    except TaskNotFound as error:
        yield ServerSentEvent(data=str(error), event="not_found")


@app.post("/incidents/{id}/decision", status_code=204)
async def decide(id: IncidentId, decision: Decision, mesh: MeshDep) -> None:
    """Answer the question. A second decision is refused."""
    await mesh.task(ask_analyst, task_id(id)).complete(approval, decision)
