"""From raw measurements to figures, a table and a plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from scripts.streaming.arms import ARMS, BARE


@dataclass
class Measured:
    """What one arm did at one number of streams, over all rounds."""

    ttft_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    tokens_in_window: int = 0
    window_s: float = 0.0
    cpu_s: dict[str, float] = field(default_factory=dict)
    tokens: int = 0
    body_bytes: int = 0
    events: int = 0
    requests: int = 0
    errors: list[str] = field(default_factory=list)
    rounds: list[float] = field(default_factory=list)

    def add(self, raw: Mapping[str, Any]) -> None:
        """Add one round."""
        begin, end = raw["window"]["begin"], raw["window"]["end"]
        arrived = 0
        for outcome in raw["outcomes"]:
            if outcome["error"] is not None:
                self.errors.append(outcome["error"])
                continue
            stamps = np.array(outcome["tokens"])
            arrived += int(((stamps >= begin) & (stamps < end)).sum())
            self.tokens += len(stamps)
            self.body_bytes += outcome["body_bytes"]
            self.events += outcome["events"]
            if outcome["counted"]:
                self.requests += 1
                self.ttft_s.append(stamps[0] - outcome["sent"])
                self.gaps_s.extend(np.diff(stamps))
        self.tokens_in_window += arrived
        self.window_s += end - begin
        for role, seconds in raw["cpu"].items():
            self.cpu_s[role] = self.cpu_s.get(role, 0.0) + seconds
        self.rounds.append(arrived / (end - begin))

    def cpu_by_role(self) -> dict[str, float]:
        """CPU seconds per 1,000 tokens, by what the processes are in a token's way."""
        share = 1000 / max(1, self.tokens_in_window)
        return {role: self.cpu_s[role] * share for role in sorted(self.cpu_s, key=self.cpu_s.__getitem__, reverse=True)}

    def figures(self) -> dict[str, float]:
        """Times in milliseconds. A gap is from one token to the next; tokens that arrive together have none."""

        def percentile(values: Sequence[float], share: float) -> float:
            return float(np.percentile(values, share)) * 1000 if values else float("nan")

        return {
            "tokens_per_s": self.tokens_in_window / self.window_s,
            "ttft_p50_ms": percentile(self.ttft_s, 50),
            "ttft_p99_ms": percentile(self.ttft_s, 99),
            "itl_p50_ms": percentile(self.gaps_s, 50),
            "itl_p99_ms": percentile(self.gaps_s, 99),
            "longest_gap_ms": percentile(self.gaps_s, 100),
            "cpu_s_per_1000_tokens": sum(self.cpu_by_role().values()),
            "bytes_per_token": self.body_bytes / max(1, self.tokens),
            "tokens_per_event": self.tokens / max(1, self.events),
            "requests": self.requests,
            "incomplete": len(self.errors),
        }


Results = dict[int, dict[str, Measured]]

_COLUMNS = (
    ("tokens_per_s", "tok/s", 0),
    ("ttft_p50_ms", "TTFT p50", 1),
    ("ttft_p99_ms", "TTFT p99", 1),
    ("itl_p50_ms", "ITL p50", 1),
    ("itl_p99_ms", "ITL p99", 1),
    ("longest_gap_ms", "longest gap", 0),
    ("cpu_s_per_1000_tokens", "CPU s/1k", 3),
    ("bytes_per_token", "B/tok", 0),
    ("tokens_per_event", "tok/event", 2),
    ("requests", "requests", 0),
    ("incomplete", "incomplete", 0),
)
_RATIOS = ("tokens_per_s", "ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms", "cpu_s_per_1000_tokens")


def ratios(results: Results) -> dict[int, dict[str, dict[str, float]]]:
    """Each arm's figures as multiples of bare vLLM's, and how much later its first token comes, in milliseconds."""
    compared: dict[int, dict[str, dict[str, float]]] = {}
    for streams, arms in results.items():
        if BARE not in arms:
            continue
        bare = arms[BARE].figures()
        compared[streams] = {}
        for name, measured in arms.items():
            own = measured.figures()
            compared[streams][name] = {key: own[key] / bare[key] for key in _RATIOS}
            compared[streams][name]["ttft_p50_later_ms"] = own["ttft_p50_ms"] - bare["ttft_p50_ms"]
    return compared


def tables(results: Results) -> str:
    """The ratios to bare vLLM, then the figures."""
    width = max(len(arm.title) for arm in ARMS.values())
    titles = {key: title for key, title, _ in _COLUMNS}
    lines: list[str] = []
    compared = ratios(results)
    if compared:
        heads = [f"{titles[key]:>9}" for key in _RATIOS]
        lines += ["Ratios to bare vLLM (for tok/s more is better, else less)", ""]
        lines.append(f"{'streams':>7}  {'':{width}} {' '.join(heads)}  {'TTFT p50':>10}")
        for streams, arms in compared.items():
            for name, own in arms.items():
                cells = [f"{own[key]:9.2f}" for key in _RATIOS]
                later = f"{own['ttft_p50_later_ms']:+7.1f} ms"
                lines.append(f"{streams:>7}  {ARMS[name].title:{width}} {' '.join(cells)}  {later}")
            lines.append("")
    lines += ["Figures (times in ms)", ""]
    lines.append(f"{'streams':>7}  {'':{width}} " + " ".join(f"{title:>11}" for _, title, _ in _COLUMNS))
    for streams, measured in results.items():
        for name, one in measured.items():
            own = one.figures()
            cells = [f"{own[key]:11.{digits}f}" for key, _, digits in _COLUMNS]
            lines.append(f"{streams:>7}  {ARMS[name].title:{width}} {' '.join(cells)}")
        lines.append("")
    lines += ["CPU milliseconds per 1,000 tokens, by process", ""]
    for streams, measured in results.items():
        for name, one in measured.items():
            roles = ", ".join(f"{role} {seconds * 1000:.0f}" for role, seconds in one.cpu_by_role().items())
            lines.append(f"{streams:>7}  {ARMS[name].title:{width}}  {roles}")
        lines.append("")
    return "\n".join(lines)


def plot(results: Results, file: Path) -> None:
    """Draw throughput, first tokens, gaps and CPU by number of streams."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(11, 7.5), constrained_layout=True)
    panels = (
        ("tokens_per_s", "Tokens per second", False),
        ("ttft_p99_ms", "TTFT p99 (ms)", True),
        ("itl_p99_ms", "ITL p99, per token (ms)", True),
        ("cpu_s_per_1000_tokens", "Server CPU seconds per 1,000 tokens", True),
    )
    names = [name for name in ARMS if any(name in arms for arms in results.values())]
    for axis, (key, title, logarithmic) in zip(axes.flat, panels, strict=True):
        for name in names:
            points = [(streams, arms[name].figures()[key]) for streams, arms in results.items() if name in arms]
            axis.plot(*zip(*points, strict=True), marker="o", label=ARMS[name].title)
        axis.set_xscale("log", base=2)
        axis.set_xticks(list(results), [str(streams) for streams in results])
        if logarithmic:
            axis.set_yscale("log")
        axis.set_title(title)
        axis.set_xlabel("streams")
        axis.grid(visible=True, alpha=0.3)
    axes[0][0].legend(fontsize=8)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
