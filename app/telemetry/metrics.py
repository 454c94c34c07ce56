"""Request metrics: through Ray, for its dashboard and Prometheus, which prefix every name with `ray_`.

All of them are counted from a request's record, once, when it ends; only gauges say what is going on.
"""

from __future__ import annotations

import asyncio
from collections import Counter as Tally
from collections.abc import Callable, Iterable, Mapping

from ray.util.metrics import Counter, Gauge, Histogram

from app.telemetry.record import RequestRecord
from app.telemetry.timeline import phases, queue_parts, time_per_output_token, time_to_first_token

SECONDS = [
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0,
    5.0, 7.5, 10.0, 20.0, 30.0, 60.0, 120.0, 300.0, 600.0,
]  # fmt: skip
# First tokens are what promises are about.
TTFT_SECONDS = [
    0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.065, 0.08, 0.1, 0.125, 0.15, 0.175, 0.2, 0.25, 0.3,
    0.35, 0.4, 0.45, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.25, 1.5, 1.75, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0, 6.0, 8.0, 10.0, 15.0,
    20.0, 30.0, 45.0, 60.0, 90.0, 120.0, 300.0, 600.0,
]  # fmt: skip
PER_TOKEN_SECONDS = [
    0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5,
    1.0, 2.0,
]  # fmt: skip
_TOKENS = [16.0 * 2**power for power in range(15)]
# Of real over predicted TTFT: 1 for exact.
_RATIOS = [0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0, 8.0]

# Ray drops a gauge that is not set again within about 15 s.
_GAUGE_PERIOD_S = 5.0

# What a request gave up not to be refused, by how its steps begin.
STEPS = ("max_tokens", "prompt", "class")


def why_wasted(record: RequestRecord) -> str:
    """Why tokens were computed for nothing, in a word."""
    return "cancelled" if record.outcome == "cancelled" else record.verdict or record.outcome


class RequestMetrics:
    """Counts and times requests, in one ingress process.

    Labels have few values: classes and pools of the configuration, outcomes, verdicts, reasons, phases.
    """

    def __init__(
        self,
        classes: Iterable[str],
        held: Callable[[], Mapping[str, int]] = dict,
        answering: Callable[[], Mapping[str, int]] = dict,
    ) -> None:
        """`held`: tells how many requests of each class are held; `answering`: how many replicas of each pool
        answer."""
        by_pool = ("class", "pool")
        self._held = held
        self._answering = answering
        self._requests = Counter("sluice_requests", "Requests that ended, by outcome.", tag_keys=(*by_pool, "outcome"))
        self._verdicts = Counter(
            "sluice_slo_requests",
            "Requests that were promised something, by what became of it: met, ttft_missed, tpot_missed, refused, "
            "failed. Attainment is the share of met; goodput is their rate.",
            tag_keys=(*by_pool, "verdict"),
        )
        self._refusals = Counter("sluice_refusals", "Requests refused, by reason.", tag_keys=("class", "reason"))
        self._degradations = Counter(
            "sluice_degradations", "Requests that gave something up not to be refused.", tag_keys=("class", "step")
        )
        self._spillovers = Counter(
            "sluice_spillovers", "Requests served outside their home pool.", tag_keys=("class", "home_pool", "pool")
        )
        self._retries = Counter("sluice_retries", "Times that a request was placed again.", tag_keys=by_pool)
        self._preemptions = Counter(
            "sluice_preemptions", "Times that engines took a slot or KV back.", tag_keys=by_pool
        )
        self._cancels = Counter(
            "sluice_cancels",
            "Requests that were given up, by the phase that they were in.",
            tag_keys=(*by_pool, "phase"),
        )
        self._aborts = Histogram(
            "sluice_time_to_abort_seconds",
            "From when a client was known to have left until the engine had dropped its request.",
            boundaries=SECONDS,
            tag_keys=by_pool,
        )
        self._wasted_tokens = Counter(
            "sluice_wasted_tokens",
            "Prompt and output tokens computed for requests that did not get what they were promised, by why.",
            tag_keys=(*by_pool, "why"),
        )
        self._in_flight = Gauge("sluice_requests_in_flight", "Requests being handled.", tag_keys=("class",))
        self._held_gauge = Gauge("sluice_requests_held", "Requests held for room.", tag_keys=("class",))
        self._answering_gauge = Gauge(
            "sluice_replicas_answering", "Replicas that answer, as an ingress replica sees it.", tag_keys=("pool",)
        )
        self._slow_readers = Counter(
            "sluice_slow_readers", "Requests cancelled because their clients had stopped reading.", tag_keys=("class",)
        )
        self._running: Tally[str] = Tally(dict.fromkeys(classes, 0))
        self._input_tokens = Counter("sluice_input_tokens", "Prompt tokens of finished requests.", tag_keys=by_pool)
        self._cached_tokens = Counter(
            "sluice_cached_tokens", "Prompt tokens of finished requests found in a prefix cache.", tag_keys=by_pool
        )
        self._output_tokens = Counter("sluice_output_tokens", "Generated tokens.", tag_keys=by_pool)

        def histogram(name: str, text: str, boundaries: list[float]) -> Histogram:
            return Histogram(name, text, boundaries=boundaries, tag_keys=by_pool)

        self._ttft = histogram("sluice_time_to_first_token_seconds", "Received to first token sent.", TTFT_SECONDS)
        self._tpot = histogram(
            "sluice_time_per_output_token_seconds", "(last - first token) / (n - 1).", PER_TOKEN_SECONDS
        )
        self._gaps = histogram(
            "sluice_inter_token_latency_seconds",
            "Between a token and the one before it, in the engine: a sample of every 16th.",
            PER_TOKEN_SECONDS,
        )
        self._total = histogram("sluice_request_duration_seconds", "Received to finished.", SECONDS)
        self._prompts = histogram("sluice_prompt_tokens", "Prompt tokens per finished request.", _TOKENS)
        self._phases = {
            "render": histogram("sluice_render_seconds", "Received to rendered.", SECONDS),
            "queue": histogram("sluice_queue_seconds", "Rendered to first scheduled.", SECONDS),
            "hold": histogram("sluice_hold_seconds", "Rendered to dispatched: the ingress's part of queue.", SECONDS),
            "engine_wait": histogram(
                "sluice_engine_wait_seconds", "Dispatched to first scheduled: the engine's part of queue.", SECONDS
            ),
            "prefill": histogram("sluice_prefill_seconds", "First scheduled to first token.", SECONDS),
            "decode": histogram("sluice_decode_seconds", "First to last token.", SECONDS),
            "relay": histogram("sluice_relay_seconds", "Last token to the last byte handed on.", SECONDS),
        }
        self._spent = Counter(
            "sluice_spent_seconds",
            "Seconds that finished requests spent in each phase, until their first tokens, and in all: exact sums, "
            "where those of Ray's histograms are of their buckets' middles.",
            tag_keys=(*by_pool, "phase"),
        )
        self._prediction = histogram(
            "sluice_ttft_over_predicted_ratio", "Time to first token over what admission predicted.", _RATIOS
        )

    @property
    def running(self) -> Mapping[str, int]:
        """Requests being handled, by class."""
        return self._running

    def entered(self, service_class: str) -> None:
        """A request of this class is being handled."""
        self._move(service_class, 1)

    def left(self, service_class: str) -> None:
        """It is not any more."""
        self._move(service_class, -1)

    async def keep_gauges(self) -> None:
        """Keep the gauges' values exported while nothing changes; runs until it is cancelled."""
        while True:
            held = self._held()
            for pool, count in self._answering().items():
                self._answering_gauge.set(count, {"pool": pool})
            for service_class, running in self._running.items():
                self._in_flight.set(running, {"class": service_class})
                self._held_gauge.set(held.get(service_class, 0), {"class": service_class})
            await asyncio.sleep(_GAUGE_PERIOD_S)

    def _move(self, service_class: str, by: int) -> None:
        self._running[service_class] += by
        self._in_flight.set(self._running[service_class], {"class": service_class})

    def ended(self, record: RequestRecord) -> None:
        """A request ended. Only finished ones are timed."""
        timeline = record.timeline
        by_class = {"class": record.service_class}
        tags = {**by_class, "pool": record.pool}
        self._requests.inc(1, {**tags, "outcome": record.outcome})
        verdict = record.verdict
        if verdict is not None:
            self._verdicts.inc(1, {**tags, "verdict": verdict})
        if verdict == "refused":
            self._refusals.inc(1, {**by_class, "reason": record.reason})
        for step in record.steps:
            name = step.partition("=")[0]
            if name in STEPS:
                self._degradations.inc(1, {**by_class, "step": name})
        if record.is_spilled:
            self._spillovers.inc(1, {**tags, "home_pool": record.home_pool})
        if record.attempts > 1:
            self._retries.inc(record.attempts - 1, tags)
        if timeline.preemptions:
            self._preemptions.inc(timeline.preemptions, tags)
        if record.outcome == "cancelled":
            self._cancels.inc(1, {**tags, "phase": record.phase})
            if record.abort_s is not None:
                self._aborts.observe(record.abort_s, tags)
        if record.is_slow_reader:
            self._slow_readers.inc(1, by_class)
        if record.wasted_tokens:
            self._wasted_tokens.inc(record.wasted_tokens, {**tags, "why": why_wasted(record)})
        if timeline.output_tokens:
            self._output_tokens.inc(timeline.output_tokens, tags)
        if record.outcome == "finished":
            self._time(record, tags)

    def _time(self, record: RequestRecord, tags: dict[str, str]) -> None:
        timeline = record.timeline
        if timeline.prompt_tokens:
            self._input_tokens.inc(timeline.prompt_tokens, tags)
            self._prompts.observe(timeline.prompt_tokens, tags)
        if timeline.cached_tokens:
            self._cached_tokens.inc(timeline.cached_tokens, tags)
        for phase in [*phases(timeline, record.end), *queue_parts(timeline, record.end)]:
            self._phases[phase.name].observe(phase.seconds, tags)
            self._spend(phase.seconds, tags, phase.name)
        ttft, tpot = time_to_first_token(timeline), time_per_output_token(timeline)
        if ttft is not None:
            self._ttft.observe(ttft, tags)
            self._spend(ttft, tags, "first_token")
            if record.predicted_ttft_s:
                self._prediction.observe(ttft / record.predicted_ttft_s, tags)
        if tpot is not None:
            self._tpot.observe(tpot, tags)
        for gap in timeline.causes.gaps:
            self._gaps.observe(gap, tags)
        self._total.observe(record.end - timeline.received, tags)
        self._spend(record.end - timeline.received, tags, "total")

    def _spend(self, seconds: float, tags: dict[str, str], phase: str) -> None:
        # Counters refuse to gain nothing.
        if seconds > 0:
            self._spent.inc(seconds, {**tags, "phase": phase})


class EntryMetrics:
    """Counts what only Ray Serve's HTTP entry sees."""

    def __init__(self) -> None:
        self._disconnects = Counter(
            "sluice_client_disconnects", "Clients that went away before their answer was complete."
        )

    def client_left(self) -> None:
        """A client went away before its answer was complete, perhaps before the request reached an ingress."""
        self._disconnects.inc()
