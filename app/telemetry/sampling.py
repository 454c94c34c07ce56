"""Which traces are worth keeping, decided when a request has ended. Pure.

Kept always: what ended with an error, missed its targets or was refused, was preempted, placed again or changed not to
be refused, and the slowest of its class. Of the rest, a share by trace id, so that all who sample by the same share
keep the same traces.
"""

from __future__ import annotations

import bisect
from collections import deque

from app.telemetry.record import RequestRecord
from app.telemetry.timeline import time_per_output_token, time_to_first_token

# The slowest are told from the last requests of their class: those above this quantile of so many.
_SLOW_QUANTILE = 0.95
_WINDOW = 256
# Of fewer, none is slow.
_LEAST = 32
# As OpenTelemetry's TraceIdRatioBased: the lower 64 bits decide.
_ID_BITS = (1 << 64) - 1


class _Slowest:
    """Tells whether a figure is among the largest of the last ones."""

    def __init__(self) -> None:
        self._last: deque[float] = deque()
        self._ordered: list[float] = []

    def has(self, value: float | None) -> bool:
        """Whether it is; it is one of the last from now on."""
        if value is None:
            return False
        count = len(self._ordered)
        is_slow = count >= _LEAST and value > self._ordered[int(_SLOW_QUANTILE * count)]
        if count == _WINDOW:
            del self._ordered[bisect.bisect_left(self._ordered, self._last.popleft())]
        self._last.append(value)
        bisect.insort(self._ordered, value)
        return is_slow


class TailChoice:
    """Chooses traces. `ratio`: share of the ordinary ones that is kept."""

    def __init__(self, ratio: float) -> None:
        self._bound = round(ratio * (_ID_BITS + 1))
        self._slowest: dict[tuple[str, str], _Slowest] = {}

    def keeps(self, trace_id: int, record: RequestRecord) -> bool:
        """Whether the trace of this request, which has ended, is kept."""
        figures = {"ttft": time_to_first_token(record.timeline), "tpot": time_per_output_token(record.timeline)}
        # All of them, so that each window goes on.
        slow = [
            self._slowest.setdefault((record.service_class, name), _Slowest()).has(value)
            for name, value in figures.items()
        ]
        is_telling = (
            record.outcome in ("failed", "evicted")
            or record.verdict not in ("met", None)
            or record.attempts > 1
            or bool(record.steps)
            or record.timeline.preemptions > 0
        )
        return any(slow) or is_telling or (trace_id & _ID_BITS) < self._bound
