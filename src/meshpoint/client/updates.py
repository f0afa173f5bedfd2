"""What a caller sees of a task: status messages, text, artifacts, and the end."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, JsonValue

from meshpoint.model.outcomes import Failed, Ok


class _Update(BaseModel):
    model_config = ConfigDict(frozen=True)

    id: str
    """Identifies it among the updates of its task, for `TaskHandle.updates(after=)`."""

    at: AwareDatetime
    """When it was sent, or received if the sender does not say."""

    path: tuple[str, ...] = ()
    """Names of the agents below the task's own, down to the reporting agent. Empty for updates of
    the task itself."""

    task_id: str | None = None
    """Id of the task that reports: two calls to one agent have the same `path`."""

    generation: int | None = None
    """Number of pauses of that task before the update, or `None` if its agent does not say."""

    reset: bool = False
    """Whether it replaces earlier updates: the replica was lost, and the code since the last pause
    runs again. Discard the updates of the same `path` and `task_id` with this `generation` or a
    later one. An iterator that cannot find its place begins with a reset."""


class StatusUpdate(_Update):
    """A progress report of the task or of its peers.

    `message` is the JSON that the agent gave to `ctx.update_status`, or the text of an agent in
    another language.
    """

    kind: Literal["status"] = "status"
    state: Literal["submitted", "working"]
    message: JsonValue = None


class TextDelta(_Update):
    """The next piece of the text that the agent is writing."""

    kind: Literal["text"] = "text"
    text: str


class ArtifactUpdate(_Update):
    """An artifact of the task, in A2A form."""

    kind: Literal["artifact"] = "artifact"
    artifact: dict[str, JsonValue]


class QuestionUpdate(_Update):
    """A question that the task now waits for: it has paused.

    `answer_schema` is the JSON schema of the answer. Answer with `Mesh.complete(question_id, …)`,
    or on the command line with `meshpoint tasks complete`.
    """

    kind: Literal["question"] = "question"
    name: str
    question_id: str
    prompt: str | None = None
    answer_schema: dict[str, JsonValue]


class Ended(_Update):
    """The last update: `outcome` is an `Ok` with the typed value, or a `Failed`."""

    kind: Literal["ended"] = "ended"
    outcome: Ok[Any] | Failed


LiveUpdate: TypeAlias = StatusUpdate | TextDelta | ArtifactUpdate | QuestionUpdate
"""An update that may arrive before the end."""

Update: TypeAlias = Annotated[
    StatusUpdate | TextDelta | ArtifactUpdate | QuestionUpdate | Ended, Field(discriminator="kind")
]
"""One item of `TaskHandle.updates`; its `kind` says which."""
