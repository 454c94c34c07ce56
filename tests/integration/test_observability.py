"""What operators see of a running app: Prometheus and its alerts, the console in a browser, and whether they agree with
what clients measure."""

from __future__ import annotations

import contextlib
import json
import math
import re
import shutil
import statistics
import subprocess
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

from app.telemetry.live import percentiles
from scripts import dashboards
from tests.support.serving import (
    CONFIGS,
    ROOT,
    free_port,
    get,
    open_client,
    running,
    url_of,
    variant,
    wait_for,
    wait_ready,
)

pytestmark = pytest.mark.integration

MODEL = "llama-3.1-8b-simulated"
RULES = CONFIGS / "observability"
# Slow enough that what a client adds to a first token is a small part of it.
SCALE = 8.0
WORDS = "river stone market window teacher garden winter engine paper silver cloud road "

needs_prometheus = pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed")
needs_chromium = pytest.mark.skipif(shutil.which("chromium") is None, reason="Chromium is not installed")


@dataclass(frozen=True)
class Watched:
    """The app on simulated GPUs, with a Prometheus that scrapes it where there is one."""

    url: str
    client: openai.OpenAI
    prometheus: str | None

    def query(self, expr: str) -> list[dict[str, Any]]:
        """An instant query's series."""
        status, body = get(f"{self.prometheus}/api/v1/query?{urllib.parse.urlencode({'query': expr})}")
        told = json.loads(body)
        assert status == 200, (expr, told)
        series: list[dict[str, Any]] = told["data"]["result"]
        return series

    def graph(self, expr: str) -> list[float]:
        """What a panel shows of the last minutes."""
        now = time.time()
        params = {"query": expr, "start": now - 180, "end": now, "step": 5}
        status, body = get(f"{self.prometheus}/api/v1/query_range?{urllib.parse.urlencode(params)}")
        told = json.loads(body)
        assert status == 200, (expr, told)
        return [float(value) for one in told["data"]["result"] for _, value in one["values"]]

    def value(self, expr: str) -> float:
        """The sum of an instant query's series."""
        return sum(float(one["value"][1]) for one in self.query(expr))

    def live(self, name: str) -> dict[str, Any]:
        """What the console shows of a class."""
        classes = httpx.get(f"{self.url}/console/live", timeout=30).json()["classes"]
        found: dict[str, Any] = next(one for one in classes if one["name"] == name)
        return found

    def complete(self, tokens: int, tier: str, most: int = 16, headers: Mapping[str, str] | None = None) -> Measured:
        """One streamed answer, as its client sees it."""
        prompt = WORDS * (tokens // 12)
        begin = time.monotonic()
        first = last = math.nan
        used = at_first = 0
        extra = {"ignore_eos": True, "service_tier": tier}
        stream = self.client.completions.create(
            model=MODEL,
            prompt=f"{begin} {prompt}",
            max_tokens=most,
            stream=True,
            stream_options={"include_usage": True},
            logprobs=1,
            extra_body=extra,
            extra_headers=headers,
        )
        for chunk in stream:
            if chunk.choices:
                last = time.monotonic()
                if not at_first:
                    # Tokens that make no text by themselves come with the next.
                    assert chunk.choices[0].logprobs is not None
                    first, at_first = last, len(chunk.choices[0].logprobs.tokens or ())
            if chunk.usage is not None:
                used = chunk.usage.completion_tokens
        return Measured(first - begin, (last - first) / (used - at_first), used)


@dataclass(frozen=True)
class Measured:
    """What a client measured of one answer, in seconds."""

    ttft: float
    tpot: float
    tokens: int


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("observability")

    def change(document: dict[str, Any]) -> None:
        args = document["applications"][0]["args"]
        del args["pools"]["long_context"]
        args["routing"]["rules"] = [{"class": "batch", "pool": "batch"}, {"pool": "interactive"}]
        for pool in args["pools"].values():
            pool |= {"num_gpus": 0, "num_cpus": 0.3, "executor": {**pool["executor"], "time_scale": SCALE}}
            pool.pop("reserve")
        args["pools"]["interactive"]["engine"]["max_num_seqs"] = 4
        args["ingress"] = {"num_cpus": 0.2}
        generous = {"ttft_ms": 20_000, "tpot_ms": 2000}
        args["classes"] = {
            # What it promises can't be kept while anything else runs.
            "impatient": {"service_tier": "priority", "targets": {"ttft_ms": 2}, "dials": {"hold_ms": 1}},
            "standard": {"service_tier": "default", "targets": generous},
            "batch": {"service_tier": "flex"},
        }

    config = variant(CONFIGS / "simulated.yaml", folder / "simulated.yaml", change)
    log = folder / "serve.log"
    with ExitStack() as stack:
        command = [str(ROOT / "scripts" / "serve"), "--no-setup", str(config)]
        process = stack.enter_context(running(command, log))
        wait_ready(url_of(config), lambda: process.poll() is None, log)
        prometheus = None
        if shutil.which("prometheus") is not None:
            address = f"127.0.0.1:{free_port()}"
            prometheus = f"http://{address}"
            files = [f"--config.file={RULES / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'tsdb'}"]
            output = folder / "prometheus.log"
            stack.enter_context(running(["prometheus", *files, f"--web.listen-address={address}"], output))
            wait_for("Prometheus", lambda: get(f"{prometheus}/-/ready")[0] == 200, otherwise=output.read_text)
        client = stack.enter_context(open_client(url_of(config)))
        yield Watched(url_of(config), client, prometheus)


def mixed_load(app: Watched) -> None:
    """Some of everything: served at home and elsewhere, given up, refused, and changed not to be refused."""

    def given_up() -> None:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{app.url}/v1/completions", json=body, timeout=60) as answer:
            next(answer.iter_bytes())

    def impatient(headers: dict[str, str]) -> None:
        # Idle engines serve it however late; else it is refused.
        with contextlib.suppress(openai.InternalServerError):
            app.complete(500, "priority", headers=headers)

    with ThreadPoolExecutor(24) as threads:
        work: list[Future[Any]] = [threads.submit(app.complete, 600, "default", 40) for _ in range(10)]
        work += [threads.submit(app.complete, 600, "flex", 40) for _ in range(4)]
        work += [threads.submit(given_up) for _ in range(2)]
        work += [threads.submit(impatient, headers) for headers in [{}, {"x-sluice-degrade": "allow"}] * 2]
        for one in work:
            one.result()


def finished(app: Watched) -> float:
    return app.value("sum(ray_sluice_requests_total)")


def test_the_page_prometheus_and_clients_agree(watched: Watched) -> None:
    exprs = {
        "requests": 'ray_sluice_requests_total{class="standard",outcome="finished"}',
        "tokens": 'ray_sluice_output_tokens_total{class="standard"}',
        "ttft": 'ray_sluice_spent_seconds_total{class="standard",phase="first_token"}',
        "decode": 'ray_sluice_spent_seconds_total{class="standard",phase="decode"}',
    }
    # What other tests sent has left the page's window, and has reached Prometheus.
    wait_for("an empty page", lambda: watched.live("standard")["requests"] == 0, 90)
    before = {name: watched.value(expr) for name, expr in exprs.items() if watched.prometheus is not None}
    ids = [f"agree-{time.monotonic_ns()}-{number}" for number in range(8)]
    measured = [watched.complete(4000, "default", 24, {"x-request-id": request_id}) for request_id in ids]
    wait_for("the page to have all", lambda: watched.live("standard")["requests"] == len(measured))
    page = watched.live("standard")
    ttfts, tpots = [one.ttft for one in measured], [one.tpot for one in measured]
    tokens = sum(one.tokens for one in measured)

    told = [httpx.get(f"{watched.url}/v1/requests/{request_id}", timeout=30).json() for request_id in ids]
    assert [one["output_tokens"] for one in told] == [one.tokens for one in measured], told
    assert page["attainment"] == 1.0
    assert page["output_tokens_per_s"] * 60 == pytest.approx(tokens, rel=0.05)
    for shown, seen in ((page["ttft_ms"], ttfts), (page["tpot_ms"], tpots)):
        expected = percentiles(seen)
        assert expected is not None
        assert shown == {name: pytest.approx(value, rel=0.05) for name, value in expected.items()}
    if watched.prometheus is None:
        return
    wait_for(
        "Prometheus to have seen them",
        lambda: watched.value(exprs["requests"]) - before["requests"] == len(measured),
        otherwise=lambda: watched.query(exprs["requests"]),
    )
    gained = {name: watched.value(expr) - before[name] for name, expr in exprs.items()}
    assert gained["tokens"] == tokens
    assert gained["ttft"] / len(measured) == pytest.approx(statistics.mean(ttfts), rel=0.05)
    assert gained["decode"] / (tokens - len(measured)) == pytest.approx(statistics.mean(tpots), rel=0.05)
    # A quantile is as good as its bucket is narrow.
    median = 'histogram_quantile(0.5, sum by (le) (ray_sluice_time_to_first_token_seconds_bucket{class="standard"}))'
    assert watched.value(median) == pytest.approx(statistics.median(ttfts), rel=0.2)


@needs_prometheus
def test_every_panel_has_data_after_a_mixed_load(watched: Watched) -> None:
    # A rate needs two looks at a counter, and something between them.
    mixed_load(watched)
    wait_for("the first figures", lambda: finished(watched) >= 20)
    mixed_load(watched)
    wait_for("the second figures", lambda: finished(watched) >= 40)

    def empty() -> list[tuple[str, str, str]]:
        found = []
        for name, (_, rows) in dashboards.DASHBOARDS.items():
            for title, expr in dashboards.queries(rows()):
                whole = expr.replace("$__rate_interval", "2m").replace("$class", ".*")
                if not any(map(math.isfinite, watched.graph(whole))):
                    found.append((name, title, whole))
        return found

    # Where there is no GPU there is nothing to tell of it.
    gpu_less = {"GPU utilisation", "GPU memory"}
    try:
        wait_for("data for every panel", lambda: {title for _, title, _ in empty()} <= gpu_less, 30, every_s=2)
    except AssertionError:
        pytest.fail(f"without data: {empty()}")


@needs_prometheus
def test_the_alerts_are_valid_and_look_at_what_there_is(watched: Watched) -> None:
    subprocess.run(["promtool", "check", "config", str(RULES / "prometheus.yaml")], check=True, capture_output=True)
    status, body = get(f"{watched.prometheus}/api/v1/rules")
    assert status == 200
    (group,) = json.loads(body)["data"]["groups"]
    assert {rule["health"] for rule in group["rules"]} <= {"ok", "unknown"}
    # Each side of their comparisons has figures to compare.
    for expr in (
        "ray_sluice_slo_requests_total",
        "ray_sluice_refusals_total",
        "ray_sluice_requests_total",
        "ray_sluice_replicas_answering",
    ):
        wait_for(expr, lambda expr=expr: bool(watched.graph(expr)))  # type: ignore[misc]
    for pool in ("interactive", "batch"):
        assert watched.graph(f'ray_sluice_replicas_answering{{pool="{pool}"}}')[-1] == 1


def test_a_planted_slow_request_is_explained(watched: Watched) -> None:
    request_id = f"planted-{time.monotonic_ns()}"
    with ThreadPoolExecutor(4) as threads:
        # Alike in class and length, these are due before it.
        ahead = [threads.submit(watched.complete, 6000, "default", 4) for _ in range(3)]
        wait_for("those ahead", lambda: watched.live("standard")["in_flight"] == 3)
        watched.complete(6000, "default", 4, headers={"x-request-id": request_id})
        for one in ahead:
            one.result()
    told = httpx.get(f"{watched.url}/v1/requests/{request_id}", timeout=30).json()
    assert told["verdict"] == "met"
    assert told["engine"]["ahead_tokens"] > 6000
    assert told["engine"]["ahead_requests"] in (1, 2, 3)
    assert "prompt tokens of" in told["why"]
    assert told["engine"]["prefill_chunks"] >= 3


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        path, options = shutil.which("chromium"), ["--no-sandbox", "--disable-dev-shm-usage"]
        browser = playwright.chromium.launch(executable_path=path, args=options)
        yield browser
        browser.close()


@needs_chromium
class TestConsole:
    """In a real browser."""

    @pytest.fixture(params=["light-desk", "dark-phone"])
    def page(self, request: pytest.FixtureRequest, browser: Browser, watched: Watched) -> Iterator[Page]:
        scheme, size = request.param.split("-")
        width, height = {"desk": (1280, 900), "phone": (390, 844)}[size]
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        page = context.new_page()
        faults: list[str] = []
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("console", lambda message: faults.append(message.text) if message.type == "error" else None)
        page.goto(f"{watched.url}/console")
        page.wait_for_selector("#classes tr")
        yield page
        context.close()
        assert faults == []

    def test_a_chat_shows_where_its_time_went(self, page: Page, tmp_path: Path) -> None:
        # By keyboard alone.
        page.focus("#prompt")
        page.keyboard.type("Why is the sky blue?")
        page.keyboard.press("Tab")
        page.keyboard.type("standard")
        page.keyboard.press("Tab")
        page.keyboard.type("12")
        page.focus("#prompt")
        page.keyboard.press("Control+Enter")
        page.wait_for_selector(".message[data-request]", timeout=60_000)
        bar = page.locator(".message .bar").first
        label = bar.get_attribute("aria-label") or ""
        assert [part.split()[0] for part in label.split(", ")] == ["render", "queue", "prefill", "decode", "relay"]
        # A mark for each piece as it arrived.
        assert bar.locator("b").count() >= 2
        page.screenshot(path=str(tmp_path / "chat.png"), full_page=True)

    def test_it_shows_what_the_server_tells_and_fits_the_window(self, page: Page, watched: Watched) -> None:
        names = page.locator("#classes tr th").all_text_contents()
        assert names == ["impatient", "standard", "batch"]
        assert page.locator("#pools tr").count() == 2
        page.wait_for_selector("#slow li")
        # Wide tables scroll in their own frames.
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")

    def test_stopping_is_told_as_what_it_is(self, page: Page) -> None:
        page.fill("#prompt", "Tell me everything.")
        page.fill("#most", "3000")
        page.click("#send")
        expect(page.locator("#talk .message").last).to_have_text(re.compile(r".{40,}"), timeout=30_000)
        page.click("#stop")
        page.wait_for_selector("text=Its client gave it up in the phase decode", timeout=30_000)
