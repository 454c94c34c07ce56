"""Reading what Ray exports to Prometheus."""

from __future__ import annotations

import time
import urllib.request
from dataclasses import dataclass

import ray
from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True)
class Sample:
    """One time series' present value."""

    name: str
    labels: dict[str, str]
    value: float


def scrape() -> list[Sample]:
    """All samples of the Ray cluster that this process is connected to, as Prometheus would see them."""
    samples: list[Sample] = []
    for node in ray.nodes():
        url = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        with urllib.request.urlopen(url, timeout=10) as answer:
            text = answer.read().decode()
        for family in text_string_to_metric_families(text):
            samples += [Sample(item.name, dict(item.labels), item.value) for item in family.samples]
    return samples


def total(samples: list[Sample], name: str, **labels: str) -> float:
    """The sum of a metric over all series that have these labels."""
    return sum(
        sample.value
        for sample in samples
        if sample.name == name and all(sample.labels.get(key) == value for key, value in labels.items())
    )


def settled_total(name: str, unchanged_s: float = 4.0, **labels: str) -> float:
    """The sum of a metric once it has not changed for a while: what has been counted reaches the exporter later."""
    value, since = total(scrape(), name, **labels), time.monotonic()
    while time.monotonic() - since < unchanged_s:
        time.sleep(0.5)
        now = total(scrape(), name, **labels)
        if now != value:
            value, since = now, time.monotonic()
    return value
