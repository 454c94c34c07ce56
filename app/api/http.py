"""ASGI pieces: reading a bounded body, sending answers, noticing that the client went away."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
import uuid
from collections.abc import Awaitable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from app.errors import BodyTooLarge, InvalidRequest, RequestError
from app.types import JsonObject

if TYPE_CHECKING:
    from starlette.types import Message, Receive, Send

_REQUEST_ID = re.compile(r"[^A-Za-z0-9._:\-]")
_MAX_REQUEST_ID_CHARS = 128
# What is sent at once: about what fits between here and a client that does not read.
_PIECE_BYTES = 64 << 10


def http_path() -> str:
    """How requests reach this process: `haproxy`, or `proxy` for Ray Serve's own in Python.

    Ray's processes read it from their environment when they start.
    """
    return "haproxy" if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1" else "proxy"


class ClientGone(Exception):
    """The client closed its connection before the answer was complete."""


def clean_request_id(given: str | None) -> str:
    """The caller's request id, bounded and without unusual characters, or a new one."""
    cleaned = _REQUEST_ID.sub("", given or "")[:_MAX_REQUEST_ID_CHARS]
    return cleaned or uuid.uuid4().hex


async def read_json_object(receive: Receive, content_length: str | None, max_bytes: int) -> JsonObject:
    """The request's body as a JSON object.

    Raises:
        BodyTooLarge: more than `max_bytes`, by the header or in fact.
        InvalidRequest: not a JSON object in UTF-8.
        ClientGone: the client left before it had sent all of it.
    """
    if content_length is not None and content_length.isdigit() and int(content_length) > max_bytes:
        raise _too_large(max_bytes)
    chunks: list[bytes] = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunk = message.get("body", b"")
        size += len(chunk)
        if size > max_bytes:
            raise _too_large(max_bytes)
        chunks.append(chunk)
        if not message.get("more_body", False):
            break
    try:
        body = json.loads(b"".join(chunks).decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError:
        raise InvalidRequest("The body is not valid UTF-8.") from None
    except RecursionError:
        raise InvalidRequest("The body's JSON is nested too deeply.") from None
    except ValueError as error:
        raise InvalidRequest(f"The body is not valid JSON: {error}.") from None
    if not isinstance(body, dict):
        raise InvalidRequest("The body must be a JSON object.")
    return body


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body is larger than {max_bytes / (1 << 20):.3g} MiB.")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


async def until_client_gone(receive: Receive, work: Awaitable[None]) -> None:
    """Do `work`, but cancel it when the client goes away.

    Raises:
        ClientGone: it did; `work` has ended.
        Whatever `work` raises.
    """
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_client_gone(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            await task
            return
        task.cancel()
        await asyncio.wait({task})
        # A failure on the way out is not the client's any more, but must not vanish either.
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error
        raise ClientGone
    finally:
        watch.cancel()
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


async def _client_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class BodyOnly:
    """A request's ASGI messages up to the end of its body; whether the client leaves later is not told.

    `read`: set when the body has come, or never will.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.read = asyncio.Event()

    async def receive(self) -> Message:
        """ASGI's receive."""
        if self.read.is_set():
            await asyncio.Event().wait()
        message = await self._receive()
        if not message.get("more_body", False):
            self.read.set()
        return message


class Responder:
    """Sends one answer. `started` tells whether its status has left: after that, failures cannot change it.

    `sending_since`: when (by `time.monotonic()`) it began to wait for its client to take something; None: it does not.
    """

    def __init__(self, send: Send, headers: Mapping[str, str]) -> None:
        self._send = send
        self._headers = dict(headers)
        self.started = False
        self.status: int | None = None
        self.sending_since: float | None = None

    def add_headers(self, headers: Mapping[str, str]) -> None:
        """Headers that every answer to this request carries from now on."""
        self._headers.update(headers)

    async def send_json(self, status: int, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        """A whole answer."""
        await self._start(
            status, {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
        )
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def send_error(self, error: RequestError) -> None:
        """An error as a whole answer."""
        headers = {}
        if error.retry_after is not None:
            headers["retry-after"] = str(max(1, round(error.retry_after)))
        await self.send_json(error.status, json.dumps(error.body()).encode(), headers)

    async def begin_stream(self, first: bytes) -> None:
        """The status and the first bytes of a streamed answer."""
        await self._start(200, {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"})
        await self.stream(first)

    async def stream(self, data: bytes) -> None:
        """More bytes."""
        # In pieces, because a client that takes one after the other reads, however slowly.
        for begin in range(0, len(data), _PIECE_BYTES):
            self.sending_since = time.monotonic()
            await self._send(
                {"type": "http.response.body", "body": data[begin : begin + _PIECE_BYTES], "more_body": True}
            )
        self.sending_since = None

    async def end_stream(self, data: bytes = b"") -> None:
        """The last bytes."""
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def _start(self, status: int, headers: Mapping[str, str]) -> None:
        self.started = True
        self.status = status
        await self._send(
            {
                "type": "http.response.start",
                "status": status,
                "headers": [
                    (name.encode("latin-1"), value.encode("latin-1"))
                    for name, value in {**self._headers, **headers}.items()
                ],
            }
        )


class ReaderWatch:
    """Cancels streams whose clients have stopped reading."""

    def __init__(self, limit_s: float) -> None:
        """`limit_s`: seconds that a client may leave a stream unread."""
        self._limit_s = limit_s
        self._streams: dict[Responder, asyncio.Task[Any]] = {}
        self._task: asyncio.Task[None] | None = None
        self._given_up: set[Responder] = set()

    @contextmanager
    def watching(self, responder: Responder) -> Iterator[None]:
        """Watch a stream that the current task sends, and cancel the task if its client does not read."""
        task = asyncio.current_task()
        assert task is not None
        self._streams[responder] = task
        if self._task is None:
            self._task = asyncio.create_task(self._run())
        try:
            yield
        finally:
            del self._streams[responder]

    def gave_up(self, responder: Responder) -> bool:
        """Whether the stream was cancelled by this; forgets it."""
        if responder not in self._given_up:
            return False
        self._given_up.discard(responder)
        return True

    async def _run(self) -> None:
        # One look for all streams: a timer per piece of a stream would cost more than sending it.
        while self._streams:
            await asyncio.sleep(min(1.0, self._limit_s / 4))
            now = time.monotonic()
            for responder, task in list(self._streams.items()):
                if responder.sending_since is not None and now - responder.sending_since > self._limit_s:
                    self._given_up.add(responder)
                    task.cancel()
        self._task = None


def error_event(error: RequestError) -> bytes:
    """The end of a stream that failed."""
    return b"data: " + json.dumps(error.body()).encode() + b"\n\ndata: [DONE]\n\n"


def dump_json(value: Any) -> bytes:
    """Compact JSON."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
