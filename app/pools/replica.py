"""The deployment of a pool: a thin shell around one engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from opentelemetry.trace import SpanKind
from ray import serve

from app.config import ModelConfig, PoolConfig, TracingConfig
from app.engine.environment import prepare_engine_process
from app.telemetry.timeline import clock_shift, read_clock, with_facts
from app.telemetry.tracing import Tracing, end_span, mark_outcome
from app.types import Accepted, EngineRequest, Head, Outcome, ReplicaItem, Tail


class VLLMReplica:
    """One replica of a pool."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, pool: str, model: ModelConfig, config: PoolConfig, tracing: TracingConfig
    ) -> None:
        # vLLM reads its environment when it is imported, so it is imported after that is set. This runs on the
        # replica's event loop thread, which lives as long as the process.
        prepare_engine_process(config.executor)
        from app.engine.vllm import VLLMEngine

        self._pool = pool
        self._tracing = Tracing(tracing, role=pool)
        self._replica_id = serve.get_replica_context().replica_id.unique_id
        self._engine = VLLMEngine(model, config, ray_metrics=True)

    async def generate(self, request: EngineRequest) -> AsyncIterator[ReplicaItem]:
        """The items of one request's answer: Accepted, Head and, if it is streamed, SSE bytes and a Tail."""
        clock = read_clock()
        started = time.monotonic()
        yield Accepted(self._replica_id)
        call = self._engine.new_call()
        outcome: Outcome = "cancelled"
        error_type: str | None = None
        try:
            async for item in self._engine.answer(request, call):
                if isinstance(item, Head):
                    if item.error is not None:
                        outcome = "rejected" if item.status < 500 else "failed"
                        error_type = item.error[0]
                    elif item.final:
                        outcome = "finished"
                elif isinstance(item, Tail):
                    outcome = "failed" if item.failed else "finished"
                yield item
        except Exception as error:
            outcome, error_type = "failed", type(error).__name__
            raise
        finally:
            if self._tracing.enabled:
                end = time.monotonic()
                span = self._tracing.start("engine", SpanKind.INTERNAL, request.trace_context, started, clock)
                attributes = {"sluice.pool": self._pool, "sluice.replica": self._replica_id}
                span.set_attributes({**attributes, "sluice.request_id": request.request_id})
                mark_outcome(span, outcome, error_type)
                end_span(span, end, clock)
                # The phases are told on the ingress's clock, like the span that they belong to.
                timeline = with_facts(request.timeline, call.facts(), request.clock)
                self._tracing.write_phases(
                    request.trace_context,
                    timeline,
                    request.clock,
                    end + clock_shift(clock, request.clock),
                    ("queue", "prefill", "decode"),
                    outcome,
                    attributes,
                )

    async def unfinished_requests(self) -> int:
        """Sequences that the engine has not finished."""
        return self._engine.unfinished_requests

    async def check_health(self) -> None:
        """Called by Serve; what it raises makes Serve replace this replica."""
        await self._engine.check_health()

    async def __del__(self) -> None:
        if hasattr(self, "_engine"):
            await asyncio.to_thread(self._engine.shutdown)
        if hasattr(self, "_tracing"):
            await asyncio.to_thread(self._tracing.shutdown)
