"""Writes the Grafana dashboards and checks that those in the repository are what it writes.

    ./scripts/dashboards            # write serve_configs/observability/*.json
    ./scripts/dashboards --check    # exit 1 if they are not up to date

All figures come from Prometheus, which scrapes Ray (docs/observability.md).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.builders import common, dashboard, prometheus, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.common import LegendDisplayMode, LegendPlacement
from grafana_foundation_sdk.models.dashboard import DataSourceRef, VariableRefresh

FOLDER = Path(__file__).parents[1] / "serve_configs" / "observability"
_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
_RATE = "[$__rate_interval]"
_WIDTH, _HEIGHT = 24, 8


@dataclass(frozen=True)
class Query:
    """A PromQL expression and how its series are called."""

    expr: str
    legend: str


@dataclass(frozen=True)
class Panel:
    """One graph. `unit`: Grafana's name of it."""

    title: str
    unit: str
    queries: Sequence[Query]
    description: str = ""


@dataclass(frozen=True)
class Row:
    """Panels side by side under a heading."""

    title: str
    panels: Sequence[Panel]


def _rate(metric: str, by: str, where: str = "") -> str:
    return f"sum by ({by}) (rate(ray_sluice_{metric}_total{{{where}}}{_RATE}))"


def _quantile(quantile: float, metric: str, by: str, where: str = "") -> str:
    return f"histogram_quantile({quantile}, sum by (le, {by}) (rate(ray_sluice_{metric}_bucket{{{where}}}{_RATE})))"


def _percentiles(metric: str, by: str, where: str = "") -> list[Query]:
    return [
        Query(_quantile(quantile, metric, by, where), f"{{{{{by}}}}} p{quantile * 100:.0f}")
        for quantile in (0.5, 0.95, 0.99)
    ]


def _mean(phase: str, where: str) -> str:
    """Of the exact sums: those of Ray's histograms are of their buckets' middles."""
    more = f",{where}" if where else ""
    spent = f'ray_sluice_spent_seconds_total{{phase="{phase}"{more}}}'
    ended = f'ray_sluice_requests_total{{outcome="finished"{more}}}'
    return f"sum(rate({spent}{_RATE})) / (sum(rate({ended}{_RATE})) > 0)"


def _attainment(by: str, where: str = "") -> str:
    met = f'verdict="met"{"," if where else ""}{where}'
    return f"{_rate('slo_requests', by, met)} / ({_rate('slo_requests', by, where)} > 0)"


def _phases(where: str) -> list[Query]:
    names = ("render", "hold", "engine_wait", "prefill", "decode", "relay")
    return [Query(_mean(name, where), name) for name in names]


def overview() -> list[Row]:
    """Everything at a glance, by class and by pool."""
    return [
        Row(
            "Promises",
            [
                Panel(
                    "SLO attainment by class",
                    "percentunit",
                    [Query(_attainment("class"), "{{class}}")],
                    "Share of offered requests that met every target of their class; refused ones did not.",
                ),
                Panel(
                    "Goodput by class",
                    "reqps",
                    [Query(_rate("slo_requests", "class", 'verdict="met"'), "{{class}}")],
                    "Requests per second that met every target.",
                ),
                Panel(
                    "What was missed",
                    "reqps",
                    [Query(_rate("slo_requests", "class, verdict"), "{{class}} {{verdict}}")],
                ),
            ],
        ),
        Row(
            "Latency by class",
            [
                Panel("Time to first token", "s", _percentiles("time_to_first_token_seconds", "class")),
                Panel("Time per output token", "s", _percentiles("time_per_output_token_seconds", "class")),
                Panel("Total time", "s", _percentiles("request_duration_seconds", "class")),
                Panel(
                    "Gaps between tokens",
                    "s",
                    _percentiles("inter_token_latency_seconds", "class"),
                    "Between a token and the one before it, in the engine; a sample of every 16th.",
                ),
            ],
        ),
        Row(
            "Where the time goes",
            [
                Panel("Mean phases of a request", "s", _phases("")),
                Panel("Queue by class", "s", _percentiles("queue_seconds", "class")),
                Panel("Prefill by class", "s", _percentiles("prefill_seconds", "class")),
                Panel("Decode by class", "s", _percentiles("decode_seconds", "class")),
            ],
        ),
        Row(
            "Load",
            [
                Panel(
                    "Requests by class", "reqps", [Query(_rate("requests", "class, outcome"), "{{class}} {{outcome}}")]
                ),
                Panel("In flight", "short", [Query("sum by (class) (ray_sluice_requests_in_flight)", "{{class}}")]),
                Panel("Held for room", "short", [Query("sum by (class) (ray_sluice_requests_held)", "{{class}}")]),
                Panel(
                    "Tokens by pool",
                    "short",
                    [
                        Query(_rate("input_tokens", "pool"), "{{pool}} in"),
                        Query(_rate("output_tokens", "pool"), "{{pool}} out"),
                    ],
                    "Tokens per second.",
                ),
            ],
        ),
        Row(
            "Refused and moved",
            [
                Panel("Refusals by reason", "reqps", [Query(_rate("refusals", "reason"), "{{reason}}")]),
                Panel("Gave up not to be refused", "reqps", [Query(_rate("degradations", "step"), "{{step}}")]),
                Panel(
                    "Spillover", "reqps", [Query(_rate("spillovers", "home_pool, pool"), "{{home_pool}} to {{pool}}")]
                ),
            ],
        ),
        Row(
            "Given up and wasted",
            [
                Panel("Given up by phase", "reqps", [Query(_rate("cancels", "phase"), "{{phase}}")]),
                Panel(
                    "Time to abort",
                    "s",
                    _percentiles("time_to_abort_seconds", "class"),
                    "From when a client was known to have left until the engine had dropped its request.",
                ),
                Panel(
                    "Wasted tokens",
                    "short",
                    [Query(_rate("wasted_tokens", "why"), "{{why}}")],
                    "Tokens per second, computed for requests that did not get what they were promised.",
                ),
            ],
        ),
        Row(
            "Engines",
            [
                Panel(
                    "KV cache",
                    "percentunit",
                    [Query("max by (ReplicaId) (ray_vllm_kv_cache_usage_perc)", "{{ReplicaId}}")],
                ),
                Panel(
                    "Replicas that answer",
                    "short",
                    [Query("max by (pool) (ray_sluice_replicas_answering)", "{{pool}}")],
                ),
                Panel(
                    "Sequences",
                    "short",
                    [
                        Query("sum by (ReplicaId) (ray_vllm_num_requests_running)", "{{ReplicaId}} running"),
                        Query("sum by (ReplicaId) (ray_vllm_num_requests_waiting)", "{{ReplicaId}} waiting"),
                    ],
                ),
                Panel(
                    "Prefix cache hits",
                    "percentunit",
                    [
                        Query(
                            # Until there is a hit nobody counts them.
                            f"(sum(rate(ray_vllm_prefix_cache_hits_total{_RATE})) or vector(0)) / "
                            f"(sum(rate(ray_vllm_prefix_cache_queries_total{_RATE})) > 0)",
                            "share of prompt tokens",
                        )
                    ],
                ),
                Panel(
                    "Prediction of first tokens",
                    "short",
                    _percentiles("ttft_over_predicted_ratio", "class"),
                    "Real time to first token over the predicted one: 1 is exact.",
                ),
            ],
        ),
        Row(
            "GPUs",
            [
                Panel(
                    "GPU utilisation",
                    "percent",
                    [Query("avg by (GpuIndex, instance) (ray_node_gpus_utilization)", "{{instance}} {{GpuIndex}}")],
                    "From NVML by Ray; nothing where there is no GPU.",
                ),
                Panel(
                    "GPU memory",
                    "decmbytes",
                    [Query("sum by (GpuIndex, instance) (ray_node_gram_used)", "{{instance}} {{GpuIndex}}")],
                    "Used, from NVML by Ray; nothing where there is no GPU.",
                ),
            ],
        ),
    ]


def one_class() -> list[Row]:
    """One class, chosen above."""
    where = 'class=~"$class"'
    return [
        Row(
            "Promise",
            [
                Panel("SLO attainment", "percentunit", [Query(_attainment("class", where), "{{class}}")]),
                Panel(
                    "What became of requests", "reqps", [Query(_rate("slo_requests", "verdict", where), "{{verdict}}")]
                ),
                Panel("By pool", "reqps", [Query(_rate("requests", "pool", where), "{{pool}}")]),
            ],
        ),
        Row(
            "Latency",
            [
                Panel("Time to first token", "s", _percentiles("time_to_first_token_seconds", "class", where)),
                Panel("Time per output token", "s", _percentiles("time_per_output_token_seconds", "class", where)),
                Panel("Mean phases of a request", "s", _phases(where)),
            ],
        ),
        Row(
            "Size",
            [
                Panel("Prompt tokens per request", "short", _percentiles("prompt_tokens", "class", where)),
                Panel("Output tokens", "short", [Query(_rate("output_tokens", "pool", where), "{{pool}}")]),
                Panel("In flight", "short", [Query(f"sum(ray_sluice_requests_in_flight{{{where}}})", "in flight")]),
            ],
        ),
    ]


DASHBOARDS = {
    "overview": ("Sluice: overview", overview),
    "class": ("Sluice: one class", one_class),
}


def queries(rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    """All queries of a dashboard, with their panels' titles."""
    for row in rows:
        for panel in row.panels:
            for query in panel.queries:
                yield panel.title, query.expr


def build(name: str) -> str:
    """A dashboard as Grafana's JSON."""
    title, rows = DASHBOARDS[name]
    built = (
        dashboard.Dashboard(title)
        .uid(f"sluice-{name}")
        .tags(["sluice"])
        .refresh("10s")
        .time("now-30m", "now")
        .timezone("browser")
        .with_variable(dashboard.DatasourceVariable("datasource").type("prometheus").label("Data source"))
    )
    if name == "class":
        built = built.with_variable(
            dashboard.QueryVariable("class")
            .label("Class")
            .datasource(_SOURCE)
            .query("label_values(ray_sluice_requests_total, class)")
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
        )
    for row in rows():
        built = built.with_row(dashboard.Row(row.title))
        for panel in row.panels:
            built = built.with_panel(_panel(panel, _WIDTH // len(row.panels)))
    document = json.loads(json.dumps(built.build(), cls=JSONEncoder))
    return json.dumps(document, indent=1, sort_keys=True) + "\n"


def _panel(panel: Panel, span: int) -> Any:
    built = (
        timeseries.Panel()
        .title(panel.title)
        .description(panel.description)
        .unit(panel.unit)
        .min(0)
        .datasource(_SOURCE)
        .span(span)
        .height(_HEIGHT)
        .legend(
            common.VizLegendOptions()
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
            .show_legend(True)
        )
    )
    for query in panel.queries:
        built = built.with_target(prometheus.Dataquery().expr(query.expr).legend_format(query.legend))
    return built


def main(argv: list[str]) -> int:
    """Write or check them."""
    parser = argparse.ArgumentParser(prog="dashboards", description="Write the Grafana dashboards.")
    parser.add_argument("--check", action="store_true", help="only check that they are up to date")
    options = parser.parse_args(argv)
    stale = []
    for name in DASHBOARDS:
        path, text = FOLDER / f"{name}.json", build(name)
        if not path.exists() or path.read_text() != text:
            stale.append(path.name)
            if not options.check:
                path.write_text(text)
    if stale:
        print(f"{'not up to date' if options.check else 'written'}: {', '.join(stale)}")
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
