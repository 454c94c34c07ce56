"""From a rendered request to what admission is asked for, and what a replica is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from app.config import SluiceConfig
from app.routing.placement import prefix_hashes
from app.routing.replicas import Demand
from app.types import ClockReading, EngineRequest, JsonObject, Rendered, Route, Timeline

if TYPE_CHECKING:
    from collections.abc import Mapping

    from app.pools.dispatcher import Ticket


def demand_of(
    config: SluiceConfig, service_class: str, pools: tuple[str, ...], rendered: Rendered, received: float, key: str
) -> Demand:
    """The demand of a request of a class, received at `received` by this clock; `key`: whose it is."""
    entry = config.classes[service_class]
    step_share = entry.effective_dials.step_tpot_share
    tpot_s = entry.targets.tpot_s
    ids = rendered.prompt_token_ids
    output = rendered.max_output_tokens
    return Demand(
        service_class=service_class,
        prompt_tokens=rendered.prompt_tokens,
        received=received,
        ttft_s=entry.targets.ttft_s(rendered.longest_prompt),
        tpot_s=None if tpot_s is None or step_share is None else tpot_s * step_share,
        output_tokens=None if output is None else output * rendered.sequences,
        sequences=rendered.sequences,
        key=key,
        prefix=prefix_hashes(ids[0]) if ids is not None and len(ids) == 1 else (),
        pools=pools,
    )


def engine_request(
    config: SluiceConfig,
    ticket: Ticket,
    route: Route,
    body: JsonObject,
    rendered: Rendered,
    *,
    request_id: str,
    timeline: Timeline,
    clock: ClockReading,
    trace_context: Mapping[str, str] | None = None,
    notes: tuple[str, ...] = (),
) -> EngineRequest:
    """What is sent to the replica that an admitted request was placed on."""
    demand, placement = ticket.demand, ticket.placement
    entry = config.classes[demand.service_class]
    return EngineRequest(
        request_id=request_id,
        route=route,
        body=body,
        prompt_token_ids=rendered.prompt_token_ids,
        service_class=demand.service_class,
        service_tier=entry.service_tier,
        pool=placement.pool,
        ttft_s=None if demand.ttft_s is None else demand.ttft_s + ticket.later_s,
        tpot_s=demand.tpot_s,
        timeline=timeline,
        clock=clock,
        trace_context=dict(trace_context or {}),
        sequences=demand.sequences,
        collect_s=entry.collect_ms / 1000,
        notes=notes,
        replica_id=placement.replica_id,
    )
