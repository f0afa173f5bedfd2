"""What a caller sees of a task: status messages, artifacts, and the end."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, JsonValue

from meshpoint.model.outcomes import Failed, Ok


class _Update(BaseModel):
    model_config = ConfigDict(frozen=True)

    at: AwareDatetime
    """When it was sent, or received if the sender does not say."""


class StatusUpdate(_Update):
    """A progress report of the task or of its peers.

    `message` is the JSON that the agent gave to `ctx.status`, or the text of an agent in another
    language.
    """

    kind: Literal["status"] = "status"
    state: Literal["submitted", "working"]
    message: JsonValue = None


class ArtifactUpdate(_Update):
    """An artifact of the task, in A2A form."""

    kind: Literal["artifact"] = "artifact"
    artifact: dict[str, JsonValue]


class Ended(_Update):
    """The last update: `outcome` is an `Ok` with the typed value, or a `Failed`."""

    kind: Literal["ended"] = "ended"
    outcome: Ok[Any] | Failed


Update: TypeAlias = Annotated[StatusUpdate | ArtifactUpdate | Ended, Field(discriminator="kind")]
"""One item of `TaskHandle.updates`; its `kind` says which."""
