"""Open streams: thousands at once through one ingress replica, on the simulated GPU.

Opens the streams, waits until all of them have their answers, and tells whether any failed, the longest gap between two
tokens of a stream, and how much memory the ingress took per stream while all were open. The engine is vLLM's own on a
simulated GPU, slowed down so that a few cores can keep up: its times are simulated ones.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import uvloop
import yaml

from app.engine.step_cost import load_profile, step_seconds
from scripts.streaming import arms
from scripts.streaming.load import Load, Outcome, open_all
from scripts.streaming.tiny_model import write_tiny_model

_PROFILE = "h100-llama-3.1-8b"
_STEP_TOKENS = 4096
_PROMPT_TOKENS = 16


def _config(model: Path, port: int, streams: int, time_scale: float) -> dict[str, object]:
    engine = {
        "max_model_len": 2048,
        "max_num_seqs": streams,
        "max_num_batched_tokens": max(_STEP_TOKENS, 2 * streams),
    }
    pool = {
        "executor": {"kind": "simulated", "profile": _PROFILE, "time_scale": time_scale},
        "num_cpus": 0.5,
        "max_ongoing_requests": streams,
        "engine": engine,
    }
    return arms.app_config(model, port, pool, {"num_cpus": 0.2, "max_ongoing_requests": streams + 100})


def _ingress(server: arms.Server) -> psutil.Process:
    for pid in server.processes():
        process = psutil.Process(pid)
        if "ServeReplica" in " ".join(process.cmdline()) and "ingress" in " ".join(process.cmdline()):
            return process
    raise RuntimeError("the ingress's process was not found")


async def _watch(process: psutil.Process, readings: list[tuple[float, int]]) -> None:
    while True:
        readings.append((time.perf_counter(), process.memory_info().rss))
        await asyncio.sleep(0.25)


async def _load(
    server: arms.Server, streams: int, tokens: int, ramp_s: float
) -> tuple[list[Outcome], list[tuple[float, int]]]:
    ingress = _ingress(server)

    def load(count: int, output_tokens: int, seed: int) -> Load:
        return Load(
            port=server.port,
            path="/v1/chat/completions",
            model=arms.MODEL_NAME,
            streams=count,
            seconds=0,
            prompt_tokens=_PROMPT_TOKENS,
            output_tokens=output_tokens,
            seed=seed,
        )

    # What the first requests leave behind for good is not the streams'.
    await open_all(load(100, 4, 1), 1.0)
    readings: list[tuple[float, int]] = []
    watch = asyncio.create_task(_watch(ingress, readings))
    await asyncio.sleep(1)
    outcomes = await open_all(load(streams, tokens, 2), ramp_s)
    watch.cancel()
    return outcomes, readings


def _all_open(outcomes: Sequence[Outcome]) -> tuple[float, float]:
    """From when to when every stream had its first token and none its last."""
    complete = [outcome for outcome in outcomes if outcome.tokens]
    return max(outcome.tokens[0] for outcome in complete), min(outcome.tokens[-1] for outcome in complete)


def main(argv: list[str]) -> int:
    """Print the figures; 1 if a stream failed or they were never all open at once."""
    parser = argparse.ArgumentParser(
        prog="bench open-streams", description=__doc__.splitlines()[0] if __doc__ else None
    )
    parser.add_argument("--streams", type=int, default=2000, help="streams at once (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=40, help="tokens per answer (default: %(default)s)")
    parser.add_argument(
        "--time-scale", type=float, default=30.0, help="real seconds per simulated one (default: %(default)s)"
    )
    parser.add_argument("--ramp", type=float, default=15.0, help="seconds over which they open (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="200 streams")
    options = parser.parse_args(argv)
    streams = 200 if options.quick else options.streams

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_tiny_model(folder / "model")
        port = arms.free_port()
        config = folder / "open-streams.yaml"
        config.write_text(yaml.safe_dump(_config(model, port, streams, options.time_scale)))
        with (
            arms.started("open-streams", arms.launch(config, "haproxy"), {}, port, folder) as server,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            outcomes, readings = runner.run(_load(server, streams, options.tokens, options.ramp))

    failed = [outcome for outcome in outcomes if outcome.error is not None]
    begin, end = _all_open(outcomes)
    before = readings[2][1]
    during = sorted(rss for at, rss in readings if begin <= at <= end)
    idle = during[len(during) // 2] if during else float("nan")
    profile = load_profile(_PROFILE)
    context = _PROMPT_TOKENS + options.tokens
    longest_step = options.time_scale * step_seconds(
        profile, streams, streams * context, [(_PROMPT_TOKENS, 0)] * (_STEP_TOKENS // _PROMPT_TOKENS)
    )
    gaps = [
        later - earlier
        for outcome in outcomes
        for earlier, later in zip(outcome.tokens, outcome.tokens[1:], strict=False)
    ]
    figures = {
        "streams": streams,
        "failed": len(failed),
        "all_open_for_s": max(0.0, end - begin),
        "longest_gap_s": max(gaps, default=float("nan")),
        "longest_simulated_step_s": longest_step,
        "gap_beyond_the_engine_s": max(gaps, default=float("nan")) - longest_step,
        "ingress_rss_before_mib": before / 2**20,
        "ingress_rss_all_open_mib": idle / 2**20,
        "ingress_kib_per_stream": (idle - before) / streams / 1024,
        "cores": len(os.sched_getaffinity(0)),
    }
    print(
        f"\n{streams} streams at once through one ingress replica; simulated GPU, time scale {options.time_scale:g}\n"
    )
    for key, value in figures.items():
        print(f"  {key:28} {value:10.3f}" if isinstance(value, float) else f"  {key:28} {value:10}")
    for outcome in failed[:5]:
        print(f"failed: {outcome.error}", file=sys.stderr)
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 1 if failed or not during else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
