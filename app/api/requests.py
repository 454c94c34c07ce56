"""Requests by their ids: to cancel them, and to go on reading streams whose connection broke.

A stream that its client made resumable is not sent from where it is made: it is recorded, and sent from the recording.
Its events have ids, which count up from 1; who comes back says which it had last and gets what came after. Without a
reader it goes on for a while, and is kept for a while after its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from app.errors import Gone, NotFound
from app.telemetry.explain import describe
from app.telemetry.ledger import Ledger

if TYPE_CHECKING:
    from starlette.types import Message, Send

_EVENT_END = b"\n\n"
# How long another ingress replica waits for more before it says that there is nothing yet.
_POLL_S = 2.0


@dataclass(frozen=True, slots=True)
class Excerpt:
    """Events of a stream: `events` with their ids, the last of which is `last`; `is_over`: no more will come."""

    events: bytes
    last: int
    is_over: bool


class Recording:
    """What an ASGI app sends as its answer, kept so that it can be read more than once."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._events: list[bytes] = []
        self._size = 0
        # How many events came before those that are kept.
        self._dropped = 0
        self._changed = asyncio.Event()
        self.start: Message | None = None
        self.whole = b""
        self.is_over = False
        self._readers = 0
        self._last_read = 0.0

    @property
    def is_stream(self) -> bool:
        """Whether the answer is a stream of events."""
        headers = dict(self.start["headers"]) if self.start is not None else {}
        return bool(headers.get(b"content-type", b"").startswith(b"text/event-stream"))

    async def send(self, message: Message) -> None:
        """ASGI's send."""
        if message["type"] == "http.response.start":
            self.start = message
        else:
            body: bytes = message.get("body", b"")
            if self.is_stream:
                self._record(body)
            else:
                self.whole += body
            self.is_over = not message.get("more_body", False)
        self._notify()

    def end(self) -> None:
        """Nothing more will come, whatever came."""
        self.is_over = True
        self._notify()

    def unread_since(self) -> float | None:
        """Since when, on the event loop's clock, nobody has read it; None while somebody does."""
        return None if self._readers else self._last_read

    async def started(self) -> None:
        """Wait until the answer has a status, or never will."""
        while self.start is None and not self.is_over:
            await self._changed.wait()

    async def after(self, last: int, wait_s: float | None = None) -> Excerpt:
        """What came after the event of that id; waits for it, for `wait_s` seconds at most.

        Raises:
            Gone: some of it is not kept any more, or there never was such an event.
        """
        if last < self._dropped or last > self._dropped + len(self._events):
            raise Gone(f"The stream has no event {last} any more; ask again from the beginning.")
        self._readers += 1
        try:
            async with asyncio.timeout(wait_s):
                while last >= self._dropped + len(self._events) and not self.is_over:
                    await self._changed.wait()
        except TimeoutError:
            pass
        finally:
            self._readers -= 1
            self._last_read = asyncio.get_running_loop().time()
        if last < self._dropped:
            raise Gone("The reader was too slow: the stream has gone on further than is kept.")
        events = self._events[last - self._dropped :]
        return Excerpt(b"".join(events), last + len(events), self.is_over)

    def _record(self, body: bytes) -> None:
        for event in body.split(_EVENT_END):
            if not event:
                continue
            number = self._dropped + len(self._events) + 1
            kept = b"id: %d\n%s%s" % (number, event, _EVENT_END)
            self._events.append(kept)
            self._size += len(kept)
        drop = 0
        while self._size > self._max_bytes and drop < len(self._events) - 1:
            self._size -= len(self._events[drop])
            drop += 1
        if drop:
            del self._events[:drop]
            self._dropped += drop

    def _notify(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


async def play(recording: Recording, send: Send) -> None:
    """Send a recording from its beginning to its end."""
    await recording.started()
    if recording.start is None:
        return
    await send(recording.start)
    if not recording.is_stream:
        await send({"type": "http.response.body", "body": recording.whole, "more_body": False})
        return
    last, is_over = 0, False
    while not is_over:
        excerpt = await recording.after(last)
        last, is_over = excerpt.last, excerpt.is_over
        await send({"type": "http.response.body", "body": excerpt.events, "more_body": not is_over})


@dataclass(slots=True)
class Entry:
    """A request in hand, or a recording that is kept. `key`: whose it is."""

    request_id: str
    key: str
    cancel: Callable[[], None]
    recording: Recording | None = None

    @property
    def is_over(self) -> bool:
        """Whether only its recording is left."""
        return self.recording is not None and self.recording.is_over


class Requests:
    """All of one ingress."""

    def __init__(self) -> None:
        self._entries: dict[str, list[Entry]] = {}

    def add(self, entry: Entry) -> None:
        """A request is being handled."""
        self._entries.setdefault(entry.request_id, []).append(entry)

    def remove(self, entry: Entry) -> None:
        """It is not any more; harmless when it was removed before."""
        entries = self._entries.get(entry.request_id, [])
        if entry in entries:
            entries.remove(entry)
        if not entries:
            self._entries.pop(entry.request_id, None)

    def watch(self, entry: Entry, window_s: float) -> None:
        """Cancel a resumable request that nobody has read for that long, and forget it then."""
        loop = asyncio.get_running_loop()
        recording = entry.recording
        assert recording is not None
        begin = loop.time()

        def look() -> None:
            since = recording.unread_since()
            unread_s = 0.0 if since is None else loop.time() - max(since, begin)
            if unread_s < window_s:
                loop.call_later(window_s - unread_s, look)
                return
            if not recording.is_over:
                entry.cancel()
            self.remove(entry)

        loop.call_later(window_s, look)

    def cancel(self, request_id: str, key: str) -> bool:
        """Cancel a caller's request; whether there was one."""
        found = [entry for entry in self._entries.get(request_id, []) if entry.key == key]
        for entry in found:
            entry.cancel()
        return bool(found)

    def recording(self, request_id: str, key: str) -> Recording | None:
        """The recording of a caller's resumable request."""
        for entry in reversed(self._entries.get(request_id, [])):
            if entry.key == key and entry.recording is not None:
                return entry.recording
        return None

    async def excerpt(self, request_id: str, key: str, last: int) -> Excerpt | None:
        """What came of a caller's resumable stream after an event, waiting a little for it; None where it isn't here.

        Raises:
            Gone: it is not kept any more.
        """
        recording = self.recording(request_id, key)
        return None if recording is None else await recording.after(last, _POLL_S)

    def has(self, request_id: str, key: str) -> bool:
        """Whether a caller's request of that id is in hand."""
        return any(entry.key == key and not entry.is_over for entry in self._entries.get(request_id, []))

    def __len__(self) -> int:
        return sum(map(len, self._entries.values()))


# Asks the other ingress replicas for the first answer that is not None.
Ask = Callable[..., Awaitable[Any]]


class Everywhere:
    """Requests of all ingress replicas: here, else there. `ask`: calls a method of the others' deployment."""

    def __init__(self, requests: Requests, ledger: Ledger, ask: Ask | None = None) -> None:
        self._requests = requests
        self._ledger = ledger
        self._ask = ask

    def describe_here(self, request_id: str, key: str) -> dict[str, Any] | None:
        """What is known of a caller's request here; None for nothing."""
        if self._requests.has(request_id, key):
            return {"id": request_id, "object": "request", "outcome": "in_progress"}
        record = self._ledger.find(request_id, key)
        return None if record is None else describe(record)

    async def describe(self, request_id: str, key: str) -> dict[str, Any]:
        """What is known of a caller's request, wherever it was.

        Raises:
            NotFound: nothing.
        """
        found = self.describe_here(request_id, key)
        if found is None and self._ask is not None:
            found = await self._ask("describe_request", request_id, key)
        if found is None:
            raise NotFound(f"There is no request `{request_id}`, or it is not kept any more.", param="id")
        return found

    async def cancel(self, request_id: str, key: str) -> bool:
        """Cancel a caller's request, wherever it is."""
        if self._requests.cancel(request_id, key):
            return True
        return self._ask is not None and await self._ask("cancel_request", request_id, key) is True

    async def after(self, request_id: str, key: str, last: int) -> Excerpt:
        """What came of a resumable stream after an event; may be nothing, where that takes long.

        Raises:
            Gone: there is no such stream, or not from there on.
        """
        excerpt = await self._requests.excerpt(request_id, key, last)
        if excerpt is None and self._ask is not None:
            excerpt = await self._ask("read_request", request_id, key, last)
        if isinstance(excerpt, Excerpt):
            return excerpt
        raise Gone(
            f"There is no stream of the request `{request_id}` to go on with: it was not resumable "
            "(`x-sluice-resume: allow`), or its time is over."
        )
