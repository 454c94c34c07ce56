"""Why a request took as long as it did, or was not served: in figures and in one sentence. Pure."""

from __future__ import annotations

from typing import Any

from app.telemetry.record import RequestRecord
from app.telemetry.timeline import Phase, phases, queue_parts, time_per_output_token, time_to_first_token

# Less than this share of a wait is not worth naming.
_WORTH_NAMING = 0.25


def describe(record: RequestRecord) -> dict[str, Any]:
    """A record as `GET /v1/requests/{id}` and the console show it: times in milliseconds, no content."""
    timeline, end = record.timeline, record.end
    ttft, tpot = time_to_first_token(timeline), time_per_output_token(timeline)
    return {
        "id": record.request_id,
        "object": "request",
        "trace_id": record.trace_id or None,
        "received_at": round(record.received_at, 6),
        "route": record.route,
        "class": record.service_class,
        "home_pool": record.home_pool,
        "pool": record.pool,
        "replica": record.replica_id or None,
        "outcome": record.outcome,
        "status": record.status,
        "verdict": record.verdict,
        "reason": record.reason or None,
        "why": why(record),
        "phases": [_phase(record, phase, None) for phase in phases(timeline, end)]
        + [_phase(record, phase, "queue") for phase in queue_parts(timeline, end)],
        "total_ms": _ms(end - timeline.received),
        "ttft_ms": _ms(ttft),
        "ttft_target_ms": _ms(record.ttft_target_s),
        "predicted_ttft_ms": _ms(record.predicted_ttft_s),
        "predicted_wait_ms": _ms(record.predicted_wait_s),
        "tpot_ms": _ms(tpot),
        "tpot_target_ms": _ms(record.tpot_target_s),
        "prompt_tokens": timeline.prompt_tokens,
        "cached_tokens": timeline.cached_tokens,
        "output_tokens": timeline.output_tokens,
        "sequences": timeline.sequences,
        "preemptions": timeline.preemptions,
        "engine": _engine(record),
        "attempts": record.attempts,
        "abort_ms": _ms(record.abort_s),
        "degraded": list(record.steps),
        "notes": list(record.notes),
    }


def _engine(record: RequestRecord) -> dict[str, Any]:
    """What delayed it there: before its first chunk, between its chunks, between its tokens."""
    told = record.timeline.causes
    return {
        "ahead_tokens": told.ahead_tokens,
        "ahead_requests": told.ahead_prefills,
        "waited_steps": told.waited_steps,
        "no_room_steps": told.no_room_steps,
        "prefill_chunks": told.chunks,
        "yielded_steps": told.prefill_steps - told.chunks,
        "longest_gap_ms": _ms(told.longest_gap_s),
        "slow_gaps": told.slow_gaps,
    }


def _phase(record: RequestRecord, phase: Phase, within: str | None) -> dict[str, Any]:
    return {
        "name": phase.name,
        "within": within,
        "start_ms": _ms(phase.start - record.timeline.received),
        "duration_ms": _ms(phase.seconds),
        "cut": phase.cut,
    }


def why(record: RequestRecord) -> str:
    """The cause in one sentence."""
    verdict = record.verdict
    if record.is_slow_reader:
        return "Its client stopped reading."
    if record.outcome == "cancelled":
        return (
            f"Its client gave it up in the phase {record.phase}, after {_text(record.end - record.timeline.received)}."
        )
    if verdict == "refused":
        return f"It was refused: {record.reason}{_predicted(record)}."
    if record.outcome in ("rejected", "failed", "evicted"):
        return f"It ended with an error: {record.reason or record.outcome}."
    if verdict == "ttft_missed":
        ttft = time_to_first_token(record.timeline)
        assert ttft is not None
        assert record.ttft_target_s is not None
        late = f"Its first token came {_text(ttft - record.ttft_target_s)} late"
        return f"{late}: it {_spent(record)}{_predicted(record)}."
    if verdict == "tpot_missed":
        tpot = time_per_output_token(record.timeline)
        text = f"Its tokens came every {_text(tpot or 0.0)}, and should every {_text(record.tpot_target_s or 0.0)}"
        return f"{text}{_slow_steps(record)}."
    return f"It {_spent(record)}{_relayed(record)}." if record.timeline.first_token is not None else "It was served."


def _slow_steps(record: RequestRecord) -> str:
    causes, taken = record.timeline.causes, record.timeline.preemptions
    parts = [f"it was preempted {_times(taken)}"] if taken else []
    if causes.slow_gaps:
        parts.append(f"{causes.slow_gaps} steps took longer, the longest {_text(causes.longest_gap_s)}")
    return f": {' and '.join(parts)}" if parts else ""


def _relayed(record: RequestRecord) -> str:
    """What its client's slowness added, where that is much of the whole."""
    whole = record.end - record.timeline.received
    seconds = sum(phase.seconds for phase in phases(record.timeline, record.end) if phase.name == "relay")
    return f", and its client took {_text(seconds)} longer to read it" if seconds > _WORTH_NAMING * whole else ""


def _spent(record: RequestRecord) -> str:
    """What took longest until the first token."""
    timeline, end = record.timeline, record.end
    parts = {phase.name: phase.seconds for phase in [*phases(timeline, end), *queue_parts(timeline, end)]}
    texts = {
        "render": "took {} to read and render",
        "hold": "was held {} for room",
        "engine_wait": f"waited {{}} in the engine of pool {record.pool}{_behind(record)}",
        "prefill": f"took {{}} to prefill {timeline.prompt_tokens - timeline.cached_tokens:,} tokens{_chunks(record)}",
    }
    before = {name: parts.get(name, 0.0) for name in texts}
    total = sum(before.values())
    ordered = sorted(before, key=lambda name: -before[name])
    named = [name for name in ordered if before[name] > _WORTH_NAMING * total] or ordered[:1]
    return " and ".join(texts[name].format(_text(before[name])) for name in named)


def _chunks(record: RequestRecord) -> str:
    """Where a prefill stood back for others for a good part of its steps."""
    causes = record.timeline.causes
    yielded = causes.prefill_steps - causes.chunks
    if yielded <= _WORTH_NAMING * causes.prefill_steps:
        return ""
    return f" in {causes.chunks} parts, standing back for others in {yielded} of {causes.prefill_steps} steps"


def _behind(record: RequestRecord) -> str:
    causes = record.timeline.causes
    room = ""
    if causes.no_room_steps > _WORTH_NAMING * causes.waited_steps:
        room = f", for want of a slot or KV cache in {causes.no_room_steps} of {causes.waited_steps} steps"
    if causes.ahead_prefills:
        others = f"{causes.ahead_prefills} other request{'s' if causes.ahead_prefills > 1 else ''}"
        return f" behind {causes.ahead_tokens:,} prompt tokens of {others}{room}"
    if room:
        return room
    if not record.predicted_wait_s or record.predicted_wait_s < 1e-3:
        return ""
    return f", with {_text(record.predicted_wait_s)} of others' work before it when it came"


def _predicted(record: RequestRecord) -> str:
    if record.predicted_ttft_s is None:
        return ""
    return f" (predicted: {_text(record.predicted_ttft_s)})"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _text(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1000:.0f} ms"


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
