"""Identify the sender of a message and its rights.

"Who may do what" in `docs/how-to/secure.md` has the rules. The sender is the name in `app_id`.
RabbitMQ verifies the login in `user_id` but not `app_id`; `peer_logins` ties the two together. Any
login may use a name that is not listed there.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto

from meshpoint.errors import PoisonMessage
from meshpoint.model.ids import AgentName, TaskId
from meshpoint.model.messages import Header, Message, is_valid_name
from meshpoint.model.options import Options
from meshpoint.model.tasks import same_input, same_requester

_MAX_QUOTED_LENGTH = 100  # maximum characters quoted from a message


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


class Relation(Enum):
    """How a request relates to the existing task with its id."""

    SAME_REQUEST = auto()  # same requester, same input
    OTHER_INPUT = auto()  # same requester, different input
    OTHER_REQUESTER = auto()  # the task belongs to another requester


def compare_request(
    sender: Sender, digest: str | None, requester: str | None, existing_digest: str | None
) -> Relation:
    """Compare a request from `sender` with a task of `requester`, using their input digests."""
    if not sender.may_act_for(requester):
        return Relation.OTHER_REQUESTER
    return Relation.SAME_REQUEST if same_input(digest, existing_digest) else Relation.OTHER_INPUT


def belongs_to_another(task_id: TaskId) -> str:
    """Why a message about a task of another requester is refused."""
    return f"task {task_id} belongs to another requester"


def impersonation_error(message: Message, options: Options) -> str | None:
    """Why the login must not use the sender's name, or `None` if it may."""
    configured = options.peer_logins.get(message.app_id)
    if configured is None:
        return None
    logins = (configured,) if isinstance(configured, str) else configured
    if message.user_id in logins:
        return None
    login = "no login" if message.user_id is None else f"the login {message.user_id!r}"
    return (
        f"user_id: {message.app_id!r} sent this under {login}, "
        "which peer_logins does not list for it"
    )


def identify_sender(message: Message, agent: AgentName, options: Options) -> Sender:
    """The sender of a message to `agent`.

    Raises:
        PoisonMessage: `peer_logins` lists other logins for the name.
    """
    if (reason := impersonation_error(message, options)) is not None:
        raise PoisonMessage(reason)
    trusted = message.app_id == agent or message.user_id in options.operator_logins
    return Sender(message.app_id or None, trusted)


def identify_canceller(
    message: Message, agent: AgentName, options: Options, *, shared: bool
) -> str | None:
    """The sender of a cancel; `None` may cancel every task.

    `shared` is `True` for a cancel from the agent's shared queue. A cancel from the agent itself
    on a replica's private queue was forwarded by another replica, which checked the sender.

    Raises:
        PoisonMessage: as for `identify_sender`.
    """
    sender = identify_sender(message, agent, options)
    if message.user_id in options.operator_logins:
        return None
    if sender.name == agent and not shared:
        on_behalf_of = message.headers.get(Header.ON_BEHALF_OF)
        return None if on_behalf_of is None else str(on_behalf_of)
    return sender.name or ""


def identify_signaller(
    message: Message, agent: AgentName, options: Options, *, shared: bool
) -> str | None:
    """The sender of a signal or a read; `None` if the sender may use every task.

    `shared` is as for `identify_canceller`.

    Raises:
        PoisonMessage: as for `identify_sender`, or the sender has no valid name, or the address is
            not the sender's.
    """
    if message.app_id == agent and not shared:  # another replica has checked it
        return identify_canceller(message, agent, options, shared=shared)
    if not (message.app_id and is_valid_name(message.app_id)):
        raise PoisonMessage("app_id: must be printable, and 1 to 248 bytes long")
    if (address_error := reply_address_error(message)) is not None:
        raise PoisonMessage(address_error)
    return identify_canceller(message, agent, options, shared=shared)


def identify_attacher(
    message: Message, agent: AgentName, options: Options, *, shared: bool
) -> str:
    """The sender of an attach, which may only attach to its own tasks.

    `shared` is as for `identify_canceller`.

    Raises:
        PoisonMessage: as for `identify_sender`, or the address is not the sender's.
    """
    sender = identify_sender(message, agent, options)
    on_behalf_of = message.headers.get(Header.ON_BEHALF_OF)
    if sender.name == agent and not shared and on_behalf_of is not None:
        return str(on_behalf_of)
    if (address_error := reply_address_error(message)) is not None:
        raise PoisonMessage(address_error)
    return sender.name or ""


def reply_address_error(message: Message) -> str | None:
    """Why no reply is sent to the address in a request; `None` if it is allowed or missing."""
    if message.reply_to is None:
        return None
    name, separator, _ = message.reply_to.partition(".")
    if separator and name == message.app_id:
        return None
    address, app_id = message.reply_to[:_MAX_QUOTED_LENGTH], message.app_id[:_MAX_QUOTED_LENGTH]
    return f"reply_to: {address!r} is not an address under {app_id!r}"
