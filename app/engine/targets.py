"""Latency targets of a request, and how they reach the engine. Pure.

A request carries its targets in fields that plain vLLM has:

- `priority`: its deadline, the time by which its first token should be there, in milliseconds since the Unix epoch.
  vLLM's own `priority` policy serves smaller values first, so it too orders by deadline. 0, vLLM's default, means that
  the deadline is to be worked out: arrival plus TTFT target. Other values below `FIRST_DEADLINE_MS` can be no time of
  day; they keep vLLM's meaning, "smaller is earlier", by moving the deadline that many seconds.
- `SamplingParams.extra_args` (`vllm_xargs` in a request to vLLM's server): `ttft_target_ms` and `tpot_target_ms`, each
  in milliseconds, and `service_class`, a name for metrics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from app.types import PATIENCE_S

# 2001-09-09: later than any priority that somebody would number classes with, earlier than any deadline.
FIRST_DEADLINE_MS = 10**12

TTFT_KEY = "ttft_target_ms"
TPOT_KEY = "tpot_target_ms"
CLASS_KEY = "service_class"

_LONGEST_CLASS_NAME = 32


@dataclass(frozen=True, slots=True)
class Targets:
    """What a request was promised. `ttft_s`, `tpot_s`: seconds, None for no target; `service_class`: "" for none."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    service_class: str = ""


def to_priority(deadline: float) -> int:
    """vLLM's `priority` for a deadline in seconds since the Unix epoch."""
    return round(deadline * 1000)


def engine_priority(scheduler: str, received: float, ttft_s: float | None) -> int:
    """The `priority` of a request that came at `received`, in seconds since the Unix epoch.

    `scheduler`: `deadline`, which knows requests without a target, or `vllm`, whose `priority` policy orders them like
    those that have one of `PATIENCE_S`.
    """
    if ttft_s is None:
        return 0 if scheduler == "deadline" else to_priority(received + PATIENCE_S)
    return to_priority(received + ttft_s)


def to_extra_args(targets: Targets) -> dict[str, str | float]:
    """The entries of `SamplingParams.extra_args` that carry these targets."""
    entries: dict[str, str | float] = {}
    if targets.ttft_s is not None:
        entries[TTFT_KEY] = targets.ttft_s * 1000
    if targets.tpot_s is not None:
        entries[TPOT_KEY] = targets.tpot_s * 1000
    if targets.service_class:
        entries[CLASS_KEY] = targets.service_class
    return entries


def with_targets(extra_args: Any, targets: Targets) -> dict[str, Any]:
    """A client's `vllm_xargs`, if it has any, with these targets and no others."""
    others = extra_args if isinstance(extra_args, dict) else {}
    kept = {key: value for key, value in others.items() if key not in (TTFT_KEY, TPOT_KEY, CLASS_KEY)}
    return {**kept, **to_extra_args(targets)}


def from_extra_args(extra_args: Mapping[str, Any] | None, default: Targets) -> Targets:
    """The targets that a request carries; what it doesn't, or what is no positive number, comes from `default`."""
    if not extra_args:
        return default
    ttft_ms, tpot_ms = _milliseconds(extra_args.get(TTFT_KEY)), _milliseconds(extra_args.get(TPOT_KEY))
    name = extra_args.get(CLASS_KEY)
    return Targets(
        default.ttft_s if ttft_ms is None else ttft_ms / 1000,
        default.tpot_s if tpot_ms is None else tpot_ms / 1000,
        name[:_LONGEST_CLASS_NAME] if isinstance(name, str) else default.service_class,
    )


def deadline(priority: int, arrival: float, ttft_s: float) -> float:
    """When the first token is due, in seconds since the Unix epoch.

    `priority`: as the module says; `arrival`: seconds since the Unix epoch; `ttft_s`: the target, in seconds.
    """
    if priority >= FIRST_DEADLINE_MS:
        return priority / 1000
    return arrival + ttft_s + priority


def _milliseconds(value: Any) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        return None
    return float(value)
