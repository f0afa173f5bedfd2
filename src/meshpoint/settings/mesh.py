"""The section `mesh`, and the types that all sections share."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Annotated, Any
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field, field_validator

from meshpoint.errors import ConfigurationError
from meshpoint.model import encryption_keys as encryption
from meshpoint.model.encryption_keys import EncryptionKey, Keys
from meshpoint.model.options import Options
from meshpoint.settings import urls

_TEN_YEARS = 315_360_000

Seconds = Annotated[float, Field(gt=0, le=_TEN_YEARS, allow_inf_nan=False)]
SecondsOrZero = Annotated[float, Field(ge=0, le=_TEN_YEARS, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, le=1_000_000)]
Bytes = Annotated[int, Field(ge=1024, le=1024**4)]

EMBEDDED_URL = "sqlite:///meshpoint.db"

_NAMESPACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,62}")


class Section(BaseModel):
    """Base of all sections: frozen, rejects unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class MeshSettings(Section):
    """Settings shared by all agents of a mesh."""

    namespace: str = Field(
        default="meshpoint",
        description="prefix of all queues; agents in different namespaces never interact",
    )
    broker_url: str = Field(
        default=EMBEDDED_URL,
        description="amqp:// or amqps:// URL for RabbitMQ, postgresql:// for queues in a "
        "database, sqlite:/// on one host, memory:// for tests",
    )
    database_url: str | None = Field(
        default=None,
        repr=False,
        description="in files, the database_url of each agent that does not set the keys itself",
    )
    encryption_keys: Keys = Field(
        default=(),
        description="keys that encrypt the bodies of messages at the broker: Base64 of 32 bytes, "
        "or file:PATH with one key per line; the first one encrypts, all decrypt; `clear` before "
        "the first one stops encrypting; in files, the default of each agent's encryption_keys",
    )
    publish_timeout_seconds: Seconds = Field(
        default=10, description="how long the broker may take to confirm a message"
    )
    max_message_bytes: Bytes = Field(
        default=Options().max_message_bytes,
        description="maximum bytes of a message body that is sent or accepted",
    )
    delivery_limit: int = Field(
        default=20,
        ge=10,
        le=1000,
        description="maximum deliveries of one message before it is dead-lettered; at least 10",
    )
    max_queue_length: Count = Field(
        default=100_000,
        description="maximum messages in one queue; a full request queue rejects more, "
        "and senders retry later",
    )
    private_queue_ttl_seconds: Seconds = Field(
        default=3600, description="how long a replica's private queue is kept after its last use"
    )
    queue_lease_seconds: Seconds | None = Field(
        default=None,
        ge=1,
        description="how long a process may be stopped before other replicas get its unacked "
        "messages from a database (15 on PostgreSQL, 5 on SQLite); on RabbitMQ, set ?heartbeat= "
        "in the URL",
    )

    @field_validator("namespace")
    @classmethod
    def _check_namespace(cls, value: str) -> str:
        if not _NAMESPACE.fullmatch(value):
            fix = "use letters, digits, '_' and '-' (63 at most)"
            raise ConfigurationError("mesh.namespace", f"{value!r} is not a valid namespace", fix)
        return value

    @field_validator("broker_url")
    @classmethod
    def _check_broker_url(cls, value: str) -> str:
        urls.require_driver(value, "mesh.broker_url")
        return urls.broker_url(value, "mesh.broker_url")

    @field_validator("database_url")
    @classmethod
    def _check_database_url(cls, value: str | None) -> str | None:
        return None if value is None else urls.database_url(value, "mesh.database_url")

    @field_validator("encryption_keys", mode="before")
    @classmethod
    def _read_keys(cls, value: Any) -> tuple[str, ...]:
        return encryption.read_keys(value, "mesh.encryption_keys")

    @property
    def key_ring(self) -> tuple[EncryptionKey, ...]:
        """The keys that encrypt the bodies of messages."""
        return encryption.to_ring(self.encryption_keys)

    @property
    def verifies_logins(self) -> bool:
        """Whether the broker verifies the login (`user_id`) of each message."""
        return urlsplit(self.broker_url).scheme in {"amqp", "amqps"}

    @property
    def publish_timeout(self) -> timedelta:
        """How long the broker may take to confirm a message."""
        return timedelta(seconds=self.publish_timeout_seconds)

    @property
    def private_queue_ttl(self) -> timedelta:
        """How long a replica's private queue is kept after its last use."""
        return timedelta(seconds=self.private_queue_ttl_seconds)

    @property
    def queue_lease(self) -> timedelta | None:
        """How long a process may be stopped before others get its unacked messages."""
        seconds = self.queue_lease_seconds
        return None if seconds is None else timedelta(seconds=seconds)
