"""./scripts/serve as a newcomer types it: what it says, and that it ends without a trace."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.integration.test_faults import only_interactive
from tests.support.serving import CONFIGS, ROOT, environment, running, stop, url_of, variant, wait_ready

pytestmark = pytest.mark.integration

SERVE = [str(ROOT / "scripts" / "serve"), "--no-setup"]


def with_short_time(document: dict[str, Any]) -> None:
    only_interactive(document)
    document["applications"][0]["args"]["pools"]["interactive"]["executor"]["time_scale"] = 1.0


@pytest.mark.parametrize(
    ("http", "way"),
    [("auto", "HAProxy, straight to the ingress"), ("proxy", "Ray Serve's Python proxy, slower than HAProxy")],
)
def test_it_says_how_to_try_it_and_ends_without_a_trace(tmp_path: Path, http: str, way: str) -> None:
    config = variant(CONFIGS / "simulated.yaml", tmp_path / "config.yaml", with_short_time)
    log = tmp_path / "serve.log"
    url = url_of(config)
    with running([*SERVE, "--http", http, str(config)], log) as process:
        wait_ready(url, lambda: process.poll() is None, log)
        # The entry's headers are clean here, whatever a client sends.
        answer = httpx.post(
            f"{url}/v1/completions",
            json={"model": "llama-3.1-8b-simulated", "prompt": "x", "max_tokens": 2},
            headers={"x-request-id": "a b<c>", "x-request-timeout-seconds": "0.000001"},
            timeout=60,
        )
        assert answer.status_code == 200
        assert answer.headers.get_list("x-request-id") == ["abc"]

        processes = psutil.Process(process.pid).children(recursive=True)
        assert (http == "auto") == any("haproxy" in child.name() for child in processes)
        assert any("EngineCore" in child.name() or "EngineCore" in " ".join(child.cmdline()) for child in processes)
        stop(process)
        assert process.returncode == 0
        _, alive = psutil.wait_procs(processes, timeout=10)
        assert not alive
    told = log.read_text()
    assert "Ready after" in told
    assert way in told
    assert url in told
    assert "simulated (h100-llama-3.1-8b)" in told
    assert "curl" in told
    assert "from openai import OpenAI" in told


def pools(document: dict[str, Any]) -> Any:
    return document["applications"][0]["args"]["pools"]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (
            lambda document: pools(document)["batch"].update(nonsense=1),
            "applications.0.args.pools.batch.nonsense: unknown key",
        ),
        (
            lambda document: document["applications"][0]["args"]["routing"]["rules"][0].update(pool="nobody"),
            "applications.0.args.routing.rules.0.pool: no pool `nobody` is defined",
        ),
        (
            lambda document: document["applications"][0]["args"]["model"].update(source="/no/such/folder"),
            "/no/such/folder",
        ),
        (
            lambda document: pools(document)["batch"]["engine"].update(kv_cache_memory_mib=10_000_000),
            "memory",
        ),
        (lambda document: document["http_options"].update(hots="x"), "http_options.hots: unknown key"),
    ],
)
def test_a_mistake_is_one_sentence_before_anything_starts(
    tmp_path: Path, change: Callable[[dict[str, Any]], None], sentence: str
) -> None:
    config = variant(CONFIGS / "local.yaml", tmp_path / "config.yaml", change)
    result = subprocess.run(
        [*SERVE, str(config)], env=environment(), capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("serve: ")
    assert sentence in line


def test_a_port_in_use_is_told(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        config = variant(
            CONFIGS / "local.yaml",
            tmp_path / "config.yaml",
            lambda document: document["http_options"].update(port=port),
        )
        result = subprocess.run(
            [*SERVE, str(config)], env=environment(), capture_output=True, text=True, timeout=60, check=False
        )
    assert result.returncode == 2
    assert f"port {port} of 127.0.0.1 is in use" in result.stderr
