"""What the server does now, in a terminal: the console's live figures.

./scripts/top [--url URL] [--once]. With API keys, set SLUICE_API_KEY. Ctrl-C ends it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
import urllib.error
import urllib.request
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

_PERIOD_S = 1.0
_TIMEOUT_S = 10.0
_REQUESTS = 8


def fetch(url: str, key: str) -> dict[str, Any]:
    """The live figures.

    Raises:
        OSError: the server does not answer, or says no.
    """
    headers = {"authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(f"{url.rstrip('/')}/console/live", headers=headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=_TIMEOUT_S) as answer:
        figures: dict[str, Any] = json.load(answer)
    return figures


def milliseconds(value: float | None) -> str:
    """A duration as people read it."""
    if value is None:
        return "-"
    return f"{value / 1000:.2f} s" if value >= 1000 else f"{value:.0f} ms"


def _share(value: float | None) -> Text:
    if value is None:
        return Text("-")
    return Text(f"{value:.1%}", style="green" if value >= 0.99 else "bold red")


def _classes(live: dict[str, Any]) -> Table:
    table = Table(title=f"classes, last {live['window_s']:.0f} s", title_justify="left", expand=True)
    for name in ("class", "attained", "good/s", "TTFT p50", "p95", "p99", "TPOT p50", "p99", "tokens/s", "in flight"):
        table.add_column(name, justify="left" if name == "class" else "right")
    for name in ("held", "refused", "spilled"):
        table.add_column(name, justify="right")
    for row in live["classes"]:
        ttft, tpot = row["ttft_ms"] or {}, row["tpot_ms"] or {}
        table.add_row(
            row["name"],
            _share(row["attainment"]),
            f"{row['goodput_per_s']:.2f}",
            *(milliseconds(ttft.get(name)) for name in ("p50", "p95", "p99")),
            *(milliseconds(tpot.get(name)) for name in ("p50", "p99")),
            f"{row['output_tokens_per_s']:.0f}",
            str(row["in_flight"]),
            str(row["held"]),
            str(row["verdicts"].get("refused", 0)),
            str(row["spilled"]),
        )
    return table


def _pools(live: dict[str, Any]) -> Table:
    table = Table(title="pools", title_justify="left", expand=True)
    for name in ("replica", "running", "waiting", "to prefill", "KV", "by class"):
        table.add_column(name, justify="left" if name in ("replica", "by class") else "right")
    for pool in live["pools"]:
        for replica in pool["replicas"]:
            kv = replica.get("kv_used_share")
            title = Text(f"{pool['name']} {replica['id'][:8]}", style="" if replica["answers"] else "bold red")
            table.add_row(
                title,
                f"{replica.get('running', '-')} / {replica['slots']}",
                str(replica.get("waiting", "-")),
                str(replica.get("prefill_tokens", "-")),
                "-" if kv is None else f"{kv:.0%}",
                ", ".join(f"{key} {count}" for key, count in replica["sequences"].items()) or "-",
            )
        if not pool["replicas"]:
            table.add_row(Text(f"{pool['name']}: no replica", style="bold red"))
    return table


def _requests(live: dict[str, Any]) -> Table:
    table = Table(title="missed, refused and slowest", title_justify="left", expand=True)
    for name in ("class", "verdict", "TTFT", "why", "request"):
        table.add_column(name, overflow="fold", justify="right" if name == "TTFT" else "left")
    for request in live["requests"][:_REQUESTS]:
        table.add_row(
            request["class"],
            request["verdict"] or request["outcome"],
            milliseconds(request["ttft_ms"]),
            request["why"],
            request["id"],
        )
    return table


def view(live: dict[str, Any]) -> RenderableType:
    """The figures as tables."""
    return Group(Text(f"Sluice: {live['model']}", style="bold"), _classes(live), _pools(live), _requests(live))


def main(argv: list[str]) -> int:
    """Show them until Ctrl-C."""
    parser = argparse.ArgumentParser(prog="top", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server (default: %(default)s)")
    parser.add_argument("--once", action="store_true", help="show them once and end")
    options = parser.parse_args(argv)
    key = os.environ.get("SLUICE_API_KEY", "")
    console = Console()
    try:
        shown = view(fetch(options.url, key))
    except OSError as error:
        console.print(f"top: {options.url}: {error}", style="bold red")
        return 1
    if options.once:
        console.print(shown)
        return 0
    with (
        contextlib.suppress(KeyboardInterrupt),
        Live(shown, console=console, screen=True, auto_refresh=False) as screen,
    ):
        while True:
            time.sleep(_PERIOD_S)
            try:
                shown = view(fetch(options.url, key))
            except OSError as error:
                shown = Text(f"{options.url}: {error}", style="bold red")
            screen.update(shown, refresh=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
