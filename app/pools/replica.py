"""The deployment of a pool: a thin shell around one engine."""

from __future__ import annotations

import asyncio
import time
from collections import Counter as Tally
from collections.abc import AsyncIterator

from ray import serve

from app.config import ModelConfig, PoolConfig
from app.engine.environment import prepare_engine_process, settle_process
from app.pools.channel import Outbox
from app.telemetry.timeline import read_clock
from app.types import (
    Aborted,
    Accepted,
    EngineRequest,
    Frame,
    Head,
    OpenChannel,
    PauseAnswer,
    ReplicaItem,
    ReplicaState,
    Tail,
)

# A channel without answers is closed after this time, so that a replica that is stopped need not wait for it.
_CHANNEL_IDLE_S = 3.0


class VLLMReplica:
    """One replica of a pool."""

    async def __init__(self, model: ModelConfig, config: PoolConfig) -> None:  # type: ignore[misc]  # Serve awaits it
        # vLLM reads its environment when it is imported, so it is imported after that is set. This runs on the
        # replica's event loop thread, which lives as long as the process.
        prepare_engine_process(config.executor)
        from app.engine.vllm import VLLMEngine

        self._replica_id = serve.get_replica_context().replica_id.unique_id
        self._engine = VLLMEngine(model, config, ray_metrics=True)
        self._outboxes: dict[str, Outbox] = {}
        self._sequences: Tally[str] = Tally()
        self._clock = read_clock()
        settle_process()

    async def generate(self, request: EngineRequest) -> AsyncIterator[ReplicaItem]:
        """The items of one request's answer: Accepted, Head and, if it is streamed, SSE bytes and a Tail.

        Where there is a channel to the request's ingress they go by that, and none is left for the call itself.
        """
        call = self._engine.new_call(request.tpot_s)
        self._enter(request)
        is_here = True
        outbox = self._outboxes.get(request.ingress)
        call.sink = outlet = None if outbox is None else outbox.open(request.number, request.collect_s)
        items = self._engine.answer(request, call)
        # The engine is at work while the ingress is told that it will be.
        first = asyncio.ensure_future(anext(items))
        try:
            accepted = Accepted(self._replica_id)
            if outlet is None:
                yield accepted
            else:
                outlet.put(accepted)
            item: ReplicaItem = await first
            while True:
                if isinstance(item, Tail) or (isinstance(item, Head) and item.final):
                    # Before the client can know, so that its next request finds what this one left.
                    self._leave(request)
                    is_here = False
                if outlet is None:
                    yield item
                else:
                    outlet.put(item)
                    if not isinstance(item, Head) or item.final:
                        await outlet.left()
                try:
                    item = await anext(items)
                except StopAsyncIteration:
                    return
        finally:
            if is_here:
                self._leave(request)
            if outlet is not None:
                outlet.close()
            if not first.done():
                first.cancel()
                await asyncio.wait({first})
            await items.aclose()
            if is_here and outbox is not None:
                outbox.tell_aborted(request.number, Aborted(call.facts(), time.monotonic()))

    def _enter(self, request: EngineRequest) -> None:
        self._sequences[request.service_class] += request.sequences
        for outbox in self._outboxes.values():
            outbox.hurry()

    def _leave(self, request: EngineRequest) -> None:
        self._sequences[request.service_class] -= request.sequences
        if not any(self._sequences.values()):
            for outbox in self._outboxes.values():
                outbox.rest()

    def _state(self) -> ReplicaState:
        load, taken = self._engine.load()
        sequences = {name: count for name, count in self._sequences.items() if count}
        return ReplicaState(self._replica_id, taken, self._clock, sequences, load, self._engine.is_dead)

    async def frames(self, request: OpenChannel) -> AsyncIterator[str | Frame]:
        """A channel to one ingress: this replica's id, then frames."""
        if request.replica_id != self._replica_id:
            raise ValueError(f"{self._replica_id} is not the replica that {request} is for")
        yield self._replica_id
        outbox = Outbox(request.channel, _CHANNEL_IDLE_S, self._state)
        self._outboxes[request.ingress] = outbox
        try:
            async for frame in outbox.frames():
                yield frame
        finally:
            if self._outboxes.get(request.ingress) is outbox:
                del self._outboxes[request.ingress]
            outbox.break_up()

    async def pause(self, request: PauseAnswer) -> None:
        """Hold an answer back, or go on with it."""
        outbox = self._outboxes.get(request.ingress)
        if outbox is not None and request.replica_id == self._replica_id:
            outbox.pause(request.number, request.paused)

    async def unfinished_requests(self) -> int:
        """Sequences that the engine has not finished."""
        return self._engine.unfinished_requests

    async def check_health(self) -> None:
        """Called by Serve; what it raises makes Serve replace this replica."""
        await self._engine.check_health()

    async def __del__(self) -> None:
        if hasattr(self, "_engine"):
            await asyncio.to_thread(self._engine.shutdown)
