"""Driving an ASGI app without a server, so that a test decides when the client sends, reads and leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from typing import Any

from starlette.types import ASGIApp, Message


class Client:
    """One request to an ASGI app, in the test's hands."""

    def __init__(self, app: ASGIApp, path: str, body: bytes, headers: Mapping[str, str] | None = None) -> None:
        self._incoming: asyncio.Queue[Message] = asyncio.Queue()
        self._incoming.put_nowait({"type": "http.request", "body": body, "more_body": False})
        self.sent: list[Message] = []
        self.reads = asyncio.Event()
        self.reads.set()
        self.takes_s = 0.0
        self._changed = asyncio.Event()
        scope: dict[str, Any] = {
            "type": "http",
            "method": "POST",
            "path": path,
            "root_path": "",
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in (headers or {}).items()],
        }
        self.task = asyncio.ensure_future(self._run(app, scope))

    async def _run(self, app: ASGIApp, scope: dict[str, Any]) -> None:
        await app(scope, self._incoming.get, self._send)

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.body":
            await self.reads.wait()
            await asyncio.sleep(self.takes_s)
        self.sent.append(message)
        self._changed.set()

    def leave(self) -> None:
        """Close the connection."""
        self._incoming.put_nowait({"type": "http.disconnect"})

    async def until_sent(self, count: int) -> None:
        """Wait for so many ASGI messages of the answer."""
        while len(self.sent) < count:
            self._changed.clear()
            await asyncio.wait_for(self._changed.wait(), 5)

    async def finish(self) -> None:
        """Wait for the app to be done with the request."""
        await asyncio.wait_for(self.task, 5)

    @property
    def status(self) -> int:
        """The answer's status."""
        status: int = self.sent[0]["status"]
        return status

    @property
    def headers(self) -> dict[str, str]:
        """The answer's headers."""
        return {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}

    @property
    def body(self) -> bytes:
        """The answer's body so far."""
        return b"".join(message.get("body", b"") for message in self.sent[1:])

    def json(self) -> Any:
        """The answer's body as JSON."""
        return json.loads(self.body)
