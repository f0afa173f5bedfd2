"""Settings of one agent with their defaults, read from YAML by `meshpoint.settings`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal, TypeAlias

AckPolicy: TypeAlias = Literal["at_checkpoint", "on_receipt"]
"""When to ack a request: at the end of its first segment, or once its row is written."""
OnCheckpointFailure: TypeAlias = Literal["keep_in_memory", "wait"]
"""What to do with a task whose first checkpoint certainly did not commit."""
OnLostOwner: TypeAlias = Literal["rescue", "fail"]
"""What to do with an operation whose replica died while running it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Limits and durations of one agent."""

    stateless_checkpointing: bool = False
    max_concurrency: int = 10  # segments running concurrently in one replica
    max_in_memory: int = 100  # paused tasks kept in memory by one replica
    max_call_depth: int = 10
    max_fan_out: int = 1000  # maximum calls of one pause
    request_shards: int = 1  # number of request queues, chosen by sender
    max_attempts: int = 5  # runs of one segment that may crash their process
    max_message_bytes: int = 10_000_000
    max_join_bytes: int = 2_000_000_000  # all outcomes of one pause; the task fails if exceeded
    # how long a call without timeouts of its own waits for a sign of life
    peer_timeout: timedelta = timedelta(minutes=10)
    # a peer's deadline is this much before its caller's
    deadline_margin: timedelta = timedelta(milliseconds=500)
    lease: timedelta = timedelta(seconds=15)
    renew_interval: timedelta = timedelta(seconds=5)
    sweep_interval: timedelta = timedelta(seconds=1)
    sweep_batch: int = 100
    # after a start or an outage, before deadlines are enforced
    settle_time: timedelta = timedelta(seconds=1)
    response_prefetch: int = 100
    # how long a first checkpoint is retried before the task stays in memory
    checkpoint_retry_time: timedelta = timedelta(seconds=5)
    reply_retry_time: timedelta = timedelta(seconds=30)  # retry time of an unroutable reply
    # how long a call waits for its peer's queue to be declared
    undeliverable_after: timedelta = timedelta(seconds=30)
    # before a task whose working memory is unavailable is offered again
    incompatible_pause: timedelta = timedelta(seconds=5)
    drain_timeout: timedelta = timedelta(seconds=30)
    release_timeout: timedelta = timedelta(seconds=5)  # after drain_timeout, for releasing tasks
    startup_timeout: timedelta = timedelta(seconds=30)
    begin_at_delivery: int = 3  # delivery count from which a task's row is written before it runs
    ack_policy: AckPolicy = "at_checkpoint"
    on_checkpoint_failure: OnCheckpointFailure = "keep_in_memory"
    # how long an isolated task may block its event loop
    isolated_stall: timedelta = timedelta(minutes=5)
    on_lost_owner: OnLostOwner = "rescue"
    # keys whose values are masked in stored failures, in addition to the built-in ones
    secret_keys: tuple[str, ...] = ()
    # names and patterns of the peers that the agent may discover, and of those it may not
    peers: tuple[str, ...] = ()
    denied_peers: tuple[str, ...] = ()
    peer_refresh: timedelta = timedelta(minutes=1)  # interval of questions for their cards
    memory_max_bytes: int = 64 * 1024 * 1024  # limit of one task's working memory
    memory_keep: bool = False  # keep it after completion until its time to live ends
    app_version: str | None = None
    parked_limit: timedelta = timedelta(days=30)  # zero: fail instead of parking
    # broker logins allowed for each sender name
    peer_logins: Mapping[str, str | tuple[str, ...]] = field(default_factory=dict)
    operator_logins: tuple[str, ...] = ()  # broker logins that may cancel and resume any task


@dataclass(slots=True)
class StoreTimings:
    """Durations and limits that a store applies."""

    dispatch_lease: timedelta = timedelta(seconds=5)
    tombstone_ttl: timedelta = timedelta(hours=24)
    parked_limit: timedelta = timedelta(days=30)  # after which a parked task is failed
    checkpoint_ttl: timedelta = timedelta(days=30)  # for operations that failed or were cancelled
    checkpoint_history: int = 5  # number of most recent checkpoints kept per operation
    checkpoint_archive: bool = False  # on success, move checkpoints instead of deleting them
    keep_security_context: bool = False  # in the last pause of an operation that did not complete
    timeline: bool = False  # record the changes of each task
    timeline_retention: timedelta = timedelta(days=7)
