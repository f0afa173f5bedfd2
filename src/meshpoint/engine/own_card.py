"""Introduce this replica to peers that discover it: announce its card, and answer questions."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from meshpoint.agents.cards import describe_agent
from meshpoint.engine.publisher import Publisher
from meshpoint.engine.runtime import ReplicaRuntime
from meshpoint.engine.senders import impersonation_error, reply_address_error
from meshpoint.engine.throttle import Throttle
from meshpoint.errors import ConfigurationError, Unavailable
from meshpoint.model.cards import CardBody
from meshpoint.model.envelopes import Envelope, card_message
from meshpoint.model.messages import CARDS, DESCRIBE_ALL, Message, describe_topic
from meshpoint.ports.agent import DurableAgent

log = logging.getLogger("meshpoint.cards")

_MAX_ANSWERS_PER_SECOND = 200
_MAX_ANSWERS_PER_ADDRESS = 5
"""Maximum answers per second. Peers ask again, so a dropped question costs little."""
_RETRY_DELAY = timedelta(seconds=5)


class OwnCard:
    """The card of this replica, built when it is first needed."""

    def __init__(
        self, runtime: ReplicaRuntime, agent: DurableAgent[Any, Any], publisher: Publisher
    ) -> None:
        self._runtime, self._agent, self._publisher = runtime, agent, publisher
        self._body: bytes | None = None
        self._throttle = Throttle(_MAX_ANSWERS_PER_ADDRESS, runtime.clock.now)
        self._total_throttle = Throttle(_MAX_ANSWERS_PER_SECOND, runtime.clock.now)

    async def introduce(self) -> None:
        """Subscribe to the questions of peers, then announce the card once.

        Returns once both are done. The replica serves its tasks meanwhile, and also if this fails.
        """
        runtime = self._runtime
        topics = [describe_topic(runtime.agent), DESCRIBE_ALL]
        while True:
            try:
                await runtime.broker.subscribe(runtime.agent, runtime.replica.id, topics)
                await runtime.broker.announce(CARDS, self._message())
            except Unavailable:
                await runtime.clock.sleep(_RETRY_DELAY)
            except ConfigurationError as error:
                log.warning("agent %s: peers cannot discover it: %s", runtime.agent, error)
                return
            else:
                return

    async def answer(self, questions: Sequence[Message]) -> None:
        """Send the card to those who asked for it. Invalid or too frequent questions are dropped.

        They are not dead-lettered: one question reaches all replicas of the mesh.
        """
        answers: list[Envelope] = []
        for question in questions:
            options = self._runtime.options
            problem = impersonation_error(question, options) or reply_address_error(question)
            if problem is not None:
                log.debug("a question for the card was dropped: %s", problem)
            elif question.reply_to is not None and self._may_answer(question.reply_to):
                answers.append((question.reply_to, self._message(question.correlation_id)))
        await self._publisher.publish_advisory(answers)

    def _may_answer(self, address: str) -> bool:
        return self._throttle.try_consume(address) and self._total_throttle.try_consume("")

    def _message(self, correlation_id: str | None = None) -> Message:
        if self._body is None:
            replica = self._runtime.replica
            self._body = CardBody(
                card=describe_agent(self._agent),
                replica=replica.id,
                started_at=self._runtime.clock.now(),  # the database's, now that it is open
                app_version=None if replica.version is None else replica.version[:200],
            ).to_bytes()
        return card_message(self._runtime.agent, self._body, correlation_id)
