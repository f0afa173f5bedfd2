"""The section `agent`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from datetime import timedelta
from typing import Any, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from meshpoint import extras
from meshpoint.errors import ConfigurationError
from meshpoint.model import encryption_keys as encryption
from meshpoint.model.cards import check_patterns
from meshpoint.model.encryption_keys import EncryptionKey, Keys
from meshpoint.model.messages import MAX_SHARDS, validate_agent_name
from meshpoint.model.options import (
    AckPolicy,
    OnCheckpointFailure,
    OnLostOwner,
    Options,
    StoreTimings,
)
from meshpoint.settings import database_key, urls
from meshpoint.settings.mesh import (
    EMBEDDED_URL,
    Bytes,
    Count,
    MeshSettings,
    Seconds,
    SecondsOrZero,
    Section,
)

_ENTRYPOINT = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_DEFAULTS, _DEFAULT_TIMINGS = Options(), StoreTimings()
_DEFAULT_POOL_SIZE = 5


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """A database, and how to use it as a checkpoint store.

    `url` is validated already: use `AgentSettings.store_settings`, or `at` for any other URL.
    """

    url: str
    timings: StoreTimings
    pool_size: int
    max_join_bytes: int
    keys: tuple[EncryptionKey, ...] = ()

    @classmethod
    def at(
        cls,
        url: str,
        *,
        key: str,
        timings: StoreTimings | None = None,
        keys: tuple[EncryptionKey, ...] = (),
    ) -> StoreSettings:
        """Return the settings of the store at `url`, with defaults for everything else.

        Args:
            url: `postgresql://user@host/name`, or `sqlite:///file`.
            key: Name of the option or argument that contains `url`, for errors.
            timings: Defaults to the timings of an agent's settings.
            keys: Encrypt and decrypt what is stored.

        Raises:
            ConfigurationError: `url` cannot be used, or its driver is not installed.
        """
        url = urls.database_url(url, key)
        urls.require_driver(url, key)
        return cls(
            url, timings or StoreTimings(), _DEFAULT_POOL_SIZE, _DEFAULTS.max_join_bytes, keys
        )


def stores_of_agents(agents: Iterable[AgentSettings]) -> list[StoreSettings]:
    """The store of each database of `agents`, for commands.

    A command reads what each agent writes, and writes what that agent can read.
    """
    stores: dict[str, StoreSettings] = {}
    for agent in agents:
        if agent.has_database:
            store = agent.store_settings()
            keys = tuple(replace(key, agent=agent.name) for key in store.keys)
            known = stores.get(store.url, replace(store, keys=()))
            stores[store.url] = replace(known, keys=(*known.keys, *keys))
    return list(stores.values())


class _Identity(Section):
    name: str = Field(
        description="name in the mesh: letters, digits, '_' and '-', at most 63 characters",
    )
    entrypoint: str | tuple[str, ...] = Field(
        description="the agent, or an agent of another framework, as module:attribute; the module "
        "must be importable. A list serves several versions of one agent: the first takes new "
        "tasks",
    )

    @field_validator("name")
    @classmethod
    def _check_name(cls, value: str) -> str:
        return validate_agent_name(value)

    @property
    def entrypoints(self) -> tuple[str, ...]:
        """The versions of the agent that this process serves. The first takes new tasks."""
        return (self.entrypoint,) if isinstance(self.entrypoint, str) else self.entrypoint

    @field_validator("entrypoint")
    @classmethod
    def _check_entrypoint(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        names = (value,) if isinstance(value, str) else value
        for name in names or ("",):
            if not _ENTRYPOINT.fullmatch(name):
                fix = "write module:attribute, such as my_agents.travel:travel"
                raise ConfigurationError("agent.entrypoint", f"{name!r} is not an entrypoint", fix)
        return value


class AgentOptions(Section):
    """How an agent is served. Defaults of keys that are also in `Options` are defined there."""

    database_url: str | None = Field(
        default=None,
        repr=False,
        description="short for stateless_checkpointing: true, session_service: sql and "
        "session_db_url: this URL; in files, the default is the value of the mesh",
    )
    stateless_checkpointing: bool = Field(
        default=_DEFAULTS.stateless_checkpointing,
        description="store paused tasks in the database, so that any replica can resume them; "
        "needs session_service: sql; may be switched at any time: only new tasks follow it",
    )
    session_service: Literal["memory", "sql"] = Field(
        default="memory",
        description="where tasks can be stored: memory or sql; the same for all replicas of one "
        "agent, which serve all tasks in the database",
    )
    session_db_url: str = Field(
        default=EMBEDDED_URL,
        repr=False,
        description="postgresql:// URL in production, sqlite:/// on one host",
    )
    db_pool_size: Count = Field(
        default=_DEFAULT_POOL_SIZE,
        description="database connections, in addition to the connections of the fast path",
    )
    max_concurrency: Count = Field(
        default=_DEFAULTS.max_concurrency,
        description="maximum segments that run concurrently in one replica; "
        "paused tasks do not count",
    )
    max_in_memory: Count = Field(
        default=_DEFAULTS.max_in_memory,
        description="maximum paused tasks that one replica keeps in memory",
    )
    max_call_depth: Count = Field(
        default=_DEFAULTS.max_call_depth,
        description="maximum length of a chain of agents that call each other",
    )
    max_fan_out: Count = Field(
        default=_DEFAULTS.max_fan_out, description="maximum calls in one pause"
    )
    request_shards: int = Field(
        default=_DEFAULTS.request_shards,
        ge=1,
        le=MAX_SHARDS,
        description="number of request queues, 1 to 64; each sender always uses the same one, "
        "so that a flood from one sender does not starve the others",
    )
    max_attempts: Count = Field(
        default=_DEFAULTS.max_attempts,
        description="maximum runs of one segment that kill their process; then the task fails",
    )
    max_message_bytes: Bytes = Field(
        default=_DEFAULTS.max_message_bytes,
        description="maximum bytes of a message body that this agent sends or accepts; in files, "
        "the default is the value of the mesh",
    )
    max_join_bytes: Bytes = Field(
        default=_DEFAULTS.max_join_bytes,
        description="maximum bytes of all outcomes of one pause, which are in memory at once; a "
        "task with more fails",
    )
    peer_timeout_seconds: Seconds = Field(
        default=_DEFAULTS.peer_timeout.total_seconds(),
        description="how long a peer call without timeouts of its own waits for a sign of life of "
        "the peer; a living peer sends one in time by itself",
    )
    deadline_margin_seconds: SecondsOrZero = Field(
        default=_DEFAULTS.deadline_margin.total_seconds(),
        description="how much earlier a peer's deadline is than its caller's",
    )
    lease_seconds: Seconds = Field(
        default=_DEFAULTS.lease.total_seconds(),
        description="how long a replica owns a running task without renewing its lease",
    )
    renew_interval_seconds: Seconds = Field(
        default=_DEFAULTS.renew_interval.total_seconds(),
        description="interval between renewals of a lease; at most half of lease_seconds",
    )
    dispatch_lease_seconds: Seconds = Field(
        default=_DEFAULT_TIMINGS.dispatch_lease.total_seconds(),
        description="how long a replica has to send committed messages "
        "before another replica sends them too",
    )
    sweep_interval_seconds: Seconds = Field(
        default=_DEFAULTS.sweep_interval.total_seconds(),
        description="interval between sweeps for deadlines, expired leases and unsent messages",
    )
    sweep_batch: Count = Field(
        default=_DEFAULTS.sweep_batch,
        description="maximum tasks that one sweep acquires",
    )
    settle_time_seconds: SecondsOrZero = Field(
        default=_DEFAULTS.settle_time.total_seconds(),
        description="grace period after a start or an outage: queued responses are recorded "
        "before deadlines are enforced",
    )
    response_prefetch: Count = Field(
        default=_DEFAULTS.response_prefetch,
        description="maximum unacked responses that one replica prefetches from the broker",
    )
    checkpoint_retry_time_seconds: Seconds = Field(
        default=_DEFAULTS.checkpoint_retry_time.total_seconds(),
        description="how long a failing first checkpoint is retried "
        "before on_checkpoint_failure applies",
    )
    on_checkpoint_failure: OnCheckpointFailure = Field(
        default=_DEFAULTS.on_checkpoint_failure,
        description="keep_in_memory: continue the task without the database; wait: retry until "
        "the database is available",
    )
    reply_retry_time_seconds: Seconds = Field(
        default=_DEFAULTS.reply_retry_time.total_seconds(),
        description="how long a reply is retried if its address does not exist",
    )
    undeliverable_after_seconds: SecondsOrZero = Field(
        default=_DEFAULTS.undeliverable_after.total_seconds(),
        description="how long a call waits for its peer's first replica, at most its timeout; "
        "counted anew after an outage of the broker or of all replicas of the caller; "
        "0: it fails at once",
    )
    startup_timeout_seconds: Seconds = Field(
        default=_DEFAULTS.startup_timeout.total_seconds(),
        description="how long to wait for the broker and the database at startup",
    )
    drain_timeout_seconds: Seconds = Field(
        default=_DEFAULTS.drain_timeout.total_seconds(),
        description="how long running segments may continue at shutdown",
    )
    release_timeout_seconds: Seconds = Field(
        default=_DEFAULTS.release_timeout.total_seconds(),
        description="how long releasing the remaining tasks may take after the drain",
    )
    ack_policy: AckPolicy = Field(
        default=_DEFAULTS.ack_policy,
        description="at_checkpoint: ack a request when its first segment has ended; on_receipt: "
        "when its row is written; without a row, requests stay unacked until their task has ended",
    )
    begin_at_delivery: Count = Field(
        default=_DEFAULTS.begin_at_delivery,
        description="number of the delivery from which a request's row is written before it runs; "
        "less than delivery_limit",
    )
    tombstone_ttl_seconds: Seconds = Field(
        default=_DEFAULT_TIMINGS.tombstone_ttl.total_seconds(),
        description="how long an ended task is remembered, "
        "to recognize late duplicates of its request",
    )
    parked_limit_seconds: SecondsOrZero = Field(
        default=_DEFAULT_TIMINGS.parked_limit.total_seconds(),
        description="how long a task that no version of the code can continue is parked before "
        "it fails (default: 30 days); 0: it fails at once",
    )
    incompatible_pause_seconds: Seconds = Field(
        default=_DEFAULTS.incompatible_pause.total_seconds(),
        description="delay before a task whose working memory is unavailable is offered again",
    )
    checkpoint_ttl_seconds: Seconds = Field(
        default=_DEFAULT_TIMINGS.checkpoint_ttl.total_seconds(),
        description="how long a failed or cancelled operation and its checkpoints are kept for a "
        "resume (default: 30 days)",
    )
    checkpoint_history: Count = Field(
        default=_DEFAULT_TIMINGS.checkpoint_history,
        description="number of checkpoints to keep for each operation, besides the final "
        "checkpoint of each attempt; a resume uses the last one",
    )
    checkpoint_archive: bool = Field(
        default=_DEFAULT_TIMINGS.checkpoint_archive,
        description="archive the checkpoints of a completed operation instead of deleting them",
    )
    keep_security_context: bool = Field(
        default=_DEFAULT_TIMINGS.keep_security_context,
        description="keep the security context of a failed or cancelled operation's last pause, "
        "so that a resume there has it; otherwise it is wiped",
    )
    history: bool = Field(
        default=_DEFAULT_TIMINGS.timeline,
        description="record each change of a task's state in the database: tasks show --timeline "
        "prints the changes; needs session_service: sql",
    )
    history_retention_seconds: Seconds = Field(
        default=_DEFAULT_TIMINGS.timeline_retention.total_seconds(),
        description="how long entries of timelines are kept, also after the end of their task "
        "(default: 7 days)",
    )
    encryption_keys: Keys = Field(
        default=(),
        description="keys that encrypt what the agent stores in the database and in Redis: Base64 "
        "of 32 bytes, or file:PATH with one key per line; the first one encrypts, all decrypt; "
        "`clear` before the first one stops encrypting; in files, the default is the value of the "
        "mesh",
    )
    encryption_tenant: str | None = Field(
        default=None,
        min_length=1,
        max_length=200,
        description="derives other keys from encryption_keys, so that what this tenant stores "
        "does not open for others",
    )
    checkpoint_cache_url: str | None = Field(
        default=None,
        description="redis:// URL for copies of the last checkpoints, for faster restores; "
        "unset: no copies",
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
        description="redis:// URL for snapshots of working memories, preferably another server; "
        "unset: memory_url",
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
        default=_DEFAULTS.memory_max_bytes,
        description="maximum bytes of one task's working memory; "
        "each checkpoint writes all of it if it has changed",
    )
    memory_keep: bool = Field(
        default=_DEFAULTS.memory_keep,
        description="keep the working memory of a completed task in Redis until it expires",
    )
    isolated_stall_seconds: Seconds = Field(
        default=_DEFAULTS.isolated_stall.total_seconds(),
        description="how long a task in its own process may block the event loop "
        "before the process is killed",
    )
    on_lost_owner: OnLostOwner = Field(
        default=_DEFAULTS.on_lost_owner,
        description="rescue: if a replica dies, another one continues its operations; fail: they "
        "end as failed, and can be resumed manually",
    )
    secret_keys: tuple[str, ...] = Field(
        default=_DEFAULTS.secret_keys,
        description="names whose values are masked in stored failures and exports, in addition to "
        "password, token etc.",
    )
    peers: tuple[str, ...] = Field(
        default=_DEFAULTS.peers,
        description="names and patterns, such as hotel-*, of the peers that the agent may "
        "discover; they narrow the patterns in its code. They are the patterns of offer_peers "
        "without patterns, and of an agent of another framework whose code gives no patterns",
    )
    denied_peers: tuple[str, ...] = Field(
        default=_DEFAULTS.denied_peers,
        description="names and patterns of peers that the agent must not discover",
    )
    peer_refresh_seconds: Seconds = Field(
        default=_DEFAULTS.peer_refresh.total_seconds(),
        description="interval at which a replica asks for the cards of the peers it discovers",
    )
    peer_logins: dict[str, str | tuple[str, ...]] = Field(
        default={},
        description="broker login or logins required for messages of each sender, by sender name "
        "(RabbitMQ verifies logins); senders not listed may use any",
    )
    operator_logins: tuple[str, ...] = Field(
        default=_DEFAULTS.operator_logins,
        description="broker logins that may cancel and resume any task of this agent by message",
    )
    app_version: str | None = Field(
        default=_DEFAULTS.app_version,
        description="version of the agent's code, stored with each checkpoint; each version tries "
        "a parked task once, and so does a changed module; unset: a digest of the agent's module",
    )

    @model_validator(mode="before")
    @classmethod
    def _expand_database_url(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        return database_key.expand_section(values, lambda key: f"agent.{key}")

    @field_validator("database_url")
    @classmethod
    def _check_database_url(cls, value: str | None) -> str | None:
        return None if value is None else urls.database_url(value, "agent.database_url")

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
    def _check_combinations(self) -> Self:
        if self.stateless_checkpointing and not self.has_database:
            problem = "paused tasks would have no database"
            raise ConfigurationError(
                "agent.stateless_checkpointing", problem, "add session_service: sql"
            )
        if self.memory_url is not None and not self.has_database:
            problem = (
                "without session_service: sql, working memories stay in the process, "
                "and Redis would not be used"
            )
            fix = (
                "add stateless_checkpointing: true and session_service: sql, or remove memory_url"
            )
            raise ConfigurationError("agent.memory_url", problem, fix)
        if self.memory_snapshot_url is not None and self.memory_url is None:
            problem = "there would be no working memory in Redis to snapshot"
            raise ConfigurationError(
                "agent.memory_snapshot_url", problem, "add memory_url: redis://…"
            )
        if self.encryption_keys and self.memory_url is not None:
            self._check_memory_is_private()
        if self.checkpoint_cache_url is not None and not self.has_database:
            problem = "without session_service: sql there are no checkpoints in a database to copy"
            fix = (
                "add stateless_checkpointing: true and session_service: sql, "
                "or remove checkpoint_cache_url"
            )
            raise ConfigurationError("agent.checkpoint_cache_url", problem, fix)
        if self.history and not self.has_database:
            raise ConfigurationError(
                "agent.history",
                "without session_service: sql there is no database to record changes in",
                "add session_service: sql, or remove history",
            )
        if "checkpoint_ttl_seconds" in self.model_fields_set and (
            self.checkpoint_ttl_seconds < self.tombstone_ttl_seconds
        ):
            problem = (
                "is below tombstone_ttl_seconds, "
                f"which keeps an ended task {self.tombstone_ttl_seconds:g} s anyway"
            )
            fix = f"use at least {self.tombstone_ttl_seconds:g}, or lower tombstone_ttl_seconds"
            raise ConfigurationError("agent.checkpoint_ttl_seconds", problem, fix)
        if self.ack_policy == "on_receipt" and not self.has_database:
            problem = (
                "on_receipt without session_service: sql would lose requests when the process dies"
            )
            raise ConfigurationError(
                "agent.ack_policy",
                problem,
                "add stateless_checkpointing: true and session_service: sql",
            )
        if self.renew_interval_seconds * 2 > self.lease_seconds:
            problem = (
                f"{self.renew_interval_seconds:g} s is too long "
                f"for a lease of {self.lease_seconds:g} s"
            )
            fix = f"use at most {self.lease_seconds / 2:g}, half of lease_seconds"
            raise ConfigurationError("agent.renew_interval_seconds", problem, fix)
        if self.has_database:
            urls.require_driver(self.session_db_url, "agent.session_db_url")
        return self

    def _check_memory_is_private(self) -> None:
        # Commands of a working memory need plain values, so only the transport can protect them.
        assert self.memory_url is not None
        if not self.memory_url.startswith("rediss://"):
            problem = (
                "with encryption_keys, working memories in Redis need TLS: their values stay "
                "in the clear there"
            )
            fix = "use rediss://, or remove memory_url: they are then encrypted in the database"
            raise ConfigurationError("agent.memory_url", problem, fix)

    @field_validator("encryption_keys", mode="before")
    @classmethod
    def _read_keys(cls, value: Any) -> tuple[str, ...]:
        return encryption.read_keys(value, "agent.encryption_keys")

    @field_validator("peers", "denied_peers")
    @classmethod
    def _check_peers(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        return check_patterns(value, f"agent.{info.field_name}")

    @property
    def has_database(self) -> bool:
        """Whether the agent serves tasks in a database, even without `stateless_checkpointing`."""
        return self.session_service == "sql"

    def check_mesh(self, mesh: MeshSettings, section: str) -> None:
        """Check that the options of `section` can work in `mesh`.

        Raises:
            ConfigurationError: They cannot.
        """
        if self.max_message_bytes > mesh.max_message_bytes:
            problem = f"{self.max_message_bytes} is above mesh.max_message_bytes"
            fix = f"use at most {mesh.max_message_bytes}, or raise mesh.max_message_bytes"
            raise ConfigurationError(f"{section}.max_message_bytes", problem, fix)
        if self.begin_at_delivery >= mesh.delivery_limit:
            problem = f"{self.begin_at_delivery} is not below mesh.delivery_limit"
            fix = f"use at most {mesh.delivery_limit - 1}, or raise mesh.delivery_limit"
            raise ConfigurationError(f"{section}.begin_at_delivery", problem, fix)
        for key in ("peer_logins", "operator_logins"):
            if getattr(self, key) and not mesh.verifies_logins:
                problem = "only RabbitMQ verifies logins, but mesh.broker_url is another broker"
                fix = f"remove {key}, or use amqp://"
                raise ConfigurationError(f"{section}.{key}", problem, fix)

    def options(self) -> Options:
        """Return the limits and durations of this agent."""
        return Options(**{field.name: self._option_value(field.name) for field in fields(Options)})

    def _option_value(self, name: str) -> Any:
        if isinstance(getattr(_DEFAULTS, name), timedelta):
            return timedelta(seconds=getattr(self, f"{name}_seconds"))
        return getattr(self, name)

    def store_settings(self) -> StoreSettings:
        """Return what this agent's store needs."""
        timings = StoreTimings(
            dispatch_lease=timedelta(seconds=self.dispatch_lease_seconds),
            tombstone_ttl=timedelta(seconds=self.tombstone_ttl_seconds),
            parked_limit=timedelta(seconds=self.parked_limit_seconds),
            checkpoint_ttl=timedelta(seconds=self.checkpoint_ttl_seconds),
            checkpoint_history=self.checkpoint_history,
            checkpoint_archive=self.checkpoint_archive,
            keep_security_context=self.keep_security_context,
            timeline=self.history,
            timeline_retention=timedelta(seconds=self.history_retention_seconds),
        )
        return StoreSettings(
            self.session_db_url, timings, self.db_pool_size, self.max_join_bytes, self.key_ring
        )

    @property
    def key_ring(self) -> tuple[EncryptionKey, ...]:
        """The keys that encrypt what the agent stores."""
        return encryption.to_ring(self.encryption_keys, self.encryption_tenant)


class AgentSettings(AgentOptions, _Identity):
    """Settings of one agent: where to import it from, and how to serve it."""
