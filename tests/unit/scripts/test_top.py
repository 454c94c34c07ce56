"""The console's figures in a terminal."""

import io
from typing import Any

import pytest
from rich.console import Console

from scripts import top

LIVE: dict[str, Any] = {
    "window_s": 60.0,
    "model": "m",
    "classes": [
        {
            "name": "interactive",
            "attainment": 0.981,
            "goodput_per_s": 3.25,
            "ttft_ms": {"p50": 80.0, "p95": 300.0, "p99": 1234.0},
            "tpot_ms": None,
            "output_tokens_per_s": 412.4,
            "in_flight": 3,
            "held": 2,
            "verdicts": {"refused": 7},
            "spilled": 5,
        },
        {
            "name": "batch",
            "attainment": None,
            "goodput_per_s": 0.0,
            "ttft_ms": None,
            "tpot_ms": None,
            "output_tokens_per_s": 0.0,
            "in_flight": 0,
            "held": 0,
            "verdicts": {},
            "spilled": 0,
        },
    ],
    "pools": [
        {
            "name": "interactive",
            "replicas": [
                {
                    "id": "abcdefghij",
                    "answers": True,
                    "slots": 64,
                    "sequences": {"interactive": 3},
                    "running": 2,
                    "waiting": 1,
                    "prefill_tokens": 900,
                    "kv_used_share": 0.42,
                }
            ],
        },
        {"name": "batch", "replicas": []},
    ],
    "requests": [
        {
            "id": "r-1",
            "class": "interactive",
            "verdict": "ttft_missed",
            "outcome": "finished",
            "ttft_ms": 1234.0,
            "why": "It was held 1.1 s for room.",
        }
    ],
}


def test_everything_that_the_console_tells_is_on_the_screen() -> None:
    output = io.StringIO()
    Console(file=output, width=160).print(top.view(LIVE))
    text = output.getvalue()
    for part in ("98.1%", "3.25", "1.23 s", "412", "2 / 64", "42%", "batch: no replica", "ttft_missed", "held 1.1 s"):
        assert part in text


def test_a_server_that_does_not_answer_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert top.main(["--url", "http://127.0.0.1:9", "--once"]) == 1
    assert "127.0.0.1:9" in capsys.readouterr().out
