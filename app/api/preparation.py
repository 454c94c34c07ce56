"""From a client's JSON to a request that can be admitted, and to lesser ones where that one is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from app.api.demand import demand_of
from app.api.shortening import Shortener, check_length
from app.config import SluiceConfig
from app.errors import InvalidRequest, NotAllowed
from app.routing.classify import pools_for
from app.routing.keys import Caller, Keys
from app.routing.limits import with_output_cap, within_limits
from app.routing.replicas import Demand
from app.types import JsonObject, Rendered, Route

if TYPE_CHECKING:
    from app.api.generation import RendererPort


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request that can be admitted. `notes`: what its class's limits changed; `steps`: what it gave up not to be
    refused; `received`: by this clock."""

    route: Route
    body: JsonObject
    rendered: Rendered
    demand: Demand
    caller: Caller
    received: float
    notes: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()


class Preparation:
    """Fits, renders and measures requests."""

    def __init__(self, renderer: RendererPort, keys: Keys, shortener: Shortener) -> None:
        self._renderer = renderer
        self._keys = keys
        self._shortener = shortener

    async def prepare(
        self,
        config: SluiceConfig,
        service_class: str,
        route: Route,
        body: JsonObject,
        caller: Caller,
        received: float,
        max_prompt_tokens: int | None = None,
    ) -> Prepared:
        """A request of that class.

        `max_prompt_tokens`: a longer prompt is shortened, whatever the class says.

        Raises:
            RequestError: it cannot be served as it is.
        """
        self._keys.check_class(caller, service_class)
        body, shortened = await self._shortener.fit(config, service_class, route, body, max_prompt_tokens)
        rendered = await self._renderer.render(route, body)
        check_length(config, service_class, rendered)
        body, rendered, notes = within_limits(config, route, service_class, body, rendered)
        pools = pools_for(config, service_class, rendered.longest_prompt, rendered.max_output_tokens)
        demand = demand_of(config, service_class, pools, rendered, received, caller.name)
        told = (*([str(shortened)] if shortened is not None else []), *notes)
        return Prepared(route, body, rendered, demand, caller, received, told)

    async def lesser(self, config: SluiceConfig, prepared: Prepared) -> AsyncIterator[Prepared]:
        """The request with less and less of what it asked for; its `steps` tell what each step took."""
        ladder = config.classes[prepared.demand.service_class].degrade
        cap, asked = ladder.max_output_tokens, prepared.rendered.max_output_tokens
        if asked is None or asked > cap:
            prepared = dataclasses.replace(
                prepared,
                body=with_output_cap(prepared.route, prepared.body, cap),
                rendered=dataclasses.replace(prepared.rendered, max_output_tokens=cap),
                demand=dataclasses.replace(prepared.demand, output_tokens=cap * prepared.demand.sequences),
                steps=(f"max_tokens={cap}",),
            )
            yield prepared
        limit = max(ladder.min_prompt_tokens, int(ladder.prompt_share * prepared.rendered.longest_prompt))
        if limit < prepared.rendered.longest_prompt:
            name = prepared.demand.service_class
            shorter = await self._again(config, name, prepared, limit)
            if shorter is not None and shorter.rendered.longest_prompt < prepared.rendered.longest_prompt:
                steps = (*prepared.steps, *shorter.notes)
                prepared = dataclasses.replace(shorter, notes=prepared.notes, steps=steps)
                yield prepared
        lower = ladder.demote_to or list(config.classes)[-1]
        if lower != prepared.demand.service_class:
            demoted = await self._again(config, lower, prepared, None)
            if demoted is not None:
                notes = (*prepared.notes, *(note for note in demoted.notes if note not in prepared.notes))
                yield dataclasses.replace(demoted, notes=notes, steps=(*prepared.steps, f"class={lower}"))

    async def _again(
        self, config: SluiceConfig, service_class: str, prepared: Prepared, limit: int | None
    ) -> Prepared | None:
        try:
            return await self.prepare(
                config, service_class, prepared.route, prepared.body, prepared.caller, prepared.received, limit
            )
        except (InvalidRequest, NotAllowed):
            # It cannot be had this way.
            return None
