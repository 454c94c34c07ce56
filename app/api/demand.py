"""From a rendered request to what admission is asked for."""

from __future__ import annotations

from app.config import SluiceConfig
from app.routing.placement import prefix_hashes
from app.routing.replicas import Demand
from app.types import Rendered


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
