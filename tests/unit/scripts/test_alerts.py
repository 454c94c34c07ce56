"""The alert rules, by Prometheus' own tool."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

RULES = Path(__file__).parents[3] / "serve_configs" / "observability" / "alerts.yaml"

pytestmark = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


def counter(name: str, labels: str, per_minute: int) -> dict[str, str]:
    return {"series": f"ray_sluice_{name}_total{{{labels}}}", "values": f"0+{per_minute}x90"}


def gauge(value: int, pool: str = "batch") -> dict[str, str]:
    return {"series": f'ray_sluice_replicas_answering{{pool="{pool}"}}', "values": f"{value}x90"}


# Nothing wrong: everybody is served, all replicas answer.
GOOD = [
    counter("slo_requests", 'class="chat",verdict="met"', 1000),
    counter("requests", 'class="chat",outcome="finished"', 1000),
    gauge(1),
]


@pytest.mark.parametrize(
    ("series", "firing"),
    [
        (GOOD, []),
        ([*GOOD, counter("slo_requests", 'class="chat",verdict="ttft_missed"', 300)], ["SluiceAttainmentBurn"]),
        ([*GOOD, counter("slo_requests", 'class="chat",verdict="ttft_missed"', 30)], []),
        ([*GOOD, counter("refusals", 'class="chat",reason="no_room"', 100)], ["SluiceShedding"]),
        ([*GOOD, counter("requests", 'class="chat",outcome="failed"', 50)], ["SluiceFailures"]),
        ([*GOOD[:2], gauge(0)], ["SluicePoolDown"]),
        (GOOD[:2], ["SluiceIngressDown"]),
    ],
    ids=["good", "burning", "within the allowance", "shedding", "failing", "pool down", "no ingress"],
)
def test_each_fires_for_what_it_is_for(tmp_path: Path, series: list[dict[str, str]], firing: list[str]) -> None:
    names = [rule["alert"] for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]]
    assert set(firing) <= set(names)
    # What fires, as a metric, so that what else would fire shows.
    expected: list[dict[str, Any]] = [{"labels": f'{{alertname="{name}"}}', "value": 1} for name in firing]
    test = {
        "rule_files": [str(RULES)],
        "evaluation_interval": "1m",
        "tests": [
            {
                "interval": "1m",
                "input_series": series,
                "promql_expr_test": [
                    {
                        "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
                        "eval_time": "80m",
                        "exp_samples": expected,
                    }
                ],
            }
        ],
    }
    path = tmp_path / "test.yaml"
    path.write_text(yaml.safe_dump(test))
    result = subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
