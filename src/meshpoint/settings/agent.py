"""The section `agent`."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from meshpoint import extras
from meshpoint.errors import ConfigurationError
from meshpoint.model.ids import agent_name
from meshpoint.model.messages import MOST_SHARDS
from meshpoint.model.options import AckPolicy, OnCheckpointFailure, OnLostOwner, Options
from meshpoint.settings import urls
from meshpoint.settings.section import DEFAULT_OPTIONS, EMBEDDED_URL, Bytes, Count, Seconds, SecondsOrZero, Section

_ENTRYPOINT = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


@dataclass(slots=True)
class Timings:
    """The durations that a store applies (`meshpoint.ports.task_store.StoreTimings`)."""

    dispatch_lease: timedelta
    tombstone_ttl: timedelta
    incompatible_limit: timedelta
    checkpoint_ttl: timedelta
    checkpoint_history: int
    checkpoint_archive: bool


class AgentSettings(Section):
    """Settings of one agent. Defaults of keys that are also in `Options` are defined there."""

    name: str = Field(
        description="name in the mesh: letters, digits, '_' and '-', at most 63 characters",
    )
    entrypoint: str = Field(
        description="the agent, as module:attribute; the module must be importable",
    )
    stateless_checkpointing: bool = Field(
        default=DEFAULT_OPTIONS.stateless_checkpointing,
        description="store paused tasks in the database, so that any replica can resume them; "
        "needs session_service: sql",
    )
    session_service: Literal["memory", "sql"] = Field(
        default="memory", description="where tasks are stored: memory or sql"
    )
    session_db_url: str = Field(
        default=EMBEDDED_URL,
        description="postgresql:// URL in production, sqlite:/// on one host",
    )
    db_pool_size: Count = Field(
        default=5,
        description="database connections, in addition to the connections of the fast path",
    )
    max_concurrency: Count = Field(
        default=DEFAULT_OPTIONS.max_concurrency,
        description="maximum segments that run concurrently in one replica; paused tasks do not count",
    )
    max_in_memory: Count = Field(
        default=DEFAULT_OPTIONS.max_in_memory,
        description="maximum paused tasks that one replica keeps in memory without a database",
    )
    max_call_depth: Count = Field(
        default=DEFAULT_OPTIONS.max_call_depth,
        description="maximum length of a chain of agents that call each other",
    )
    max_fan_out: Count = Field(default=DEFAULT_OPTIONS.max_fan_out, description="maximum calls in one pause")
    request_shards: int = Field(
        default=DEFAULT_OPTIONS.request_shards,
        ge=1,
        le=MOST_SHARDS,
        description="number of request queues, 1 to 64; each sender always uses the same one, so that a "
        "flood from one sender does not starve the others",
    )
    max_attempts: Count = Field(
        default=DEFAULT_OPTIONS.max_attempts,
        description="maximum runs of one segment that kill their process; then the task fails",
    )
    max_message_bytes: Bytes = Field(
        default=DEFAULT_OPTIONS.max_message_bytes,
        description="maximum bytes of a message body that this agent sends or accepts; in files, "
        "the default is the value of the mesh",
    )
    max_join_bytes: Bytes = Field(
        default=DEFAULT_OPTIONS.max_join_bytes,
        description="maximum bytes of all outcomes of one pause, which are in memory together; a task above it fails",
    )
    peer_timeout_seconds: Seconds = Field(
        default=DEFAULT_OPTIONS.peer_timeout.total_seconds(),
        description="maximum duration of a peer call that sets no timeout",
    )
    deadline_margin_seconds: SecondsOrZero = Field(
        default=DEFAULT_OPTIONS.deadline_margin.total_seconds(),
        description="how much earlier than its caller's deadline a peer's deadline is",
    )
    lease_seconds: Seconds = Field(
        default=DEFAULT_OPTIONS.lease.total_seconds(),
        description="how long a replica owns a running task without renewing its lease",
    )
    renew_interval_seconds: Seconds = Field(
        default=DEFAULT_OPTIONS.renew_interval.total_seconds(),
        description="interval between renewals of a lease; at most half of lease_seconds",
    )
    dispatch_lease_seconds: Seconds = Field(
        default=5,
        description="how long a replica has to send committed messages before another replica sends them too",
    )
    sweep_interval_seconds: Seconds = Field(
        default=DEFAULT_OPTIONS.sweep_interval.total_seconds(),
        description="interval between sweeps for deadlines, expired leases and unsent messages",
    )
    sweep_batch: Count = Field(
        default=DEFAULT_OPTIONS.sweep_batch,
        description="maximum tasks that one sweep acquires",
    )
    settle_time_seconds: SecondsOrZero = Field(
        default=DEFAULT_OPTIONS.settle_time.total_seconds(),
        description="grace period after a start or an outage: queued responses are recorded "
        "before deadlines are enforced",
    )
    response_prefetch: Count = Field(
        default=DEFAULT_OPTIONS.response_prefetch,
        description="maximum unacked responses that one replica prefetches from the broker",
    )
    checkpoint_retry_time_seconds: Seconds = Field(
        default=DEFAULT_OPTIONS.checkpoint_retry_time.total_seconds(),
        description="how long a failing first checkpoint is retried before on_checkpoint_failure applies",
    )
    on_checkpoint_failure: OnCheckpointFailure = Field(
        default=DEFAULT_OPTIONS.on_checkpoint_failure,
        description="keep_in_memory: continue the task without the database; wait: retry until "
        "the database is available",
    )
    reply_retry_time_seconds: Seconds = Field(
        default=DEFAULT_OPTIONS.reply_retry_time.total_seconds(),
        description="how long a reply is retried if its address does not exist",
    )
    startup_timeout_seconds: Seconds = Field(
        default=DEFAULT_OPTIONS.startup_timeout.total_seconds(),
        description="how long to wait for the broker and the database at startup",
    )
    drain_timeout_seconds: Seconds = Field(
        default=DEFAULT_OPTIONS.drain_timeout.total_seconds(),
        description="how long running segments may continue at shutdown",
    )
    release_timeout_seconds: Seconds = Field(
        default=DEFAULT_OPTIONS.release_timeout.total_seconds(),
        description="how long releasing the remaining tasks may take after the drain",
    )
    ack_policy: AckPolicy = Field(
        default=DEFAULT_OPTIONS.ack_policy,
        description="at_checkpoint: ack a request when its first segment has ended; on_receipt: "
        "when its row is written",
    )
    begin_at_delivery: Count = Field(
        default=DEFAULT_OPTIONS.begin_at_delivery,
        description="from this delivery of a request on, its row is written before it runs; less than delivery_limit",
    )
    tombstone_ttl_seconds: Seconds = Field(
        default=86_400,
        description="how long an ended task is remembered, to recognize late duplicates of its request",
    )
    incompatible_state_limit_seconds: Seconds = Field(
        default=3600,
        description="how long a task is offered to replicas that cannot read its state before it is parked",
    )
    incompatible_pause_seconds: Seconds = Field(
        default=DEFAULT_OPTIONS.incompatible_pause.total_seconds(),
        description="delay before a task whose state could not be read is offered again",
    )
    checkpoint_ttl_seconds: Seconds = Field(
        default=2_592_000,
        description="how long a failed or cancelled operation and its checkpoints are kept for a "
        "resume (default: 30 days)",
    )
    checkpoint_history: Count = Field(
        default=5,
        description="number of checkpoints to keep for each operation; a resume uses the last one",
    )
    checkpoint_archive: bool = Field(
        default=False,
        description="archive the checkpoints of a completed operation instead of deleting them",
    )
    checkpoint_cache_url: str | None = Field(
        default=None,
        description="redis:// URL for copies of the last checkpoints, for faster restores; unset: no copies",
    )
    checkpoint_cache_ttl_seconds: Seconds = Field(
        default=604_800,
        description="how long copies of checkpoints are kept (default: 7 days)",
    )
    memory_url: str | None = Field(
        default=None,
        description="redis:// URL for working memories (ctx.memory); unset: kept in the process "
        "and in each checkpoint",
    )
    memory_snapshot_url: str | None = Field(
        default=None,
        description="redis:// URL for snapshots of working memories, preferably another server; unset: memory_url",
    )
    memory_ttl_seconds: Seconds = Field(
        default=86_400,
        description="how long a working memory stays in Redis after the last write of a key or "
        "the start of the segment (default: 24 hours)",
    )
    memory_paused_ttl_seconds: Seconds = Field(
        default=1_209_600,
        description="how long a working memory stays in Redis while its task is paused; also for "
        "its snapshot (default: 14 days)",
    )
    memory_max_bytes: Bytes = Field(
        default=DEFAULT_OPTIONS.memory_max_bytes,
        description="maximum bytes of one task's working memory; each checkpoint writes all of it if it has changed",
    )
    memory_keep: bool = Field(
        default=DEFAULT_OPTIONS.memory_keep,
        description="keep the working memory of a completed task in Redis until it expires",
    )
    isolated_stall_seconds: Seconds = Field(
        default=DEFAULT_OPTIONS.isolated_stall.total_seconds(),
        description="how long a task in its own process may block the event loop before the process is killed",
    )
    on_lost_owner: OnLostOwner = Field(
        default=DEFAULT_OPTIONS.on_lost_owner,
        description="take_over: if a replica dies, another one continues its operations; fail: they "
        "end as failed, and can be resumed manually",
    )
    secret_keys: tuple[str, ...] = Field(
        default=DEFAULT_OPTIONS.secret_keys,
        description="names whose values are masked in stored failures and exports, in addition to "
        "password, token etc.",
    )
    peer_logins: dict[str, str | tuple[str, ...]] = Field(
        default={},
        description="broker login or logins required for messages of each sender, by sender name "
        "(RabbitMQ verifies logins); senders not listed may use any",
    )
    operator_logins: tuple[str, ...] = Field(
        default=DEFAULT_OPTIONS.operator_logins,
        description="broker logins that may cancel and resume any task of this agent by message",
    )
    app_version: str | None = Field(
        default=DEFAULT_OPTIONS.app_version,
        description="version of the agent's code, stored with each checkpoint; unset: none",
    )

    @field_validator("name")
    @classmethod
    def _check_name(cls, value: str) -> str:
        return agent_name(value)

    @field_validator("entrypoint")
    @classmethod
    def _check_entrypoint(cls, value: str) -> str:
        if not _ENTRYPOINT.fullmatch(value):
            fix = "write module:attribute, such as my_agents.travel:travel"
            raise ConfigurationError("agent.entrypoint", f"{value!r} is not an entrypoint", fix)
        return value

    @field_validator("session_db_url")
    @classmethod
    def _check_session_db_url(cls, value: str) -> str:
        return urls.database_url(value, "agent.session_db_url")

    @field_validator("checkpoint_cache_url", "memory_url", "memory_snapshot_url")
    @classmethod
    def _check_redis_url(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None:
            extras.REDIS.require(f"agent.{info.field_name}")
        return value

    @model_validator(mode="after")
    def _check_combinations(self) -> AgentSettings:
        if self.stateless_checkpointing and self.session_service != "sql":
            problem = "paused tasks would have no database"
            raise ConfigurationError("agent.stateless_checkpointing", problem, "add session_service: sql")
        if self.memory_url is not None and not self.stateless_checkpointing:
            problem = (
                "without stateless_checkpointing, working memories stay in the process, and Redis would not be used"
            )
            fix = "add stateless_checkpointing: true and session_service: sql, or remove memory_url"
            raise ConfigurationError("agent.memory_url", problem, fix)
        if self.memory_snapshot_url is not None and self.memory_url is None:
            problem = "there would be no working memory in Redis to snapshot"
            raise ConfigurationError("agent.memory_snapshot_url", problem, "add memory_url: redis://…")
        if self.checkpoint_cache_url is not None and not self.stateless_checkpointing:
            problem = "without stateless_checkpointing there are no checkpoints in a database to copy"
            fix = "add stateless_checkpointing: true and session_service: sql, or remove checkpoint_cache_url"
            raise ConfigurationError("agent.checkpoint_cache_url", problem, fix)
        if "checkpoint_ttl_seconds" in self.model_fields_set and (
            self.checkpoint_ttl_seconds < self.tombstone_ttl_seconds
        ):
            problem = (
                f"is below tombstone_ttl_seconds, which keeps an ended task {self.tombstone_ttl_seconds:g} s anyway"
            )
            fix = f"use at least {self.tombstone_ttl_seconds:g}, or lower tombstone_ttl_seconds"
            raise ConfigurationError("agent.checkpoint_ttl_seconds", problem, fix)
        if self.ack_policy is AckPolicy.ON_RECEIPT and not self.stateless_checkpointing:
            problem = "on_receipt without stateless_checkpointing would lose requests when the process dies"
            raise ConfigurationError("agent.ack_policy", problem, "add stateless_checkpointing: true")
        if self.renew_interval_seconds * 2 > self.lease_seconds:
            problem = f"{self.renew_interval_seconds:g} s is too long for a lease of {self.lease_seconds:g} s"
            fix = f"use at most {self.lease_seconds / 2:g}, half of lease_seconds"
            raise ConfigurationError("agent.renew_interval_seconds", problem, fix)
        if self.session_service == "sql":
            urls.require_driver(self.session_db_url, "agent.session_db_url")
        return self

    def options(self) -> Options:
        """Return the limits and durations of this agent."""
        return Options(**{field.name: self._option_value(field.name) for field in fields(Options)})

    def _option_value(self, name: str) -> Any:
        if isinstance(getattr(DEFAULT_OPTIONS, name), timedelta):
            return timedelta(seconds=getattr(self, f"{name}_seconds"))
        return getattr(self, name)

    def timings(self) -> Timings:
        """The durations for this agent's store."""
        return Timings(
            dispatch_lease=timedelta(seconds=self.dispatch_lease_seconds),
            tombstone_ttl=timedelta(seconds=self.tombstone_ttl_seconds),
            incompatible_limit=timedelta(seconds=self.incompatible_state_limit_seconds),
            checkpoint_ttl=timedelta(seconds=self.checkpoint_ttl_seconds),
            checkpoint_history=self.checkpoint_history,
            checkpoint_archive=self.checkpoint_archive,
        )
