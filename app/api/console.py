"""The console: what each class gets now, what the pools do, and why the last slow requests were slow."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from starlette.responses import Response
from starlette.routing import Route as HttpRoute

from app.api.http import dump_json
from app.telemetry.explain import describe
from app.telemetry.ledger import Ledger
from app.telemetry.live import ClassSample, merged, sample, slow

if TYPE_CHECKING:
    from starlette.requests import Request

    from app.config import SluiceConfig
    from app.pools.dispatcher import Dispatcher
    from app.routing.keys import Keys
    from app.routing.replicas import Replica
    from app.telemetry.metrics import RequestMetrics

_PAGE = Path(__file__).with_name("console.html")
_WINDOW_S = 60.0
_SLOW = 20
# The page is complete in itself, and nobody else may show it in theirs.
_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What one ingress replica has seen. `slow`: a caller's requests, described."""

    classes: dict[str, ClassSample]
    in_flight: dict[str, int]
    held: dict[str, int]
    slow: list[dict[str, Any]]


# Asks all ingress replicas, this one among them.
AskAll = Callable[..., Awaitable[list[Any]]]


class Console:
    """What the console shows."""

    def __init__(
        self,
        config: SluiceConfig,
        dispatcher: Dispatcher,
        metrics: RequestMetrics,
        ledger: Ledger,
        keys: Keys,
        ask_all: AskAll | None = None,
    ) -> None:
        self._config = config
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._ledger = ledger
        self._keys = keys
        self._ask_all = ask_all
        self._html = _PAGE.read_bytes() if config.ingress.console else b""

    def configure(self, config: SluiceConfig) -> None:
        """Go by another configuration from now on."""
        self._config = config

    def routes(self) -> list[HttpRoute]:
        """Its page, and the figures on it."""
        return [
            HttpRoute("/console", self._page, methods=["GET"]),
            HttpRoute("/console/live", self._live, methods=["GET"]),
        ]

    def snapshot(self, key: str, window_s: float) -> Snapshot:
        """What this ingress replica has seen of late; of single requests, those of a key."""
        own = [record for record in self._ledger.last() if record.key == key]
        return Snapshot(
            sample(self._ledger.last(), time.time() - window_s),
            dict(self._metrics.running),
            self._dispatcher.admission.held_by_class(),
            [describe(record) for record in slow(own, _SLOW)],
        )

    async def _page(self, request: Request) -> Response:
        return Response(self._html, 200, _HEADERS, media_type="text/html; charset=utf-8")

    async def _live(self, request: Request) -> Response:
        caller = self._keys.identify(request.headers.get("authorization"))
        if self._ask_all is None:
            snapshots = [self.snapshot(caller.name, _WINDOW_S)]
        else:
            snapshots = await self._ask_all("console_snapshot", caller.name, _WINDOW_S)
        body = self._figures(snapshots)
        return Response(dump_json(body), 200, {"cache-control": "no-store"}, media_type="application/json")

    def _figures(self, snapshots: list[Snapshot]) -> dict[str, Any]:
        samples = merged(one.classes for one in snapshots)
        last = sorted((one for snapshot in snapshots for one in snapshot.slow), key=_time_of, reverse=True)
        return {
            "window_s": _WINDOW_S,
            "model": self._config.model.name,
            "ingress_replicas": len(snapshots),
            "classes": [
                {
                    "name": name,
                    "service_tier": entry.service_tier,
                    "ttft_target_ms": entry.targets.ttft_ms,
                    "ttft_target_ms_per_1k_tokens": entry.targets.ttft_ms_per_1k_tokens,
                    "tpot_target_ms": entry.targets.tpot_ms,
                    "in_flight": sum(one.in_flight.get(name, 0) for one in snapshots),
                    "held": sum(one.held.get(name, 0) for one in snapshots),
                    **samples.get(name, ClassSample()).figures(_WINDOW_S),
                }
                for name, entry in self._config.classes.items()
            ],
            "pools": self._pools(),
            "requests": last[:_SLOW],
        }

    def _pools(self) -> list[dict[str, Any]]:
        now = time.monotonic()
        by_pool: dict[str, list[dict[str, Any]]] = {name: [] for name in self._config.pools}
        for replica in self._dispatcher.fleet.replicas():
            by_pool[replica.pool].append(_replica(replica, now))
        return [{"name": name, "replicas": replicas} for name, replicas in by_pool.items()]


def _replica(replica: Replica, now: float) -> dict[str, Any]:
    state = replica.state
    load = state.load if state is not None else None
    told: dict[str, Any] = {
        "id": replica.replica_id,
        "answers": not replica.is_lost,
        "slots": replica.slots,
        "sequences": dict(replica.sequences()),
        "state_age_ms": None if state is None else round((now - replica.taken) * 1000),
    }
    if load is not None:
        told |= {
            "running": load.running,
            "waiting": load.waiting,
            "prefill_tokens": load.prefill_tokens,
            "kv_used_share": round(1 - load.kv_free_tokens / load.kv_tokens, 4) if load.kv_tokens else None,
            "step_ms": round(load.step_s * 1000, 2) if load.step_s else None,
        }
    return told


def _time_of(described: Mapping[str, Any]) -> float:
    received: float = described["received_at"]
    return received
