"""Request metrics through Ray, for its dashboard and Prometheus. Ray prefixes every name with `ray_`."""

from __future__ import annotations

import asyncio
from collections import Counter as Tally
from collections.abc import Iterable

from ray.util.metrics import Counter, Gauge, Histogram

from app.telemetry.timeline import phases, time_per_output_token, time_to_first_token
from app.types import Outcome, Timeline

_SECONDS = [
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0,
    5.0, 7.5, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0,
]  # fmt: skip
_PER_TOKEN_SECONDS = [
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5,
    1.0, 2.0,
]  # fmt: skip

# Ray drops a gauge that is not set again within about 15 s.
_GAUGE_PERIOD_S = 5.0


class RequestMetrics:
    """Counts and times requests by class, pool and outcome, in one ingress process."""

    def __init__(self, classes: Iterable[str]) -> None:
        by_class = ("class", "pool")
        self._requests = Counter("sluice_requests", "Requests that ended, by outcome.", tag_keys=(*by_class, "outcome"))
        self._in_flight = Gauge("sluice_requests_in_flight", "Requests being handled.", tag_keys=("class",))
        self._slow_readers = Counter(
            "sluice_slow_readers", "Requests cancelled because their clients had stopped reading.", tag_keys=("class",)
        )
        self._running: Tally[str] = Tally(dict.fromkeys(classes, 0))
        self._input_tokens = Counter("sluice_input_tokens", "Prompt tokens of finished requests.", tag_keys=by_class)
        self._output_tokens = Counter("sluice_output_tokens", "Generated tokens.", tag_keys=by_class)

        def histogram(name: str, text: str, boundaries: list[float]) -> Histogram:
            return Histogram(name, text, boundaries=boundaries, tag_keys=by_class)

        self._ttft = histogram("sluice_time_to_first_token_seconds", "Received to first token sent.", _SECONDS)
        self._tpot = histogram(
            "sluice_time_per_output_token_seconds", "(last - first token) / (n - 1).", _PER_TOKEN_SECONDS
        )
        self._total = histogram("sluice_request_duration_seconds", "Received to finished.", _SECONDS)
        self._phases = {
            "queue": histogram("sluice_queue_seconds", "Rendered to first scheduled.", _SECONDS),
            "prefill": histogram("sluice_prefill_seconds", "First scheduled to first token.", _SECONDS),
            "decode": histogram("sluice_decode_seconds", "First to last token.", _SECONDS),
        }

    def slow_reader(self, service_class: str) -> None:
        """A request was cancelled because its client had stopped reading."""
        self._slow_readers.inc(1, {"class": service_class})

    def entered(self, service_class: str) -> None:
        """A request of this class is being handled."""
        self._move(service_class, 1)

    def left(self, service_class: str) -> None:
        """It is not any more."""
        self._move(service_class, -1)

    async def keep_gauges(self) -> None:
        """Keep the gauges' values exported while nothing changes; runs until it is cancelled."""
        while True:
            for service_class, running in self._running.items():
                self._in_flight.set(running, {"class": service_class})
            await asyncio.sleep(_GAUGE_PERIOD_S)

    def _move(self, service_class: str, by: int) -> None:
        self._running[service_class] += by
        self._in_flight.set(self._running[service_class], {"class": service_class})

    def ended(self, service_class: str, pool: str, outcome: Outcome, timeline: Timeline, end: float) -> None:
        """A request ended at `end` (seconds on the timeline's clock). Only finished ones are timed."""
        tags = {"class": service_class, "pool": pool}
        self._requests.inc(1, {**tags, "outcome": outcome})
        if timeline.output_tokens:
            self._output_tokens.inc(timeline.output_tokens, tags)
        if outcome != "finished":
            return
        if timeline.prompt_tokens:
            self._input_tokens.inc(timeline.prompt_tokens, tags)
        for phase in phases(timeline, end):
            if phase.name in self._phases:
                self._phases[phase.name].observe(phase.seconds, tags)
        ttft, tpot = time_to_first_token(timeline), time_per_output_token(timeline)
        if ttft is not None:
            self._ttft.observe(ttft, tags)
        if tpot is not None:
            self._tpot.observe(tpot, tags)
        self._total.observe(end - timeline.received, tags)


class EntryMetrics:
    """Counts what only Ray Serve's HTTP entry sees."""

    def __init__(self) -> None:
        self._disconnects = Counter(
            "sluice_client_disconnects", "Clients that went away before their answer was complete."
        )

    def client_left(self) -> None:
        """A client went away before its answer was complete, perhaps before the request reached an ingress."""
        self._disconnects.inc()
