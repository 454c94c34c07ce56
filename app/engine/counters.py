"""What the deadline scheduler counts, and its way to the front end. Pure.

The engine core reports statistics in vLLM's SchedulerStats, which has no place for others' figures. Ours travel in a
mapping of strings to integers that it has, `num_kv_fetch_reqs_by_stage`, under names that begin with `sluice.`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

_PREFIX = "sluice."
_PER_MILLION = 1_000_000
# Most classes that counts tell apart.
_MAX_CLASSES = 16
_OTHER_CLASSES = "other"

ByClass = dict[str, int]


@dataclass(slots=True)
class Counters:
    """What the scheduler did since it started. Counts by class have "" for requests without a class."""

    steps: int = field(default=0, metadata={"text": "Steps scheduled."})
    computed_tokens: int = field(default=0, metadata={"text": "Tokens computed, of prompts and of answers."})
    wasted_tokens: int = field(default=0, metadata={"text": "Tokens computed again after a preemption."})
    held_decodes: int = field(
        default=0, metadata={"text": "Decodes left out of a step so that others keep their TPOT target."}
    )
    yielded_prefills: int = field(
        default=0, metadata={"text": "Running prefills left out of a step for more urgent work."}
    )
    slot_preemptions: int = field(
        default=0, metadata={"text": "Running requests that gave up their slot to a deadline."}
    )
    kv_preemptions: int = field(
        default=0, metadata={"text": "Running requests that gave up their KV blocks to a deadline."}
    )
    predicted_ttft_misses: ByClass = field(
        default_factory=dict, metadata={"text": "Requests that could not make their TTFT target any more."}
    )
    ttft_misses: ByClass = field(
        default_factory=dict, metadata={"text": "Requests whose first token came after its deadline."}
    )
    tpot_misses: ByClass = field(
        default_factory=dict, metadata={"text": "Finished requests that took longer per token than their target."}
    )

    @staticmethod
    def count(by_class: ByClass, name: str) -> None:
        """One more of this class; beyond the first classes seen, all are counted as one."""
        if name not in by_class and len(by_class) >= _MAX_CLASSES:
            name = _OTHER_CLASSES
        by_class[name] = by_class.get(name, 0) + 1


TEXTS = {entry.name: entry.metadata["text"] for entry in fields(Counters)}
BY_CLASS = frozenset(name for name in TEXTS if isinstance(getattr(Counters(), name), dict))


def encode(counters: Counters, errors: Mapping[str, float]) -> dict[str, int]:
    """As vLLM's mapping carries it. `errors`: shares, by name; what is not known (nan) is left out."""
    encoded: dict[str, int] = {}
    for name in TEXTS:
        value = getattr(counters, name)
        if name in BY_CLASS:
            encoded.update({f"{_PREFIX}{name}.{key}": count for key, count in value.items()})
        else:
            encoded[f"{_PREFIX}{name}"] = value
    for name, share in errors.items():
        if math.isfinite(share):
            encoded[f"{_PREFIX}{name}"] = round(share * _PER_MILLION)
    return encoded


@dataclass(slots=True)
class Progress:
    """What has come since the last report. `counts`: (name, class or None) -> increase; `errors`: by name."""

    counts: dict[tuple[str, str | None], int]
    errors: dict[str, float]


class Reader:
    """Turns reports of totals, of one engine, into increases."""

    def __init__(self) -> None:
        self._last: dict[tuple[str, str | None], int] = {}

    def read(self, carried: Mapping[str, int]) -> Progress | None:
        """What a mapping of vLLM's carries of ours; None if nothing."""
        progress = Progress({}, {})
        for key, value in carried.items():
            if not key.startswith(_PREFIX):
                continue
            name, _, service_class = key.removeprefix(_PREFIX).partition(".")
            if name not in TEXTS:
                progress.errors[name] = value / _PER_MILLION
                continue
            counted = (name, service_class if name in BY_CLASS else None)
            progress.counts[counted] = value - self._last.get(counted, 0)
            self._last[counted] = value
        return progress if progress.counts or progress.errors else None
