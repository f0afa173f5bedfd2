"""The context object of a run, stored with the task."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from pydantic import BaseModel, JsonValue, TypeAdapter, ValidationError
from pydantic_core import to_json

from meshpoint.errors import AgentMisbehaved, IncompatibleState
from meshpoint.frameworks.steps import StateChanges
from meshpoint.model.declared_type import first_problem, loggable_cause


class StoredContext:
    """What a run keeps in its context object: a model of Pydantic, a dataclass or a `dict`.

    Raises:
        AgentMisbehaved: It is another object, or does not survive JSON.
    """

    def __init__(self, context: Any) -> None:
        if not (isinstance(context, BaseModel | dict) or is_dataclass(context)):
            kind = type(context).__name__
            raise AgentMisbehaved(
                f"store_context= needs a model of Pydantic, a dataclass or a dict, not a {kind}"
            )
        self._context = context
        self._type: TypeAdapter[Any] = TypeAdapter(type(context))
        self._changes = StateChanges()

    def dump(self) -> dict[str, JsonValue]:
        """Convert the context to JSON.

        Raises:
            AgentMisbehaved: Reading it back would give another context.
        """
        try:
            dumped: dict[str, JsonValue] = self._type.dump_python(
                self._context, mode="json", by_alias=True, round_trip=True, warnings=False
            )
            survives = self._read(dumped) == self._context
        except Exception as error:  # the types of a context may raise any
            raise AgentMisbehaved(f"the context cannot be stored: {error}") from error
        if not survives:
            raise AgentMisbehaved("the context cannot be stored: JSON would change it")
        return dumped

    def load(self, dumped: JsonValue) -> None:
        """Give the context what `dump` has returned.

        Raises:
            IncompatibleState: Its type has changed, and cannot read it.
        """
        try:
            read = self._read(dumped)
        except ValidationError as error:
            problem = first_problem(error)
            raise IncompatibleState(
                f"the stored context cannot be read: {problem}"
            ) from loggable_cause(error)
        if isinstance(self._context, dict):
            self._context.clear()
            self._context.update(read)
        elif isinstance(self._context, BaseModel):
            vars(self._context).update(vars(read))
            for name in ("__pydantic_extra__", "__pydantic_fields_set__"):
                object.__setattr__(self._context, name, getattr(read, name))
        else:
            for each in fields(self._context):
                object.__setattr__(self._context, each.name, getattr(read, each.name))

    def _read(self, dumped: JsonValue) -> Any:
        return self._type.validate_json(to_json(dumped))

    def changes_since(self, before: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
        """Changes since `before`, to be recorded with the result of a tool."""
        after = self.dump()
        changed = {key: value for key, value in after.items() if before.get(key, ...) != value}
        deleted: list[JsonValue] = [key for key in before if key not in after]
        names = [*changed, *(str(each) for each in deleted)]
        changed_at = self._changes.add(self, names) if names else 0
        return {"set": changed, "deleted": deleted, "changed_at": changed_at}

    def repeat(self, recorded: Mapping[str, Any]) -> None:
        """Make a recorded change again."""
        names = [*recorded["set"], *recorded["deleted"]]
        if not names:
            return
        latest = self._changes.repeat(self, names, recorded["changed_at"])
        dumped = {key: value for key, value in self.dump().items() if key not in latest}
        self.load(dumped | {key: recorded["set"][key] for key in latest & recorded["set"].keys()})
