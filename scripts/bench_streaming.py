"""Streaming: this app against bare vLLM and ray.serve.llm, in one run.

Starts one server after the other, several rounds of all of them, and puts the same load of streamed chat completions on
each: so many streams at once, each sending one request after the other. The model is tiny, with random weights, and the
engine real, so that what is measured is the way of the tokens. All processes, the load generator's too, may use the
same cores at the same niceness. Every answer is checked to be complete.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scripts.streaming import arms
from scripts.streaming.figures import Measured, Results, plot, ratios, tables
from scripts.streaming.load import Load
from scripts.streaming.tiny_model import write_tiny_model

_STREAMS = (1, 8, 32, 128)


def measure(server: arms.Server, load: Load) -> dict[str, Any]:
    """Put one load on a server; what happened, and the CPU seconds that its processes used meanwhile, by role."""
    generator = subprocess.Popen(
        [sys.executable, "-m", "scripts.streaming.load"],
        cwd=arms.ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with generator:
        assert generator.stdin is not None
        assert generator.stdout is not None
        generator.stdin.write(json.dumps(asdict(load)) + "\n")
        generator.stdin.flush()
        readings: list[dict[tuple[int, str], float]] = []
        for mark in ("open", "close"):
            if generator.stdout.readline().strip() != mark:
                raise RuntimeError("the load generator failed")
            readings.append(server.cpu_seconds())
        window = json.loads(generator.stdout.readline())
        outcomes = [json.loads(line) for line in generator.stdout]
    before, after = readings
    used: defaultdict[str, float] = defaultdict(float)
    for process, seconds in after.items():
        used[process[1]] += seconds - before.get(process, 0.0)
    return {"window": window, "cpu": used, "outcomes": outcomes}


def run(options: argparse.Namespace, folder: Path) -> Results:
    """All arms, round by round."""
    cores = sorted(os.sched_getaffinity(0))
    model = write_tiny_model(folder / "model")
    results: Results = {streams: {name: Measured() for name in options.arms} for streams in options.streams}
    for number in range(options.rounds):
        # Every arm comes first, in the middle and last, as far as the rounds allow.
        shift = number % len(options.arms)
        for name in [*options.arms[shift:], *options.arms[:shift]]:
            print(f"round {number + 1} of {options.rounds}: {arms.ARMS[name].title}", file=sys.stderr, flush=True)
            with arms.running(name, model, folder) as server:
                arms.check_equal_treatment(server, cores)
                for streams in options.streams:
                    load = Load(
                        port=server.port,
                        path="/v1/chat/completions",
                        model=arms.MODEL_NAME,
                        streams=streams,
                        seconds=options.seconds,
                        output_tokens=options.output_tokens,
                        seed=number * 1000 + streams,
                    )
                    results[streams][name].add(measure(server, load))
    return results


def _names(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in arms.ARMS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no arm {unknown[0]}; there are {', '.join(arms.ARMS)}")
    return names


def main(argv: list[str]) -> int:
    """Print the tables, write the plot and the JSON; 1 if an answer was incomplete."""
    parser = argparse.ArgumentParser(prog="bench streaming", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw them into this file (.png or .svg)")
    parser.add_argument("--quick", action="store_true", help="one short round of bare vLLM and this app")
    parser.add_argument("--arms", type=_names, metavar="A,B", help=f"of {','.join(arms.ARMS)} (default: all)")
    parser.add_argument(
        "--streams",
        type=lambda text: [int(part) for part in text.split(",")],
        metavar="N,M",
        help=f"streams at once (default: {','.join(map(str, _STREAMS))})",
    )
    parser.add_argument("--rounds", type=int, help="rounds (default: 3)")
    parser.add_argument("--seconds", type=float, help="measured time per load (default: 8)")
    parser.add_argument("--output-tokens", type=int, default=128, help="tokens per answer (default: %(default)s)")
    options = parser.parse_args(argv)
    options.arms = options.arms or ([arms.BARE, "sluice"] if options.quick else list(arms.ARMS))
    options.streams = options.streams or ([1, 32] if options.quick else list(_STREAMS))
    options.rounds = options.rounds or (1 if options.quick else 3)
    options.seconds = options.seconds or (4.0 if options.quick else 8.0)

    with tempfile.TemporaryDirectory() as name:
        results = run(options, Path(name))
    print(
        f"\n{options.rounds} rounds of {options.seconds:g} s per load, {options.output_tokens} tokens per answer, "
        f"{len(os.sched_getaffinity(0))} cores for everything\n"
    )
    print(tables(results))
    if options.json:
        document = {
            "rounds": options.rounds,
            "seconds": options.seconds,
            "output_tokens": options.output_tokens,
            "cores": len(os.sched_getaffinity(0)),
            "ratios_to_bare_vllm": ratios(results),
            "figures": {
                streams: {
                    arm: {
                        **one.figures(),
                        "tokens_per_s_by_round": one.rounds,
                        "cpu_s_per_1000_tokens_by_role": one.cpu_by_role(),
                    }
                    for arm, one in measured.items()
                }
                for streams, measured in results.items()
            },
        }
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    if options.plot:
        plot(results, options.plot)
    errors = [error for measured in results.values() for one in measured.values() for error in one.errors]
    for error in errors[:5]:
        print(f"incomplete answer: {error}", file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
