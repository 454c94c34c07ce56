"""The arithmetic of a request's timeline. Pure.

Phases follow the glossary: render is received to rendered; queue is rendered to first scheduled, of which hold is the
ingress's part (rendered to dispatched) and engine wait the rest; prefill is first scheduled to first token; decode is
first to last token; relay is last token to finished. They add up to the whole, received to finished.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from app.types import ClockReading, EngineCauses, EngineFacts, Timeline

_BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")


def read_clock() -> ClockReading:
    """This process's monotonic clock, as of now."""
    return ClockReading(boot_id=_boot_id(), wall_offset=time.time() - time.monotonic())


@cache
def _boot_id() -> str:
    """The kernel's boot, which outlives this process; empty where the kernel does not tell it."""
    return _BOOT_ID_FILE.read_text().strip() if _BOOT_ID_FILE.exists() else ""


def clock_shift(source: ClockReading, target: ClockReading) -> float:
    """Seconds to add to a timestamp of `source` to get one of `target`.

    Zero within one boot of one machine, where the monotonic clock is shared and exact; between machines, as good as
    their wall clocks agree.
    """
    if source.boot_id and source.boot_id == target.boot_id:
        return 0.0
    return source.wall_offset - target.wall_offset


def with_facts(timeline: Timeline, facts: EngineFacts, clock: ClockReading) -> Timeline:
    """The timeline (on `clock`) completed by what an engine knows.

    Timestamps from another machine are moved into the order in which things happen, so that clocks that disagree
    never give a negative phase.
    """
    shift = clock_shift(facts.clock, clock)
    floor = timeline.dispatched if timeline.dispatched is not None else timeline.received
    stamps: list[float | None] = []
    for stamp in (facts.queued, facts.scheduled, facts.first_token, facts.last_token):
        if stamp is not None:
            floor = max(floor, stamp + shift)
            stamps.append(floor)
        else:
            stamps.append(None)
    queued, scheduled, first_token, last_token = stamps
    return replace(
        timeline,
        queued=queued,
        scheduled=scheduled,
        first_token=first_token,
        last_token=last_token,
        prompt_tokens=facts.prompt_tokens or timeline.prompt_tokens,
        cached_tokens=facts.cached_tokens,
        output_tokens=facts.output_tokens,
        sequences=facts.sequences,
        preemptions=facts.preemptions,
        causes=_moved(facts.causes, shift),
    )


def _moved(causes: EngineCauses, shift: float) -> EngineCauses:
    if not shift or not causes.preempted:
        return causes
    return replace(causes, preempted=tuple(at + shift for at in causes.preempted))


@dataclass(frozen=True, slots=True)
class Phase:
    """One stretch of a request's time, in seconds on the timeline's clock. `cut`: it ended because the request did."""

    name: str
    start: float
    end: float
    cut: bool = False

    @property
    def seconds(self) -> float:
        return self.end - self.start


def phases(timeline: Timeline, end: float) -> list[Phase]:
    """The phases that began, in order: render, queue, prefill, decode, relay.

    `end` closes the phase that the request was in when it ended early.
    """
    marks = (
        ("render", timeline.received, timeline.rendered),
        ("queue", timeline.rendered, timeline.scheduled),
        ("prefill", timeline.scheduled, timeline.first_token),
        ("decode", timeline.first_token, timeline.last_token),
        ("relay", timeline.last_token, timeline.finished),
    )
    result: list[Phase] = []
    for name, start, stop in marks:
        if start is None:
            break
        if stop is None:
            if name != "relay":
                result.append(Phase(name, start, max(start, end), cut=True))
            break
        result.append(Phase(name, start, stop))
    return result


def queue_parts(timeline: Timeline, end: float) -> list[Phase]:
    """The queue phase told apart: hold (in the ingress) and engine wait (on the way to and in the engine)."""
    if timeline.rendered is None:
        return []
    if timeline.dispatched is None:
        return [Phase("hold", timeline.rendered, max(timeline.rendered, end), cut=True)]
    hold = Phase("hold", timeline.rendered, timeline.dispatched)
    if timeline.scheduled is None:
        return [hold, Phase("engine_wait", timeline.dispatched, max(timeline.dispatched, end), cut=True)]
    return [hold, Phase("engine_wait", timeline.dispatched, timeline.scheduled)]


def time_to_first_token(timeline: Timeline) -> float | None:
    """TTFT in seconds: received to first token sent; for an answer in one piece, to first token generated."""
    reached = timeline.first_sent if timeline.first_sent is not None else timeline.first_token
    return None if reached is None else reached - timeline.received


def time_per_output_token(timeline: Timeline) -> float | None:
    """TPOT in seconds: (last - first token) / (n - 1), n being the output tokens of one sequence."""
    if timeline.first_token is None or timeline.last_token is None:
        return None
    per_sequence = timeline.output_tokens / max(1, timeline.sequences)
    if per_sequence <= 1:
        return None
    return (timeline.last_token - timeline.first_token) / (per_sequence - 1)


def server_timing(timeline: Timeline, end: float) -> str:
    """The value of a `Server-Timing` header: the phases and the total, in milliseconds."""
    parts = [f"{phase.name};dur={phase.seconds * 1000:.2f}" for phase in phases(timeline, end) if phase.name != "relay"]
    return ", ".join([*parts, f"total;dur={(end - timeline.received) * 1000:.2f}"])


def usage_metrics(timeline: Timeline) -> dict[str, float | None]:
    """The `metrics` object of a usage chunk, in milliseconds and tokens/s.

    The names are vLLM's; the first token is counted from the request's arrival, not from its scheduling.
    """
    durations = {phase.name: phase.seconds for phase in phases(timeline, timeline.received) if not phase.cut}
    per_token = time_per_output_token(timeline)
    busy = durations.get("prefill", 0.0) + durations.get("decode", 0.0)

    def milliseconds(seconds: float | None) -> float | None:
        return None if seconds is None else round(seconds * 1000, 3)

    return {
        "time_to_first_token_ms": milliseconds(
            None if timeline.first_token is None else timeline.first_token - timeline.received
        ),
        "queue_time_ms": milliseconds(durations.get("queue")),
        "prefill_time_ms": milliseconds(durations.get("prefill")),
        "generation_time_ms": milliseconds(durations.get("decode")),
        "mean_itl_ms": milliseconds(per_token),
        "tokens_per_second": round(timeline.output_tokens / busy, 3) if busy > 0 else None,
    }
