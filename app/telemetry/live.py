"""What each class got of late, from the records of the last requests. Pure.

Samples of several ingress replicas are put together before anything is computed from them: percentiles cannot be.
"""

from __future__ import annotations

import math
from collections import Counter as Tally
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.telemetry.record import RequestRecord
from app.telemetry.timeline import phases, time_per_output_token, time_to_first_token

_PERCENTILES = (50, 95, 99)
_PHASES = ("queue", "prefill", "decode")


@dataclass(slots=True)
class ClassSample:
    """What one class's requests got that ended within a stretch of time. Times in seconds."""

    ttft: list[float] = field(default_factory=list)
    tpot: list[float] = field(default_factory=list)
    phases: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in _PHASES})
    verdicts: Tally[str] = field(default_factory=Tally)
    reasons: Tally[str] = field(default_factory=Tally)
    requests: int = 0
    spilled: int = 0
    cancelled: int = 0
    output_tokens: int = 0

    def add(self, record: RequestRecord) -> None:
        """One of them."""
        self.requests += 1
        self.output_tokens += record.timeline.output_tokens
        self.spilled += record.is_spilled
        self.cancelled += record.outcome == "cancelled"
        verdict = record.verdict
        if verdict is not None:
            self.verdicts[verdict] += 1
        if verdict == "refused":
            self.reasons[record.reason] += 1
        if record.outcome != "finished":
            return
        ttft, tpot = time_to_first_token(record.timeline), time_per_output_token(record.timeline)
        if ttft is not None:
            self.ttft.append(ttft)
        if tpot is not None:
            self.tpot.append(tpot)
        for phase in phases(record.timeline, record.end):
            if phase.name in self.phases:
                self.phases[phase.name].append(phase.seconds)

    def merge(self, other: ClassSample) -> None:
        """What another ingress replica saw."""
        self.ttft += other.ttft
        self.tpot += other.tpot
        for name, values in other.phases.items():
            self.phases[name] += values
        self.verdicts += other.verdicts
        self.reasons += other.reasons
        self.requests += other.requests
        self.spilled += other.spilled
        self.cancelled += other.cancelled
        self.output_tokens += other.output_tokens

    def figures(self, window_s: float) -> dict[str, Any]:
        """As the console shows them; times in milliseconds, None where there was nothing."""
        judged = sum(self.verdicts.values())
        return {
            "requests": self.requests,
            "requests_per_s": round(self.requests / window_s, 3),
            "goodput_per_s": round(self.verdicts["met"] / window_s, 3),
            "attainment": round(self.verdicts["met"] / judged, 4) if judged else None,
            "output_tokens_per_s": round(self.output_tokens / window_s, 1),
            "ttft_ms": percentiles(self.ttft),
            "tpot_ms": percentiles(self.tpot),
            "phases_ms": {name: percentiles(values) for name, values in self.phases.items()},
            "verdicts": dict(self.verdicts),
            "refused_by_reason": dict(self.reasons),
            "spilled": self.spilled,
            "cancelled": self.cancelled,
        }


def sample(records: Iterable[RequestRecord], since: float) -> dict[str, ClassSample]:
    """By class, of the requests that ended since then (Unix time); `records`: the last first."""
    samples: dict[str, ClassSample] = {}
    for record in records:
        if record.received_at + record.end - record.timeline.received < since:
            break
        samples.setdefault(record.service_class, ClassSample()).add(record)
    return samples


def merged(all_samples: Iterable[Mapping[str, ClassSample]]) -> dict[str, ClassSample]:
    """What several ingress replicas saw, put together."""
    result: dict[str, ClassSample] = {}
    for samples in all_samples:
        for name, one in samples.items():
            result.setdefault(name, ClassSample()).merge(one)
    return result


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Some percentiles of seconds, in milliseconds; None of nothing. The smallest value that so many are not above."""
    if not values:
        return None
    ordered = sorted(values)
    return {
        f"p{percent}": round(ordered[max(0, math.ceil(percent / 100 * len(ordered)) - 1)] * 1000, 3)
        for percent in _PERCENTILES
    }


def slow(records: Iterable[RequestRecord], most: int) -> list[RequestRecord]:
    """The last requests that missed what they were promised or were refused, then those that took longest, `most`."""
    kept = list(records)
    missed = [record for record in kept if record.verdict not in ("met", None)][:most]
    rest = sorted((record for record in kept if record.verdict == "met"), key=_ttft_share, reverse=True)
    return missed + rest[: most - len(missed)]


def _ttft_share(record: RequestRecord) -> float:
    """How much of its target a request's first token took; of those without one, seconds."""
    ttft = time_to_first_token(record.timeline)
    return 0.0 if ttft is None else ttft / (record.ttft_target_s or 60.0)
