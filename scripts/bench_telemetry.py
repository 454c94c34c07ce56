"""What telemetry costs: tokens/s at 32 streams with everything on, against everything off.

Everything: spans of every request and metrics by OTLP, the access log, kept requests and the console. What Ray exports
is on in both, as it cannot be switched off. One server after the other, as `./scripts/bench streaming` runs them; what
receives the telemetry runs on the same cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import yaml

from scripts.bench_streaming import measure
from scripts.streaming import arms
from scripts.streaming.figures import Measured
from scripts.streaming.load import Load
from scripts.streaming.tiny_model import write_tiny_model

# Of tokens/s, what everything may cost.
_TARGET = 0.03


class _Sink(BaseHTTPRequestHandler):
    """Takes what it is sent and forgets it."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", "0")
        self.end_headers()

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Say nothing."""


@contextmanager
def _receiver() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Sink)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()


def _config(model: Path, port: int, receiver: str | None) -> dict[str, Any]:
    """The app as `bench streaming` has it; None: with all telemetry off that can be."""
    document = arms.sluice_config(model, port)
    args = document["applications"][0]["args"]
    if receiver is None:
        args["ingress"] |= {"access_log": False, "kept_requests": 0, "console": False}
    else:
        otlp = {"exporter": "otlp", "protocol": "http/protobuf"}
        args["tracing"] = {**otlp, "endpoint": f"{receiver}/v1/traces"}
        args["metrics"] = {**otlp, "endpoint": f"{receiver}/v1/metrics", "interval_s": 5}
    return document


def main(argv: list[str]) -> int:
    """Print the figures, write the JSON; 1 if an answer was incomplete."""
    parser = argparse.ArgumentParser(prog="bench telemetry", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="one short round")
    parser.add_argument("--rounds", type=int, help="rounds (default: 4)")
    parser.add_argument("--seconds", type=float, help="measured time per round (default: 12)")
    parser.add_argument("--streams", type=int, default=32, help="streams at once (default: %(default)s)")
    options = parser.parse_args(argv)
    rounds = options.rounds or (1 if options.quick else 4)
    seconds = options.seconds or (4.0 if options.quick else 12.0)
    results = {"off": Measured(), "on": Measured()}
    with tempfile.TemporaryDirectory() as name, _receiver() as receiver:
        folder = Path(name)
        model = write_tiny_model(folder / "model")
        for number in range(rounds):
            # Either goes first as often.
            for arm in ("off", "on") if number % 2 == 0 else ("on", "off"):
                print(f"round {number + 1} of {rounds}: telemetry {arm}", file=sys.stderr, flush=True)
                port = arms.free_port()
                config = folder / f"{arm}-{port}.yaml"
                config.write_text(yaml.safe_dump(_config(model, port, receiver if arm == "on" else None)))
                with arms.started(arm, arms.launch(config, "haproxy"), {}, port, folder) as server:
                    arms.check_equal_treatment(server, sorted(os.sched_getaffinity(0)))
                    load = Load(
                        port=port,
                        path="/v1/chat/completions",
                        model=arms.MODEL_NAME,
                        streams=options.streams,
                        seconds=seconds,
                        seed=number,
                    )
                    results[arm].add(measure(server, load))
    shares = [on / off for on, off in zip(results["on"].rounds, results["off"].rounds, strict=True)]
    share = statistics.mean(results["on"].rounds) / statistics.mean(results["off"].rounds)
    print(f"\n{rounds} rounds of {seconds:g} s, {options.streams} streams, {len(os.sched_getaffinity(0))} cores\n")
    for arm, measured in results.items():
        figures = measured.figures()
        print(
            f"telemetry {arm:4} {figures['tokens_per_s']:8.0f} tokens/s  TTFT p50 {figures['ttft_p50_ms']:6.1f} ms  "
            f"ITL p50 {figures['itl_p50_ms']:5.1f} ms  CPU {figures['cpu_s_per_1000_tokens']:.3f} s per 1,000 tokens"
        )
    print(
        f"everything on costs {1 - share:.1%} of tokens/s (by round: {', '.join(f'{1 - one:.1%}' for one in shares)})"
    )
    print(f"target: at most {_TARGET:.0%}")
    if options.json:
        document = {
            "rounds": rounds,
            "seconds": seconds,
            "streams": options.streams,
            "cores": len(os.sched_getaffinity(0)),
            "cost": 1 - share,
            "cost_by_round": [1 - one for one in shares],
            "figures": {arm: measured.figures() for arm, measured in results.items()},
        }
        options.json.write_text(json.dumps(document, indent=2) + "\n")
    errors = [error for measured in results.values() for error in measured.errors]
    for error in errors[:5]:
        print(f"incomplete answer: {error}", file=sys.stderr)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
