"""The timeline against the client's own clock, one request at a time.

Sends streamed requests to a running app (./scripts/serve) one after the other and compares, for each, the first token
that the client saw with what the app says of it, and whether queue, prefill and decode leave anything of the total
unexplained but rendering and relaying.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import httpx
import numpy as np


def _one(client: httpx.Client, url: str, model: str, words: int, tokens: int) -> dict[str, float]:
    body = {
        "model": model,
        "prompt": f"{time.monotonic_ns()} " + "word " * words,
        "max_tokens": tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    sent = time.perf_counter()
    first = 0.0
    usage: dict[str, float] = {}
    with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            first = first or time.perf_counter()
            if '"choices":[]' in line:
                usage = json.loads(line.removeprefix("data: "))["metrics"]
    total = time.perf_counter() - sent
    told = usage["queue_time_ms"] + usage["prefill_time_ms"] + usage["generation_time_ms"]
    return {
        "client_ttft_ms": (first - sent) * 1000,
        "told_ttft_ms": usage["time_to_first_token_ms"],
        "ttft_difference_ms": (first - sent) * 1000 - usage["time_to_first_token_ms"],
        "client_total_ms": total * 1000,
        "told_total_ms": told,
        "rest_ms": total * 1000 - told,
    }


def main(argv: list[str]) -> int:
    """Print the table, write the JSON; 0 if the median difference of the first token is at most 10 ms."""
    parser = argparse.ArgumentParser(prog="bench timeline", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="where the app answers (default: %(default)s)")
    parser.add_argument("--model", default="smollm2-135m-instruct", help="model (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=40, help="requests (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="ten requests")
    options = parser.parse_args(argv)
    count = 10 if options.quick else options.requests
    with httpx.Client(timeout=120) as client:
        _one(client, options.url, options.model, 5, 5)
        rows = [_one(client, options.url, options.model, 20 + 20 * (index % 10), 16) for index in range(count)]

    print(f"\n{count} requests, one at a time, at {options.url}\n")
    print(f"{'':34} {'p50':>9} {'p99':>9} {'max':>9}")
    summary: dict[str, dict[str, float]] = {}
    names = {
        "client_ttft_ms": "TTFT, as the client saw it",
        "told_ttft_ms": "TTFT, as the app tells it",
        "ttft_difference_ms": "difference",
        "client_total_ms": "total, as the client saw it",
        "told_total_ms": "queue + prefill + decode",
        "rest_ms": "rest: render, relay, HTTP",
    }
    for name, text in names.items():
        values = np.array([row[name] for row in rows])
        summary[name] = {
            "p50": float(np.percentile(values, 50)),
            "p99": float(np.percentile(values, 99)),
            "max": float(values.max()),
        }
        cells = " ".join(f"{summary[name][key]:6.2f} ms" for key in ("p50", "p99", "max"))
        print(f"{text:34} {cells}")
    if options.json:
        options.json.write_text(json.dumps({"requests": count, "summary": summary, "rows": rows}, indent=2) + "\n")
    return 0 if summary["ttft_difference_ms"]["p50"] <= 10 else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
