"""Cleans request headers in Ray Serve's HTTP entry, before Ray itself looks at them, and notes when they arrived.

The entry is Serve's proxy or, behind HAProxy, the HTTP server of the ingress replica itself. Ray Serve 2.60 lets
clients switch off its timeout and its cancellation by headers, and echoes any `x-request-id`. Its entry loads
`middlewares` where the environment of the Ray processes has
`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH=app.api.edge:middlewares`, as `scripts/serve` sets it. Without it the app
works the same for well-meaning clients, and a request counts as received when it reaches the ingress.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from starlette.middleware import Middleware

from app.api.http import clean_request_id
from app.telemetry.timeline import read_clock
from app.types import ClockReading

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Headers by which a client would steer Ray or vLLM.
_DROPPED = frozenset(
    {
        b"x-request-timeout-seconds",
        b"x-request-disconnect-disabled",
        b"x-vllm-priority",
        b"x-data-parallel-rank",
        b"serve_multiplexed_model_id",
        b"serve-multiplexed-model-id",
        b"x-sluice-received",
    }
)
_RECEIVED = "x-sluice-received"
_CALLBACK = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
# Older ones are not this request's.
_MAX_AGE_S = 60.0


class EdgeHeaders:
    """ASGI middleware that drops steering headers, cleans the request id, and counts clients that leave."""

    def __init__(self, app: ASGIApp, client_left: Callable[[], None]) -> None:
        self._app = app
        self._client_left = client_left

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on with its headers cleaned."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        arrival = f"{read_clock().boot_id} {time.monotonic():.6f}"
        scope = {**scope, "headers": [*clean_headers(scope["headers"]), (_RECEIVED.encode(), arrival.encode())]}
        over = False

        async def watched_receive() -> Message:
            nonlocal over
            message = await receive()
            if message["type"] == "http.disconnect" and not over:
                over = True
                self._client_left()
            return message

        async def watched_send(message: Message) -> None:
            nonlocal over
            if message["type"] == "http.response.body" and not message.get("more_body", False):
                over = True
            await send(message)

        await self._app(scope, watched_receive, watched_send)


def clean_headers(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """The headers without those that steer, and with exactly one, clean, `x-request-id`."""
    given: bytes | None = None
    kept: list[tuple[bytes, bytes]] = []
    for name, value in headers:
        lowered = name.lower()
        if lowered == b"x-request-id":
            given = value if given is None else given
        elif lowered not in _DROPPED:
            kept.append((name, value))
    request_id = clean_request_id(None if given is None else given.decode("latin-1"))
    return [*kept, (b"x-request-id", request_id.encode())]


def received_at(headers: Mapping[str, str], now: float, clock: ClockReading) -> float:
    """When the request arrived: at the entry, if that is on this machine and cleans headers, else `now`.

    In seconds on `clock`. Without the entry's cleaning the header could be anybody's, so it is not believed.
    """
    if os.environ.get(_CALLBACK) != "app.api.edge:middlewares":
        return now
    boot_id, _, stamp = headers.get(_RECEIVED, "").partition(" ")
    try:
        arrival = float(stamp)
    except ValueError:
        return now
    return arrival if boot_id == clock.boot_id and now - _MAX_AGE_S < arrival <= now else now


def middlewares() -> list[Middleware]:
    """What Ray Serve's HTTP entry loads."""
    from app.telemetry.metrics import EntryMetrics

    return [Middleware(EdgeHeaders, client_left=EntryMetrics().client_left)]
