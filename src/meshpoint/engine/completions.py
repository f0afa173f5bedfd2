"""Answers to questions, from a person or a webhook.

An answer that arrives while the task is not waiting for it is kept for the next wait. Any replica
records answers to tasks in the database. Only its own replica records answers to a task in memory,
so such an answer is broadcast, as a cancel is.
"""

from __future__ import annotations

from dataclasses import dataclass

from meshpoint.engine.backend import Backend
from meshpoint.engine.publisher import Publisher
from meshpoint.engine.runtime import ReplicaRuntime
from meshpoint.engine.segment_runner import SegmentRunner
from meshpoint.engine.senders import identify_sender, reply_address_error
from meshpoint.errors import AnswerRefused, PoisonMessage, QuestionNotOpen, StoreUnavailable
from meshpoint.model.bodies import CompleteBody, CompletedBody, parse_body
from meshpoint.model.envelopes import completion_reply, forwarded_message
from meshpoint.model.events import Step
from meshpoint.model.ids import RunId
from meshpoint.model.mailbox import MailAccepted, MailRefused, RecordAnswer
from meshpoint.model.messages import CompletionStatus, Header, Message, truncate_reason
from meshpoint.model.outcomes import Outcome
from meshpoint.model.questions import AskedQuestion, QuestionKey
from meshpoint.model.transitions import TaskLocked

_UNKNOWN = (
    "no replica knows its task, or the task is in its first segment and has not asked it yet: "
    "answer again once the task waits"
)
_NOT_ASKED = "its task has not asked it yet: answer again once the task waits"
_NOT_OPEN = "its task no longer asks it"
_ENDED = "its task has ended"


@dataclass(frozen=True, slots=True)
class _Completion:
    """An answer or a rejection as it arrived. `names` are the sender's name and its login."""

    message: Message
    body: CompleteBody
    key: QuestionKey
    names: tuple[str | None, ...]
    is_operator: bool

    @property
    def by(self) -> str:
        """Who answers, for people."""
        return next((name for name in self.names if name), "unknown")


class Completions:
    """Records answers, and replies to their senders."""

    def __init__(
        self, runtime: ReplicaRuntime, runner: SegmentRunner, publisher: Publisher
    ) -> None:
        self._runtime, self._runner, self._publisher = runtime, runner, publisher
        self._forwarded: set[RunId] = set()  # answers that wait for the database

    async def complete(
        self, message: Message, claim_id: RunId, *, shared: bool
    ) -> TaskLocked | None:
        """Record an answer and reply to its sender. `shared`: it came from the agent's queue.

        Returns `TaskLocked` if another database session has locked the task; try again later.

        Raises:
            PoisonMessage: The answer cannot be read, or its sender may not answer the question.
                The reason was sent to the sender if its name and address are its own.
            StoreUnavailable: New tasks do not need the database, so other messages must not wait
                for it either; try again later.
        """
        sender = self._identify(message, shared=shared)
        try:
            return await self._record(self._parse(message, sender), claim_id, shared=shared)
        except PoisonMessage as error:
            await self._reply(message, CompletionStatus.REFUSED, str(error))
            raise
        except StoreUnavailable:
            self._forwarded.add(claim_id)
            raise

    async def _record(
        self, completion: _Completion, claim_id: RunId, *, shared: bool
    ) -> TaskLocked | None:
        runtime = self._runtime
        database, in_process = runtime.database, runtime.in_process
        pauses_in_database = runtime.new_task_backend.is_shared
        if shared and database is not None and pauses_in_database:
            asked = await self._find(database, completion.key)
            if asked is not None:
                return await self._answer(database, asked, completion, claim_id)
        asked = await self._find(in_process, completion.key)
        if asked is not None:
            return await self._answer(in_process, asked, completion, claim_id)
        if not shared:
            return None  # another replica may have the task in memory
        if not pauses_in_database:
            # Before the look-up, because the database may be unavailable.
            if claim_id not in self._forwarded:
                await self._forward(completion.message)
            self._forwarded.discard(claim_id)
        if database is None:
            return None
        if not pauses_in_database:
            asked = await self._find(database, completion.key)
            if asked is not None:
                return await self._answer(database, asked, completion, claim_id)  # older task
        text = await self._explain_unasked(completion.key, database)
        status = CompletionStatus.REFUSED if text == _ENDED else CompletionStatus.NOT_OPEN
        await self._reply(completion.message, status, text)
        return None

    async def _forward(self, message: Message) -> None:
        """Broadcast an answer to the replicas, of which one may have its task in memory."""
        agent = self._runtime.agent
        forwarded = forwarded_message(agent, message, message.app_id)
        await self._runtime.broker.broadcast(agent, forwarded)

    async def _explain_unasked(self, key: QuestionKey, database: Backend) -> str:
        """Why no question has this key, for people."""
        if key.task_id in self._runner.tasks.segments:
            return _NOT_ASKED
        found = await self._runtime.ask_store(
            database, lambda: database.store.lookup([key.task_id])
        )
        existing = found.get(key.task_id)
        if existing is None or existing.agent != key.agent or existing.is_early_cancel:
            return _UNKNOWN
        return _ENDED if existing.state.is_final else _NOT_ASKED

    def _identify(self, message: Message, *, shared: bool) -> tuple[str | None, ...]:
        """The name and the login of the sender, after a check of its reply address."""
        runtime = self._runtime
        sender = identify_sender(message, runtime.agent, runtime.options)
        original = message.headers.get(Header.ON_BEHALF_OF)
        if sender.name == runtime.agent and not shared and original is not None:
            login = message.headers.get(Header.ON_BEHALF_OF_LOGIN)
            return (str(original), None if login is None else str(login))
        if (address_error := reply_address_error(message)) is not None:
            raise PoisonMessage(address_error)
        return (message.app_id, message.user_id)

    def _parse(self, message: Message, names: tuple[str | None, ...]) -> _Completion:
        options = self._runtime.options
        body = parse_body(CompleteBody, message.body, options.max_message_bytes)
        if (body.question is None) == (body.rejects is None):
            raise PoisonMessage("question: give either question or rejects")
        try:
            key = QuestionKey.from_id(body.question or body.rejects or "")
        except QuestionNotOpen as error:
            raise PoisonMessage(f"question: {error}") from None
        if key.agent != self._runtime.agent:
            raise PoisonMessage(f"question: it is a question of {key.agent!r}")
        return _Completion(message, body, key, names, names[1] in options.operator_logins)

    async def _find(self, backend: Backend, key: QuestionKey) -> AskedQuestion | None:
        (asked,) = await self._runtime.ask_store(
            backend, lambda: backend.store.find_questions([key])
        )
        return asked

    async def _answer(
        self,
        backend: Backend,
        asked: AskedQuestion,
        completion: _Completion,
        claim_id: RunId,
    ) -> TaskLocked | None:
        if not (completion.is_operator or asked.may_answer(completion.names)):
            raise PoisonMessage(f"{completion.by!r} may not answer {asked.name!r}")
        if asked.is_answered_by(completion.message.message_id):  # delivered again
            await self._reply(completion.message, CompletionStatus.RECORDED)
            return None
        try:
            outcome = self._build_outcome(asked, completion)
        except AnswerRefused as error:
            await self._reply(completion.message, CompletionStatus.REFUSED, str(error))
            return None
        command = RecordAnswer(claim_id, asked.key, outcome)
        with self._runtime.steps.step(Step.CLAIM, [asked.key.task_id]):
            (result,) = await self._runtime.ask_store(
                backend, lambda: backend.store.answer([command])
            )
        match result:
            case TaskLocked():
                return result
            case MailRefused(reason=reason):
                await self._reply(completion.message, CompletionStatus.REFUSED, reason)
            case MailAccepted():
                self._runner.handle_mail(backend, asked.key.task_id, result)
                await self._reply(completion.message, CompletionStatus.RECORDED)
            case _:
                await self._reply(completion.message, CompletionStatus.NOT_OPEN, _NOT_OPEN)
        return None

    def _build_outcome(self, asked: AskedQuestion, completion: _Completion) -> Outcome:
        body, by, now = completion.body, completion.by, self._runtime.clock.now()
        message_id = completion.message.message_id
        if body.rejects is None:
            return asked.check(body.value, by, now, message_id)
        return asked.reject(truncate_reason(body.reason or ""), by, now, message_id)

    async def _reply(self, message: Message, status: CompletionStatus, text: str = "") -> None:
        body = CompletedBody(text=truncate_reason(text))
        envelope = completion_reply(self._runtime.agent, message, status, body)
        await self._publisher.publish_advisory([envelope])
