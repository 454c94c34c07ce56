"""What is known of a request when it ends. Pure.

Metrics, the access log, spans, the console and `GET /v1/requests/{id}` all read this one record.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from app.telemetry.timeline import phases, time_per_output_token, time_to_first_token
from app.types import UNKNOWN, Outcome, Route, Timeline

# What became of the promise that a class makes. A request that its client gave up, or that could not be served as it
# was, was promised nothing.
Verdict = Literal["met", "ttft_missed", "tpot_missed", "refused", "failed"]


class RecordSink(Protocol):
    """Who wants to know of every request that ended."""

    def ended(self, record: RequestRecord) -> None:
        """A request ended. Must not raise, and not take long."""


# Statuses by which a server says no to a request that it could have served.
_REFUSALS = frozenset({429, 503})


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request that ended.

    `received_at`: Unix time, in seconds; `end`: on the timeline's clock. `home_pool`: where the rule table sends it;
    `pool`: where it was served. `ttft_target_s`, `tpot_target_s`: None for none. `reason`: why it was refused, or the
    kind of the error; "" for none. `predicted_ttft_s`, `predicted_wait_s`: what admission expected, the latter for
    others' work. `steps`: what it gave up not to be refused; `notes`: what its class's limits changed. `abort_s`: from
    its client's leaving until its engine had dropped it; None where that is not known. `trace_id`, `span_id`: "" where
    it is not traced, or its trace is not kept.
    """

    request_id: str
    route: Route
    timeline: Timeline
    end: float
    received_at: float
    outcome: Outcome
    service_class: str = UNKNOWN
    home_pool: str = UNKNOWN
    pool: str = UNKNOWN
    replica_id: str = ""
    key: str = ""
    trace_id: str = ""
    status: int | None = None
    reason: str = ""
    ttft_target_s: float | None = None
    tpot_target_s: float | None = None
    predicted_ttft_s: float | None = None
    predicted_wait_s: float | None = None
    attempts: int = 1
    steps: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    is_slow_reader: bool = False
    abort_s: float | None = None
    span_id: str = ""

    @property
    def is_spilled(self) -> bool:
        """Whether it was served outside its home pool."""
        return self.timeline.dispatched is not None and self.pool != self.home_pool

    @property
    def phase(self) -> str:
        """The phase that it ended in."""
        parts = phases(self.timeline, self.end)
        return parts[-1].name if parts else "render"

    @property
    def verdict(self) -> Verdict | None:
        """Whether it got what its class promises; None where it was promised nothing."""
        if self.outcome in ("rejected", "evicted"):
            return "refused" if self.status in _REFUSALS else None
        ttft, target = time_to_first_token(self.timeline), self.ttft_target_s
        if target is not None and (self.end - self.timeline.received if ttft is None else ttft) > target:
            return "failed" if self.outcome == "failed" else "ttft_missed"
        if self.outcome == "cancelled":
            return None
        if self.outcome == "failed":
            return "failed"
        tpot = time_per_output_token(self.timeline)
        if self.tpot_target_s is not None and tpot is not None and tpot > self.tpot_target_s:
            return "tpot_missed"
        return "met"

    @property
    def wasted_tokens(self) -> int:
        """Prompt and output tokens that were computed and not of the use that they were promised to be."""
        if self.timeline.scheduled is None or (self.outcome == "finished" and self.verdict in ("met", None)):
            return 0
        prompt = self.timeline.prompt_tokens - self.timeline.cached_tokens
        return (prompt if self.timeline.first_token is not None else 0) + self.timeline.output_tokens
