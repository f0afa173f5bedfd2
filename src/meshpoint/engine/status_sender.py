"""Send the status updates, text and artifacts of one run to the requester of its task."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import timedelta

from pydantic import JsonValue

from meshpoint.engine.publisher import Publisher
from meshpoint.engine.runtime import ReplicaRuntime
from meshpoint.engine.segment import Segment, StopReason
from meshpoint.engine.throttle import MAX_STATUSES_PER_SECOND, Throttle
from meshpoint.model.envelopes import MAX_STATUS_BYTES, status_envelope, status_envelopes
from meshpoint.model.events import Step
from meshpoint.model.messages import Address
from meshpoint.model.status_metadata import StatusMetadata, StatusNumber, UpdateKind

_INTERVAL = timedelta(seconds=1 / MAX_STATUSES_PER_SECOND)
_MAX_FLUSH_SECONDS = 1.0
"""Seconds for which the end of a segment waits for its last updates to be sent."""
_MAX_TEXT_LENGTH = 8_000
"""Maximum characters of one text update. In JSON, a character has at most six bytes."""
_MAX_WAITING_TEXT = 64_000
"""Maximum characters that wait to be sent. Further ones are dropped."""
_MAX_WAITING_ARTIFACTS = 20

Update = tuple[UpdateKind, JsonValue]


class StatusSender:
    """Numbers the updates of one run, and sends at most 20 a second.

    Further updates wait, and are merged: pieces of text are joined, and of several status
    updates only the latest is sent. All updates are advisory.
    """

    def __init__(self, segment: Segment, runtime: ReplicaRuntime, publisher: Publisher) -> None:
        self._segment, self._runtime, self._publisher = segment, runtime, publisher
        self._throttle = Throttle(MAX_STATUSES_PER_SECOND, runtime.clock.now)
        self._waiting = WaitingUpdates()
        self._position = 0
        self._latest: tuple[JsonValue, StatusMetadata] | None = None
        self._sending = asyncio.Lock()
        self._sender: asyncio.Task[None] | None = None
        self._is_closed = False

    @property
    def _has_receiver(self) -> bool:
        return self._segment.requester.reply_to is not None or bool(self._segment.attached)

    async def send(self, kind: UpdateKind, content: JsonValue) -> None:
        """Send an update, or keep it until it can be sent.

        An update is lost if the broker is unavailable, if the update is too large, or once the
        segment has ended.
        """
        if self._is_closed or not self._has_receiver:
            return
        is_free = self._sender is None and kind is not UpdateKind.TEXT
        if is_free and self._throttle.try_consume(self._segment.run.task_id):
            await self._send(kind, content)
            return
        if not self._waiting.add(kind, content):
            self._count_dropped()
        if self._sender is None:
            self._sender = self._runtime.background.spawn(self._send_waiting)

    async def send_question(self, content: JsonValue) -> None:
        """Send a question of the segment's pause, after `close` and the pause's commit."""
        if not self._has_receiver:
            return
        if self._throttle.try_consume(self._segment.run.task_id):
            await self._send(UpdateKind.QUESTION, content)
        else:
            self._count_dropped()

    async def repeat_latest(self, address: Address) -> None:
        """Send the latest status again, to one address and with its number."""
        async with self._sending:  # before any later update
            if self._latest is not None:
                segment = self._segment
                requester = replace(segment.requester, reply_to=address)
                envelope = status_envelope(
                    self._runtime.agent, segment.run.task_id, requester, *self._latest
                )
                await self._publisher.publish_advisory([envelope])

    async def close(self) -> None:
        """Send the waiting updates, unless another run owns the task. Later ones are dropped."""
        self._is_closed = True
        if self._sender is None:
            return
        if self._segment.stop_reason is not StopReason.LOST:
            rest = self._runtime.background.spawn(self._send_rest)
            await asyncio.wait({rest}, timeout=_MAX_FLUSH_SECONDS)
        self._sender.cancel()

    async def _send_waiting(self) -> None:
        try:
            while self._waiting:
                if self._throttle.try_consume(self._segment.run.task_id):
                    await self._send(*self._waiting.take())
                else:
                    await self._runtime.clock.sleep(_INTERVAL)
        finally:
            if not self._is_closed:
                self._sender = None

    async def _send_rest(self) -> None:
        while self._waiting:
            await self._send(*self._waiting.take())

    async def _send(self, kind: UpdateKind, content: JsonValue) -> None:
        async with self._sending:  # the messages keep their order
            segment = self._segment
            self._position += 1
            metadata = StatusMetadata(kind, self._number())
            envelopes = status_envelopes(
                self._runtime.agent,
                segment.run.task_id,
                segment.requester,
                segment.attached,
                content,
                metadata,
            )
            if envelopes and (size := len(envelopes[0][1].body)) > MAX_STATUS_BYTES:
                reason = f"ctx.{_METHODS[kind]} was given too much: {size} bytes"
                self._emit_dropped(f"{reason}; at most {MAX_STATUS_BYTES} are sent", 1)
                return
            if kind is UpdateKind.STATUS:
                self._latest = content, metadata
            await self._publisher.publish_advisory(envelopes)

    def _number(self) -> StatusNumber:
        run = self._segment.run
        # Fences of tasks in the memory of different processes cannot be compared.
        fence = run.fence if self._segment.shared_backend is not None else 0
        return StatusNumber(run.generation, fence, run.id, self._position)

    def _count_dropped(self) -> None:
        if count := self._throttle.count_dropped(self._segment.run.task_id):
            self._emit_dropped(f"more than {MAX_STATUSES_PER_SECOND} a second", count)

    def _emit_dropped(self, reason: str, count: int) -> None:
        task_id = self._segment.run.task_id
        self._runtime.steps.emit(Step.STATUS_DROPPED, task_id, reason=reason, dropped=count)


_METHODS = {
    UpdateKind.STATUS: "update_status",
    UpdateKind.TEXT: "add_text",
    UpdateKind.ARTIFACT: "add_artifact",
    UpdateKind.QUESTION: "wait_for",
}


class WaitingUpdates:
    """The updates that wait to be sent, merged and bounded: text, a status, text, artifacts."""

    def __init__(self) -> None:
        self._texts: tuple[list[str], list[str]] = ([], [])  # before and after the status
        self._status: list[JsonValue] = []  # empty, or the latest
        self._artifacts: list[JsonValue] = []
        self._text_length = 0

    def __bool__(self) -> bool:
        return bool(self._text_length or self._status or self._artifacts)

    def add(self, kind: UpdateKind, content: JsonValue) -> bool:
        """Add an update. Returns `False` if it, or an earlier status, is dropped."""
        match kind:
            case UpdateKind.STATUS:
                is_first = not self._status
                self._status = [content]
                self._texts[0].extend(self._texts[1])
                self._texts[1].clear()
                return is_first
            case UpdateKind.TEXT:
                text = str(content)[: _MAX_WAITING_TEXT - self._text_length]
                if text:
                    self._texts[1 if self._status else 0].append(text)
                    self._text_length += len(text)
                return len(text) == len(str(content))
            case UpdateKind.ARTIFACT:
                if len(self._artifacts) >= _MAX_WAITING_ARTIFACTS:
                    return False
                self._artifacts.append(content)
                return True
            case UpdateKind.QUESTION:
                return False  # is sent by itself

    def take(self) -> Update:
        """Remove and return the update to send next."""
        if self._texts[0]:
            return UpdateKind.TEXT, self._take_text(self._texts[0])
        if self._status:
            return UpdateKind.STATUS, self._status.pop()
        if self._texts[1]:
            return UpdateKind.TEXT, self._take_text(self._texts[1])
        return UpdateKind.ARTIFACT, self._artifacts.pop(0)

    def _take_text(self, pieces: list[str]) -> str:
        text = "".join(pieces)
        pieces[:] = [text[_MAX_TEXT_LENGTH:]] if len(text) > _MAX_TEXT_LENGTH else []
        text = text[:_MAX_TEXT_LENGTH]
        self._text_length -= len(text)
        return text
