"""Identify the sender of a message and its rights.

"Who may do what" in `docs/how-to/secure.md` has the rules. The sender is the name in `app_id`.
RabbitMQ verifies the login in `user_id` but not `app_id`; `peer_logins` ties the two together. Any
login may use a name that is not listed there.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from meshpoint.errors import PoisonMessage
from meshpoint.model.ids import AgentName
from meshpoint.model.messages import Header, Message
from meshpoint.model.options import Options
from meshpoint.model.requesters import same_input, same_requester

_QUOTED = 100  # maximum characters quoted from a message


@dataclass(frozen=True, slots=True)
class Sender:
    """A sender whose login matches its name.

    `trusted` is `True` for a replica of the same agent and for an operator.
    """

    name: str | None
    trusted: bool = False

    def may_act_for(self, requester: str | None) -> bool:
        """Whether this sender may act on a task of `requester`; `None` if the row names none."""
        return self.trusted or same_requester(requester, self.name)


ITSELF = Sender(None, trusted=True)
"""The mesh itself."""


class Relation(Enum):
    """How a request relates to the existing task with its id."""

    SAME = auto()  # same requester, same input
    OTHER_INPUT = auto()  # same requester, different input
    STRANGER = auto()  # the task belongs to another requester


def relation(sender: Sender, digest: str | None, requester: str | None, known_digest: str | None) -> Relation:
    """Compare a request from `sender` with a task of `requester`, using their input digests."""
    if not sender.may_act_for(requester):
        return Relation.STRANGER
    return Relation.SAME if same_input(digest, known_digest) else Relation.OTHER_INPUT


def impostor(message: Message, options: Options) -> str | None:
    """Why the login must not use the sender's name, or `None` if it may."""
    listed = options.peer_logins.get(message.app_id)
    if listed is None:
        return None
    logins = (listed,) if isinstance(listed, str) else listed
    if message.user_id in logins:
        return None
    login = "no login" if message.user_id is None else f"the login {message.user_id!r}"
    return f"user_id: {message.app_id!r} sent this under {login}, which peer_logins does not list for it"


def sender_of(message: Message, agent: AgentName, options: Options) -> Sender:
    """The sender of a message to `agent`.

    Raises:
        PoisonMessage: `peer_logins` lists other logins for the name.
    """
    if (reason := impostor(message, options)) is not None:
        raise PoisonMessage(reason)
    return Sender(message.app_id or None, message.app_id == agent or is_operator(message, options))


def canceller_of(message: Message, agent: AgentName, options: Options, *, shared: bool) -> str | None:
    """The sender of a cancel; `None` may cancel every task.

    `shared` is `True` for a cancel from the agent's shared queue. A cancel from the agent itself
    on a replica's private queue was forwarded by another replica, which checked the sender.

    Raises:
        PoisonMessage: as for `sender_of`.
    """
    sender = sender_of(message, agent, options)
    if is_operator(message, options):
        return None
    if sender.name == agent and not shared:
        behalf = message.headers.get(Header.ON_BEHALF_OF)
        return None if behalf is None else str(behalf)
    return sender.name or ""


def is_operator(message: Message, options: Options) -> bool:
    """Whether the message was sent under a login in `operator_logins`."""
    return message.user_id is not None and message.user_id in options.operator_logins


def may_be_answered(message: Message, options: Options) -> bool:
    """Whether a reply to this request can only reach its own sender."""
    return impostor(message, options) is None and foreign_address(message) is None


def foreign_address(message: Message) -> str | None:
    """Why no reply is sent to the address in a request; `None` if it is allowed or missing."""
    if message.reply_to is None:
        return None
    name, dot, _ = message.reply_to.partition(".")
    if dot and name == message.app_id:
        return None
    return f"reply_to: {message.reply_to[:_QUOTED]!r} is not an address under {message.app_id[:_QUOTED]!r}"
