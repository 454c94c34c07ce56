"""A fleet of three simulated GPUs under load: classes kept inside their targets, against silos and one FCFS pool.

Everything is real but the GPUs: the app with its HTTP entry, vLLM's engines, sockets. All times are simulated seconds:
`--time-scale` makes a simulated second last longer, so that a few cores can drive three GPUs' engines.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import uvloop
import yaml

from app.engine.step_cost import load_profile
from scripts.fleet.arms import TITLES, command
from scripts.fleet.load import Endpoint, Generator, Outcome
from scripts.fleet.scenarios import BATCH, CHAT, Scenario, Source, scenarios
from scripts.streaming import arms

_PROFILE = "h100-llama-3.1-8b"
_REPLICAS_TIMEOUT_S = 300.0


def _victim(server: arms.Server) -> psutil.Process:
    for pid in server.processes():
        process = psutil.Process(pid)
        if "ServeReplica" in (title := " ".join(process.cmdline())) and ":interactive" in title:
            return process
    raise RuntimeError("no replica of the interactive pool was found")


async def _drive(server: arms.Server, endpoint: Endpoint, scenario: Scenario, seed: int) -> list[Outcome]:
    # Engines learn how long their steps take.
    kinds = [replace(kind, key=next(iter(scenario.keys), "")) for kind in (CHAT, BATCH)]
    warm = Scenario("warm-up", [Source(kind, 6.0) for kind in kinds], seconds=4)
    await Generator(endpoint, warm, seed + 1).run()
    generator = Generator(endpoint, scenario, seed)
    # Pauses of the client would be taken for the server's.
    gc.collect()
    gc.freeze()

    async def kill() -> None:
        assert scenario.kills_at is not None
        await asyncio.sleep(scenario.kills_at * endpoint.scale)
        _victim(server).send_signal(signal.SIGKILL)

    killing = asyncio.create_task(kill()) if scenario.kills_at is not None else None
    outcomes = await generator.run()
    if killing is not None:
        await killing
    return outcomes


def _percentile(values: Sequence[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(share * len(ordered)) - 1)] if ordered else math.nan


def summarise(scenario: Scenario, outcomes: Sequence[Outcome], scale: float) -> dict[str, Any]:
    """Figures of one run, by class and (class, key); times in simulated seconds, but for refusals, which no GPU has a
    part in: those are in real ones."""
    begin, end = scenario.measured_from, scenario.seconds
    figures: dict[str, Any] = {"classes": {}}
    groups: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if begin <= outcome.sent < end:
            name = outcome.service_class + (f"/{outcome.key}" if outcome.key else "")
            groups.setdefault(name, []).append(outcome)
    for name, group in sorted(groups.items()):
        offered = [one for one in group if one.status or one.error or one.ended]
        ttfts = [one.ttft for one in offered if one.ttft is not None]
        refusals = [(one.ended - one.sent) * scale for one in offered if one.status in (429, 503)]
        figures["classes"][name] = {
            "offered": len(offered),
            "attainment": sum(one.is_good for one in offered) / max(1, len(offered)),
            "refused": len(refusals),
            "failed": sum(1 for one in offered if one.error and one.status not in (429, 503)),
            "lost_before_first_token": sum(
                1 for one in offered if one.error and one.first is None and one.status not in (429, 503)
            ),
            "ttft_p50": _percentile(ttfts, 0.5),
            "ttft_p99": _percentile(ttfts, 0.99),
            "tpot_p99": _percentile([one.tpot for one in offered if one.tpot is not None], 0.99),
            "refusal_p50_real": _percentile(refusals, 0.5),
            "refusal_p99_real": _percentile(refusals, 0.99),
            "pools": {pool: sum(one.pool == pool for one in offered) for pool in sorted({one.pool for one in offered})},
        }
    figures["tokens_per_s"] = {
        kind: sum(_tokens_within(one, begin, end) for one in outcomes if one.service_class in names) / (end - begin)
        for kind, names in {
            "interactive": ("interactive",),
            "batch_and_long": ("batch", "standard"),
            "prompts_too": ("batch", "standard", "interactive"),
        }.items()
    }
    measured = [one for one in outcomes if begin <= one.sent < end]
    figures["goodput"] = sum(one.is_good for one in measured) / (end - begin)
    given = sum(one.tokens + one.prompt_tokens for one in measured if one.first is not None)
    late = sum(one.tokens + one.prompt_tokens for one in measured if one.first is not None and not one.is_good)
    figures["wasted_share"] = late / given if given else 0.0
    errors = [
        abs(one.predicted - one.ttft) / one.ttft
        for one in measured
        if one.predicted is not None and one.ttft is not None and one.service_class != "batch"
    ]
    figures["prediction_error_p50"] = statistics.median(errors) if errors else math.nan
    figures["predictions"] = len(errors)
    return figures


def _tokens_within(outcome: Outcome, begin: float, end: float) -> float:
    """Prompt and output tokens of a request within a stretch of time, spread evenly over prefill and decode."""
    if outcome.first is None or outcome.last is None:
        return 0.0
    total = 0.0
    for tokens, start, stop in (
        (outcome.prompt_tokens, outcome.sent, outcome.first),
        (outcome.tokens, outcome.first, outcome.last),
    ):
        overlap = min(stop, end) - max(start, begin)
        if overlap > 0 and stop > start:
            total += tokens * overlap / (stop - start)
    return total


def _wait_for_all_replicas() -> None:
    """One replica of ray.serve.llm answers before the others are there.

    Raises:
        RuntimeError: they did not come.
    """
    # A cluster that `serve run` starts wants its token.
    environment = {**os.environ, "RAY_AUTH_MODE": "token"}
    status = [str(Path(sys.executable).with_name("serve")), "status", "--name", "llm"]
    deadline = time.monotonic() + _REPLICAS_TIMEOUT_S
    while time.monotonic() < deadline:
        told = subprocess.run(status, env=environment, capture_output=True, text=True, timeout=60, check=False)
        if told.returncode == 0 and yaml.safe_load(told.stdout)["status"] == "RUNNING":
            return
        time.sleep(2.0)
    raise RuntimeError(f"ray.serve.llm's replicas did not start: {told.stdout[-2000:]}{told.stderr[-500:]}")


def run_arm(arm: str, scenario: Scenario, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """One arm under one scenario, started afresh."""
    port = arms.free_port()
    environment = {"PYTHONPATH": str(arms.ROOT), "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    if scenario.keys:
        environment["SLUICE_API_KEYS"] = ",".join(f"{key}={key}" for key in sorted(scenario.keys))
    started = arms.started(arm, command(arm, _PROFILE, options.time_scale, port, folder), environment, port, folder)
    with started as server, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        if arm == "ray-llm":
            _wait_for_all_replicas()
        endpoint = Endpoint(port, arms.MODEL_NAME, options.time_scale, arm != "ray-llm")
        outcomes = runner.run(_drive(server, endpoint, scenario, options.seed))
    if options.outcomes:
        path = options.outcomes / f"{arm}-{options.scenario_name}.json"
        path.write_text(json.dumps([asdict(one) for one in outcomes]))
    return summarise(scenario, outcomes, options.time_scale)


def show(arm: str, figures: dict[str, Any]) -> None:
    """Print one arm's figures."""
    print(f"  {TITLES[arm]}")
    for name, row in figures["classes"].items():
        pools = " ".join(f"{pool or '-'}:{count}" for pool, count in row["pools"].items())
        print(
            f"    {name:20} attained {row['attainment']:6.3f} of {row['offered']:5}  TTFT p50 {row['ttft_p50']:7.3f} "
            f"p99 {row['ttft_p99']:7.3f}  TPOT p99 {row['tpot_p99'] * 1000:6.1f} ms  refused {row['refused']:4} "
            f"(real p50 {row['refusal_p50_real'] * 1000:.0f} p99 {row['refusal_p99_real'] * 1000:.0f} ms)  "
            f"failed {row['failed']}  {pools}"
        )
    rates = ", ".join(f"{name} {value:.0f}" for name, value in figures["tokens_per_s"].items())
    print(
        f"    tokens/s: {rates}; goodput {figures['goodput']:.2f}/s; late or lost {figures['wasted_share']:.3f}; "
        f"prediction error p50 {figures['prediction_error_p50']:.3f} of {figures['predictions']}"
    )


def main(argv: list[str]) -> int:
    """Print the figures."""
    known = scenarios(load_profile(_PROFILE))
    parser = argparse.ArgumentParser(prog="bench fleet", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--scenario", action="append", choices=sorted(known), help="which (default: all)")
    parser.add_argument("--arm", action="append", choices=sorted(TITLES), help="which (default: those of the scenario)")
    parser.add_argument(
        "--time-scale", type=float, default=6.0, help="real seconds per simulated one (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the load (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    parser.add_argument("--outcomes", type=Path, metavar="DIR", help="write every request's outcome to this folder")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the arms' first tokens against throughput")
    options = parser.parse_args(argv)
    results: dict[str, Any] = {"time_scale": options.time_scale, "cores": len(os.sched_getaffinity(0)), "scenarios": {}}
    with tempfile.TemporaryDirectory() as name:
        for scenario_name in options.scenario or known:
            scenario = known[scenario_name]
            options.scenario_name = scenario_name
            print(f"\n{scenario.title} (three simulated GPUs, {scenario.seconds:g} simulated seconds)", flush=True)
            rows = results["scenarios"].setdefault(scenario_name, {})
            for arm in options.arm or scenario.arms:
                rows[arm] = run_arm(arm, scenario, options, Path(name))
                show(arm, rows[arm])
                sys.stdout.flush()
                if options.json:
                    options.json.write_text(json.dumps(results, indent=2) + "\n")
    if options.plot:
        plot(results["scenarios"], options.plot)
    return 0


def plot(results: dict[str, Any], path: Path) -> None:
    """All tokens against interactive latency, a point per arm: a row per scenario, a panel per measure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4 * len(results)), layout="constrained")
    panels = figure.subplots(len(results), 2, squeeze=False)
    for row_of_panels, (name, rows) in zip(panels, results.items(), strict=True):
        for panel, measure in zip(row_of_panels, ("TTFT", "TPOT"), strict=True):
            for arm, row in rows.items():
                groups = [group for key, group in row["classes"].items() if key.startswith("interactive")]
                at = max((group[f"{measure.lower()}_p99"] for group in groups), default=0.0)
                point = (at * 1000, row["tokens_per_s"]["prompts_too"])
                panel.plot(*point, "o")
                panel.annotate(arm, point, fontsize=8, xytext=(4, 4), textcoords="offset points")
            panel.set_title(f"{name} (simulated)")
            panel.set_xlabel(f"interactive {measure} p99, ms")
            panel.set_ylabel("tokens/s, prompts and answers")
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
