"""Token usage in total, by model and by source."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, ValidationError

_MAX_COUNT = 2**53


class Tokens(BaseModel):
    """Token counts. `cached` is the part of `input` served from a provider's cache."""

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    input: int = 0
    output: int = 0
    cached: int = 0

    def add(self, other: Tokens) -> None:
        """Add the counts of `other`."""
        self.input += other.input
        self.output += other.output
        self.cached += other.cached


class TokenUsage(BaseModel):
    """Tokens used by a task so far.

    `by_source` is keyed by tool or peer, or "agent" for the agent itself. `requests` counts the
    requests to models that an adapter of a framework has made for the task, but not for its
    peers. Responses leave it out, and so do checkpoints if it is zero: the previous release
    rejects it.
    """

    model_config = ConfigDict(extra="forbid", validate_assignment=True)

    total: Tokens = Field(default_factory=Tokens)
    by_model: dict[str, Tokens] = Field(default_factory=dict)
    by_source: dict[str, Tokens] = Field(default_factory=dict)
    requests: int = Field(default=0, exclude_if=lambda count: count == 0)

    @property
    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        total = self.total
        counts = total.input or total.output or total.cached or self.requests
        return not (counts or self.by_model or self.by_source)

    @property
    def is_plausible(self) -> bool:
        """Whether all counts are from 0 to 2**53, so that JSON parsers can read their sums."""
        all_tokens = (self.total, *self.by_model.values(), *self.by_source.values())
        counts = (
            count
            for tokens in all_tokens
            for count in (tokens.input, tokens.output, tokens.cached)
        )
        return all(0 <= count <= _MAX_COUNT for count in (*counts, self.requests))

    def snapshot(self) -> TokenUsage:
        """A copy that is independent of later changes."""
        return TokenUsage() if self.is_empty else self.model_copy(deep=True)

    def record(self, tokens: Tokens, *, model: str, source: str = "agent") -> None:
        """Add the tokens of one model response."""
        self.total.add(tokens)
        self.by_model.setdefault(model, Tokens()).add(tokens)
        self.by_source.setdefault(source, Tokens()).add(tokens)

    def add(self, other: TokenUsage) -> None:
        """Add the counts of `other`, each under its own model and source."""
        self.total.add(other.total)
        self.requests += other.requests
        for own, additional in (
            (self.by_model, other.by_model),
            (self.by_source, other.by_source),
        ):
            for name, tokens in additional.items():
                own.setdefault(name, Tokens()).add(tokens)

    def merge(self, other: TokenUsage, *, source: str) -> None:
        """Add a peer's usage under the peer's name."""
        if other.is_empty:
            return
        self.total.add(other.total)
        for model, tokens in other.by_model.items():
            self.by_model.setdefault(model, Tokens()).add(tokens)
        if other.total != Tokens():
            self.by_source.setdefault(source, Tokens()).add(other.total)


def parse_usage(stored: object) -> TokenUsage | None:
    """Read stored usage for people. `None` if missing or damaged."""
    try:
        return None if stored is None else TokenUsage.model_validate(stored)
    except ValidationError:
        return None
