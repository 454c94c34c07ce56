"""Scheduling: classes that share an engine, under vLLM's own schedulers and the deadline scheduler.

Puts the same load on one engine, one way of scheduling after the other: requests that come at random times whatever
becomes of those before, and clients that always wait for their answers. By default the scheduler, the KV cache manager
and the prefix cache are vLLM's and everything else is simulated in virtual time: a step takes what the cost model of a
GPU says, so that a run takes seconds and gives the same figures on every machine. `--engine simulated` runs vLLM's
whole engine in real time on the simulated GPU, `--engine cpu` on a real model.

`bound` is what no scheduler can exceed, even if it knows the future. `tuned` is the long-prefill threshold that serves
the first class best.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

# Before vLLM is imported, which reads it then.
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")

from app.engine.step_cost import load_profile
from app.errors import ConfigError
from scripts.scheduling import arms, live
from scripts.scheduling.bound import goodput_bound
from scripts.scheduling.cost import RUNNING, WAITING, schedule_cost
from scripts.scheduling.figures import Pooled, plot, table
from scripts.scheduling.workload import (
    MIXES,
    Mix,
    check_lengths,
    first_alone,
    load_mix,
    most_prompt_tokens,
    open_offers,
    scaled,
    with_trace,
)

_CPU_ENGINE = {
    "max_num_seqs": 64,
    "max_num_batched_tokens": 2048,
    "max_model_len": 8192,
    "kv_cache_memory_bytes": 2 << 30,
}
# Rates of the first class that --sweep tries, as multiples of the mix's.
_SWEEP = (0.25, 0.5, 1, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 8, 10)
_ENOUGH = 0.99
_TUNE = "tuned"
_TUNED = "vLLM priority, threshold (tuned)"

Results = dict[str, Pooled]


def run_all(options: argparse.Namespace, mix: Mix, names: tuple[str, ...]) -> Results:
    """Each arm over all seeds, by title."""
    results: Results = {}
    for name in names:
        if name == _TUNE:
            tried = {tokens: _run(options, mix, arms.threshold_arm(tokens)) for tokens in arms.THRESHOLDS}
            first = next(iter(mix))
            best = max(tried, key=lambda tokens: _merit(tried[tokens], first))
            results[f"{_TUNED}: {best}"] = tried[best]
        else:
            results[arms.ARMS[name].title] = _run(options, mix, arms.ARMS[name])
    return results


def _merit(pooled: Pooled, first: str) -> tuple[float, float]:
    figures = pooled.figures(first)
    attained = figures["attainment"]
    return (attained if attained == attained else 0.0, -figures["ttft_p99_ms"])


def _run(options: argparse.Namespace, mix: Mix, arm: arms.Arm) -> Pooled:
    print(f"{arm.title} ...", file=sys.stderr, flush=True)
    pooled = Pooled()
    ranks = list(mix)
    for seed in _seeds(options):
        if options.engine == "virtual":
            run = arms.run_virtual(arm, _setting(options, mix), seed)
        else:
            run = live.run_live(_job(options, mix, arm, seed))
        run.outcomes.sort(key=lambda outcome: ranks.index(outcome.offer.service_class))
        pooled.runs.append(run)
    return pooled


def _seeds(options: argparse.Namespace) -> range:
    return range(options.seed, options.seed + options.seeds)


def _setting(options: argparse.Namespace, mix: Mix) -> arms.Setting:
    return arms.Setting(
        profile=load_profile(options.profile),
        mix=mix,
        seconds=options.seconds,
        max_num_batched_tokens=options.max_num_batched_tokens,
        is_asynchronous=not options.no_async_scheduling,
    )


def _job(options: argparse.Namespace, mix: Mix, arm: arms.Arm, seed: int) -> live.Job:
    if arm.first_class_only:
        mix = first_alone(mix)
    if options.engine == "cpu":
        engine = dict(_CPU_ENGINE)
    else:
        engine = {
            "max_num_seqs": 256,
            "max_num_batched_tokens": options.max_num_batched_tokens,
            "max_model_len": arms.MAX_MODEL_LEN,
            "async_scheduling": not options.no_async_scheduling,
        }
    engine["long_prefill_token_threshold"] = arm.engine.get("long_prefill_token_threshold", 0)
    engine["scheduling_policy"] = arm.engine.get("policy", "fcfs")
    return live.Job(
        kind=options.engine,
        profile=options.profile,
        is_deadline=arm.scheduler_cls is not None,
        engine=engine,
        mix={name: load.model_dump(mode="json") for name, load in mix.items()},
        seconds=options.seconds,
        seed=seed,
    )


def bound(options: argparse.Namespace, mix: Mix) -> float:
    """The most goodput that is possible, over all seeds."""
    profile = load_profile(options.profile)
    longest = most_prompt_tokens(arms.MAX_MODEL_LEN)
    bounds = [
        goodput_bound(profile, open_offers(mix, options.seconds, seed, longest), options.seconds)
        for seed in _seeds(options)
    ]
    return sum(bounds) / len(bounds)


def ratios(results: Results, mix: Mix) -> dict[str, dict[str, float]]:
    """Each arm against FCFS, and the first class's TTFT against what it is alone."""
    fcfs, alone = results.get(arms.ARMS[arms.FCFS].title), results.get(arms.ARMS[arms.ALONE].title)
    first = next(iter(mix))
    compared: dict[str, dict[str, float]] = {}
    for title, pooled in results.items():
        own: dict[str, float] = {}
        if alone is not None:
            own[f"{first} TTFT p99 / alone"] = (
                pooled.figures(first)["ttft_p99_ms"] / alone.figures(first)["ttft_p99_ms"]
            )
        if fcfs is not None and pooled is not alone:
            for name in pooled.classes():
                ours, theirs = pooled.figures(name), fcfs.figures(name)
                own[f"{name} TTFT p99 / FCFS"] = ours["ttft_p99_ms"] / theirs["ttft_p99_ms"]
                own[f"{name} tok/s / FCFS"] = ours["tokens_per_s"] / theirs["tokens_per_s"]
            totals = [sum(one.figures(name)["tokens_per_s"] for name in one.classes()) for one in (pooled, fcfs)]
            own["all tok/s / FCFS"] = totals[0] / totals[1]
        compared[title] = own
    return compared


def sweep(options: argparse.Namespace, mix: Mix, names: tuple[str, ...]) -> dict[str, Any]:
    """Up to which rate 99 % of the first class meet their targets, the other classes' load unchanged."""
    first = next(iter(mix))
    base = mix[first].rate
    assert base is not None
    found: dict[str, Any] = {}
    for name in names:
        points = []
        for factor in _SWEEP:
            at = scaled(mix, first, base * factor)
            ((title, pooled),) = run_all(options, at, (name,)).items()
            points.append((base * factor, pooled.figures(first)["attainment"], pooled.goodput(), bound(options, at)))
            if points[-1][1] < _ENOUGH:
                break
        enough = [point for point in points if point[1] >= _ENOUGH]
        found[_TUNED if name == _TUNE else title] = {
            "rate": enough[-1][0] if enough else 0.0,
            "goodput_of_bound": enough[-1][2] / enough[-1][3] if enough else 0.0,
            "points": [dict(zip(("rate", "attainment", "goodput", "bound"), point, strict=True)) for point in points],
        }
    return found


def _mix(options: argparse.Namespace) -> Mix:
    if options.mix is not None:
        mix = load_mix(options.mix)
    elif options.trace:
        mix = {}
    else:
        mix = load_mix("cpu" if options.engine == "cpu" else "mixed")
    for name, path, rate in options.trace:
        mix = with_trace(mix, name or next(iter(mix), "interactive"), path, rate)
    check_lengths(mix, _CPU_ENGINE["max_model_len"] if options.engine == "cpu" else arms.MAX_MODEL_LEN)
    return mix


def _trace(text: str) -> tuple[str | None, Path, float | None]:
    name, given, path = text.rpartition("=")
    path, at, rate = path.rpartition("@")
    try:
        return (name if given else None, Path(path if at else rate), float(rate) if at else None)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not [CLASS=]FILE[@RATE]") from None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="bench scheduling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--engine", choices=("virtual", "simulated", "cpu"), default="virtual", help="see above")
    parser.add_argument(
        "--profile", default="h100-llama-3.1-8b", help="cost profile of the simulated GPU (default: %(default)s)"
    )
    parser.add_argument(
        "--mix", metavar="NAME|FILE", help=f"{', '.join(MIXES)}, or a YAML file as in scripts/scheduling/workload.py"
    )
    parser.add_argument(
        "--trace",
        type=_trace,
        action="append",
        default=[],
        metavar="[CLASS=]FILE[@RATE]",
        help="a class's arrivals and lengths from a CSV file (arrival_s, input_tokens, output_tokens), played at so "
        "many requests per second; may be given several times",
    )
    parser.add_argument("--seconds", type=float, default=40.0, help="how long requests come (default: %(default)g)")
    parser.add_argument("--seed", type=int, default=0, help="the first seed (default: %(default)s)")
    parser.add_argument("--seeds", type=int, help="runs with different arrivals (default: 8, in real time 1)")
    parser.add_argument(
        "--arms",
        type=lambda text: tuple(text.split(",")),
        metavar="A,B",
        help=f"of {', '.join([*arms.ARMS, _TUNE])} (default: all)",
    )
    parser.add_argument("--sweep", action="store_true", help="also look for the highest rate of the first class")
    parser.add_argument("--cost", action="store_true", help="only measure the CPU time of schedule()")
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048, help="vLLM's (default: %(default)s)")
    parser.add_argument(
        "--no-async-scheduling",
        action="store_true",
        help="plan a step only after the one before, as vLLM's CPU build always does",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them into this file (.png or .svg)")
    return parser


def main(argv: list[str]) -> int:
    """Print the tables, write the plot and the JSON."""
    parser = _parser()
    options = parser.parse_args(argv)
    if options.seeds is None:
        options.seeds = 8 if options.engine == "virtual" else 1
    names = options.arms or (arms.FCFS, arms.PRIORITY, _TUNE, arms.DEADLINE, arms.ALONE)
    for name in names:
        if name not in (*arms.ARMS, _TUNE):
            parser.error(f"no arm {name}; there are {', '.join([*arms.ARMS, _TUNE])}")
    if options.seconds <= 0 or options.seeds < 1:
        parser.error("--seconds must be above 0, and --seeds at least 1")
    if options.sweep and options.engine != "virtual":
        parser.error("--sweep goes with --engine virtual")
    if options.cost:
        cost = schedule_cost()
        print(
            f"schedule() with {RUNNING} running and {WAITING} waiting: vLLM {cost['vllm_us']:.0f} us, "
            f"deadline {cost['deadline_us']:.0f} us, of which the plan {cost['plan_us']:.0f} us, "
            f"{cost['plan_share']:.1%} of vLLM's part"
        )
        if options.json:
            options.json.write_text(json.dumps(cost, indent=2) + "\n")
        return 0
    try:
        load_profile(options.profile)
        mix = _mix(options)
        if options.sweep and mix[next(iter(mix))].rate is None:
            raise ConfigError("--sweep needs a mix whose first class has a rate")
        results = run_all(options, mix, names)
        # A real CPU has no cost model to bound it by.
        most = None if options.engine == "cpu" else bound(options, mix)
        found = sweep(options, mix, tuple(name for name in names if name != arms.ALONE)) if options.sweep else {}
    except ConfigError as error:
        parser.error(str(error))

    what = {
        "virtual": f"Simulated {options.profile} in virtual time",
        "simulated": f"Simulated {options.profile} in real time",
        "cpu": "SmolLM2-135M-Instruct on this machine's CPU",
    }[options.engine]
    caption = f"{what}: {options.seeds} x {options.seconds:g} s of {', '.join(mix)}"
    compared = ratios(results, mix)
    print(f"\n{caption}. Times in milliseconds.\n\n{table(results)}")
    for title, own in compared.items():
        print(f"{title}: " + ", ".join(f"{what} {value:.2f}" for what, value in own.items()))
    for title, pooled in results.items():
        if not any(load.targets.ttft_ms or load.targets.tpot_ms for load in mix.values()):
            break
        share = "" if not most else f", {pooled.goodput() / most:.3f} of the bound"
        print(f"{title}: goodput {pooled.goodput():.2f} requests/s{share}")
    for title, one in found.items():
        print(
            f"{title}: 99 % of {next(iter(mix))} in time up to {one['rate']:g} requests/s, "
            f"there with {one['goodput_of_bound']:.3f} of the bound's goodput"
        )
    if options.json:
        document = {
            "engine": options.engine,
            "simulated": options.engine != "cpu",
            "profile": options.profile,
            "seconds": options.seconds,
            "seeds": list(_seeds(options)),
            "mix": {name: load.model_dump(mode="json", exclude_none=True) for name, load in mix.items()},
            "ratios": compared,
            "goodput_bound": most,
            "arms": {title: pooled.summary() for title, pooled in results.items()},
            "sweep": found,
        }
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    if options.plot:
        plot(results, options.plot, caption)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
