"""Chat completions that the ingress itself asks for, in the least important class: summaries of long prompts."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from typing import TYPE_CHECKING

from app.api.demand import demand_of, engine_request
from app.config import SluiceConfig
from app.errors import InternalError, from_engine
from app.routing.classify import pools_for
from app.telemetry.timeline import read_clock
from app.types import Head, JsonObject, Rendered, Timeline

if TYPE_CHECKING:
    from app.api.generation import RendererPort
    from app.pools.client import PoolClient
    from app.pools.dispatcher import Dispatcher, Ticket


class Completion:
    """Asks for one answer at a time."""

    def __init__(self, renderer: RendererPort, pools: Mapping[str, PoolClient], dispatcher: Dispatcher) -> None:
        self._renderer = renderer
        self._pools = pools
        self._dispatcher = dispatcher

    async def __call__(self, config: SluiceConfig, text: str, max_tokens: int) -> str:
        """The answer to a user's message, by the configuration of the request that needs it.

        Raises:
            RequestError: there is none.
        """
        name = list(config.classes)[-1]
        received = time.monotonic()
        body: JsonObject = {
            "messages": [{"role": "user", "content": text}],
            "max_completion_tokens": max_tokens,
            "temperature": 0,
        }
        rendered = await self._renderer.render("chat", body)
        pools = pools_for(config, name, rendered.longest_prompt, rendered.max_output_tokens)
        demand = demand_of(config, name, pools, rendered, received, "")
        ticket = await self._dispatcher.admit(demand)
        try:
            head = await self._ask(config, ticket, body, rendered)
        finally:
            ticket.close()
        if head.error is not None:
            kind, message, param = head.error
            raise from_engine(head.status, kind, message, param)
        content = json.loads(head.body)["choices"][0]["message"]["content"]
        if not isinstance(content, str):
            raise InternalError("A summary of the prompt could not be made.")
        return content

    async def _ask(self, config: SluiceConfig, ticket: Ticket, body: JsonObject, rendered: Rendered) -> Head:
        client = self._pools[ticket.placement.pool]
        received = ticket.demand.received
        stream = client.dispatch(
            engine_request(
                config,
                ticket,
                "chat",
                body,
                rendered,
                request_id=uuid.uuid4().hex,
                timeline=Timeline(received=received, rendered=received),
                clock=read_clock(),
            )
        )
        try:
            await stream.accepted(client.accept_timeout_s)
            return await stream.head()
        finally:
            stream.cancel()
