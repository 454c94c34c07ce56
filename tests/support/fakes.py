"""Stand-ins for the parts behind the ingress."""

from __future__ import annotations

import asyncio
from typing import Any

from app.pools.client import PoolWatcher
from app.telemetry.record import RequestRecord
from app.telemetry.timeline import read_clock
from app.types import (
    Aborted,
    EngineFacts,
    EngineRequest,
    Head,
    JsonObject,
    Rendered,
    ReplicaState,
    Route,
    Tail,
)


class FakeRenderer:
    """Renders a prompt of as many tokens as its `prompt_tokens` field says."""

    def __init__(self) -> None:
        self.gate: asyncio.Event | None = None
        self.error: Exception | None = None
        self.bodies: list[JsonObject] = []

    async def render(self, route: Route, body: JsonObject) -> Rendered:
        self.bodies.append(body)
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        tokens = body.get("prompt_tokens", 3)
        return Rendered(
            model="m",
            stream=bool(body.get("stream")),
            prompt_token_ids=[[1] * tokens],
            prompt_tokens=tokens,
            longest_prompt=tokens,
            max_output_tokens=body.get("max_tokens"),
            sequences=1,
            sampling={},
        )

    def count(self, texts: list[str]) -> list[int]:
        return [len(text.split()) for text in texts]

    async def models(self) -> JsonObject:
        return {"object": "list", "data": [{"id": "m", "object": "model"}]}


def no_state() -> ReplicaState:
    """The state of a replica whose engine tells nothing."""
    return ReplicaState("replica-1", 0.0, read_clock(), {}, None)


def facts(**stamps: Any) -> EngineFacts:
    """Facts of an engine on this process's clock."""
    return EngineFacts(clock=read_clock(), **stamps)


class FakeStream:
    """A replica's answer whose items the test hands over one by one."""

    def __init__(self) -> None:
        self.items: asyncio.Queue[Head | bytes | Tail | Exception] = asyncio.Queue()
        self.replica_id: str | None = None
        self.accept_error: Exception | None = None
        self.cancelled = False
        # What the replica tells after the request was cancelled.
        self.last_words: Aborted | None = None

    def put(self, *items: Head | bytes | Tail | Exception) -> None:
        for item in items:
            self.items.put_nowait(item)

    async def accepted(self, timeout_s: float) -> None:
        if self.accept_error is not None:
            raise self.accept_error
        self.replica_id = "replica-1"

    async def head(self) -> Head:
        item = await self._next()
        assert isinstance(item, Head)
        return item

    async def more(self) -> bytes | Tail:
        item = await self._next()
        assert isinstance(item, bytes | Tail)
        return item

    async def _next(self) -> Head | bytes | Tail:
        item = await self.items.get()
        if isinstance(item, Exception):
            raise item
        return item

    def cancel(self) -> None:
        self.cancelled = True

    async def aborted(self) -> Aborted | None:
        return self.last_words


class FakePool:
    """A pool that records what it is given and answers with a FakeStream."""

    accept_timeout_s = 5.0

    def __init__(self, name: str) -> None:
        self.name = name
        self.replica_ids = frozenset({f"{name}-1"})
        self.requests: list[EngineRequest] = []
        self.stream = FakeStream()
        self.dispatched = asyncio.Event()

    def watch(self, watcher: PoolWatcher) -> None:
        watcher.set_replicas(self.name, self.replica_ids)

    def dispatch(self, request: EngineRequest) -> FakeStream:
        self.requests.append(request)
        self.dispatched.set()
        return self.stream


class FakeMetrics:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.has_ended = asyncio.Event()
        self.ends: list[RequestRecord] = []

    @property
    def running(self) -> dict[str, int]:
        return {"standard": self.in_flight}

    def entered(self, service_class: str) -> None:
        self.in_flight += 1

    def left(self, service_class: str) -> None:
        self.in_flight -= 1

    def ended(self, record: RequestRecord) -> None:
        self.has_ended.set()
        self.ends.append(record)
