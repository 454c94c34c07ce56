"""From what happened to requests to figures, tables and a plot."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from scripts.scheduling.workload import Offer


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a request. `first_token`, `last_token`: seconds from the start, None if it never came;
    `tokens_in_time`: output tokens while requests came."""

    offer: Offer
    first_token: float | None
    last_token: float | None
    tokens_in_time: int
    wasted_tokens: int = 0
    preemptions: int = 0

    @property
    def ttft(self) -> float:
        """Seconds to the first token."""
        return float("inf") if self.first_token is None else self.first_token - self.offer.at

    @property
    def tpot(self) -> float:
        """Seconds per token after the first; 0.0 if there is none."""
        if self.first_token is None or self.last_token is None:
            return float("inf")
        return (self.last_token - self.first_token) / max(1, self.offer.output_tokens - 1)

    @property
    def met(self) -> bool:
        """Whether every target was met."""
        targets = self.offer.targets
        if targets is None:
            return self.last_token is not None
        return (targets.ttft_s is None or self.ttft <= targets.ttft_s) and (
            targets.tpot_s is None or self.tpot <= targets.tpot_s
        )


@dataclass
class Run:
    """One run of an arm. `seconds`: how long requests came; `busy_share`: of that time the engine computed."""

    seconds: float
    outcomes: list[Outcome]
    busy_share: float = float("nan")
    model_error_p90: float | None = None


@dataclass
class Pooled:
    """All runs of an arm."""

    runs: list[Run] = field(default_factory=list)

    def classes(self) -> list[str]:
        """In the order in which they are met."""
        return list(dict.fromkeys(outcome.offer.service_class for run in self.runs for outcome in run.outcomes))

    def of(self, name: str) -> list[Outcome]:
        """A class's requests."""
        return [outcome for run in self.runs for outcome in run.outcomes if outcome.offer.service_class == name]

    def figures(self, name: str) -> dict[str, float]:
        """A class's figures. Times in milliseconds, rates per second.

        TTFT, TPOT and attainment are of the requests with an end, and of all of them if they came in an open loop.
        """
        outcomes = self.of(name)
        seconds = sum(run.seconds for run in self.runs)
        ended = [one for one in outcomes if one.last_token is not None]
        has_targets = any(one.offer.targets is not None for one in outcomes)
        met = sum(one.met for one in ended)
        return {
            "requests": float(len(ended)),
            **_percentiles("ttft", [one.ttft for one in ended]),
            **_percentiles("tpot", [one.tpot for one in ended if one.offer.output_tokens > 1]),
            "attainment": met / max(1, len(outcomes)) if has_targets else float("nan"),
            "goodput": met / seconds if has_targets else float("nan"),
            "tokens_per_s": sum(one.tokens_in_time for one in outcomes) / seconds,
            "wasted_tokens": float(sum(one.wasted_tokens for one in outcomes)),
            "preemptions": float(sum(one.preemptions for one in outcomes)),
        }

    def goodput(self) -> float:
        """Requests per second that met every target, of all classes that have targets."""
        seconds = sum(run.seconds for run in self.runs)
        return sum(one.met for run in self.runs for one in run.outcomes if one.offer.targets) / seconds

    def summary(self) -> dict[str, Any]:
        """All figures, for JSON."""
        errors = [run.model_error_p90 for run in self.runs if run.model_error_p90 is not None]
        return {
            "classes": {name: self.figures(name) for name in self.classes()},
            "goodput": self.goodput(),
            "busy_share": float(np.mean([run.busy_share for run in self.runs])),
            **({"model_error_p90": max(errors)} if errors else {}),
        }


def _percentiles(name: str, values: Sequence[float]) -> dict[str, float]:
    return {
        f"{name}_p{share}_ms": float(np.percentile(values, share)) * 1000 if values else float("nan")
        for share in (50, 90, 99)
    }


_COLUMNS = (
    ("requests", "requests", 0),
    ("ttft_p50_ms", "TTFT p50", 0),
    ("ttft_p90_ms", "p90", 0),
    ("ttft_p99_ms", "p99", 0),
    ("tpot_p50_ms", "TPOT p50", 1),
    ("tpot_p90_ms", "p90", 1),
    ("tpot_p99_ms", "p99", 1),
    ("attainment", "attained", 3),
    ("goodput", "goodput", 2),
    ("tokens_per_s", "tok/s", 0),
    ("wasted_tokens", "wasted", 0),
)


def table(results: Mapping[str, Pooled]) -> str:
    """One block of lines per class, one line per arm; times in milliseconds."""
    width = max(len(title) for title in results)
    lines = []
    for name in dict.fromkeys(name for pooled in results.values() for name in pooled.classes()):
        lines.append(f"{name:<{width}} " + " ".join(f"{title:>9}" for _, title, _ in _COLUMNS))
        for title, pooled in results.items():
            if name in pooled.classes():
                figures = pooled.figures(name)
                cells = [_cell(figures[key], digits) for key, _, digits in _COLUMNS]
                lines.append(f"{title:<{width}} " + " ".join(f"{cell:>9}" for cell in cells))
        lines.append("")
    return "\n".join(lines)


def _cell(value: float, digits: int) -> str:
    return "-" if np.isnan(value) else f"{value:.{digits}f}"


def plot(results: Mapping[str, Pooled], path: Path, caption: str) -> None:
    """TTFT of every class as cumulative shares, and output tokens per second, by arm."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(name for pooled in results.values() for name in pooled.classes()))
    rows = math.ceil((len(names) + 1) / 2)
    figure, grid = pyplot.subplots(rows, 2, figsize=(11, 4.2 * rows), layout="constrained", squeeze=False)
    axes = list(grid.flat)
    for spare in axes[len(names) + 1 :]:
        spare.remove()
    bars = axes[len(names)]
    for axis, name in zip(axes, names, strict=False):
        target = _ttft_target(pooled.of(name) for pooled in results.values())
        for title, pooled in results.items():
            values = sorted(one.ttft for one in pooled.of(name) if one.first_token is not None)
            if values:
                axis.step(values, np.arange(1, len(values) + 1) / len(values), where="post", label=title)
        if target is not None:
            axis.axvline(target, color="black", linestyle=":", label="target")
        axis.set(title=f"{name}: TTFT", xlabel="seconds", ylabel="share of requests", xscale="log", ylim=(0, 1.01))
        axis.legend(fontsize="x-small")
    bottom = np.zeros(len(results))
    for name in names:
        heights = np.array([pooled.figures(name)["tokens_per_s"] for pooled in results.values()])
        bars.bar(list(results), heights, bottom=bottom, label=name)
        bottom += heights
    bars.set(title="output tokens per second")
    bars.tick_params(axis="x", rotation=20, labelsize="x-small")
    bars.legend(fontsize="x-small")
    figure.suptitle(caption, fontsize="small")
    figure.savefig(path)
    pyplot.close(figure)


def _ttft_target(groups: Iterable[Iterable[Outcome]]) -> float | None:
    """The TTFT target that all of a class's requests have alike; None if there isn't one."""
    targets = {one.offer.targets.ttft_s for group in groups for one in group if one.offer.targets}
    return targets.pop() if len(targets) == 1 else None
