"""HAProxy's configuration, made safe."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from ray.serve._private import haproxy_templates

from app.api.haproxy import REAL_BINARY, secure, unavailable_answer

CONFIG = """global
    stats socket /tmp/x/a.sock mode 666 level admin expose-fd listeners
defaults
    errorfile 502 /tmp/x/500.http
    errorfile 503 /tmp/x/500.http
    errorfile 504 /tmp/x/500.http
frontend prometheus
    bind :9101
    mode http
frontend http_frontend
    bind *:8000
backend app
    server one 127.0.0.1:30000 check
listen stats
  bind *:8404
  stats enable
"""


def test_its_own_ports_are_on_loopback_and_the_apps_is_where_the_config_says() -> None:
    lines = [line.strip() for line in secure(CONFIG, "/tmp/x/e.http").splitlines()]
    assert [line for line in lines if line.startswith("bind")] == [
        "bind 127.0.0.1:9101",
        "bind *:8000",
        "bind 127.0.0.1:8404",
    ]


def test_only_its_user_may_administer_it() -> None:
    assert "a.sock mode 600 level admin" in secure(CONFIG, "e")


def test_its_own_errors_are_ours() -> None:
    text = secure(CONFIG, "/tmp/x/e.http")
    assert [line.split()[1:] for line in text.splitlines() if "errorfile" in line] == [
        [code, "/tmp/x/e.http"] for code in ("502", "503", "504")
    ]
    head, _, body = unavailable_answer().partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 503 ")
    assert b"retry-after: 5" in head
    assert f"content-length: {len(body)}".encode() in head
    assert json.loads(body)["error"]["code"] == 503


def test_securing_twice_changes_nothing_more() -> None:
    once = secure(CONFIG, "e")
    assert secure(once, "e") == once


def test_rays_template_still_has_what_is_changed() -> None:
    template = haproxy_templates.HAPROXY_CONFIG_TEMPLATE
    for line in (
        "frontend prometheus\n    bind :{{ config.metrics_port }}",
        "listen stats\n  bind *:{{ config.stats_port }}",
        "stats socket {{ config.socket_path }} mode 666 level admin",
        "errorfile 503 {{ config.error_file_path }}",
    ):
        assert line in template
    assert template.count("bind *:") == 1
    assert template.count("bind :") == 1


def test_the_program_changes_the_file_and_becomes_haproxy(tmp_path: Path) -> None:
    config = tmp_path / "haproxy.cfg"
    config.write_text(CONFIG)
    binary = tmp_path / "real"
    binary.write_text('#!/bin/sh\necho "pid $$: $@"\n')
    binary.chmod(0o755)
    process = subprocess.Popen(
        [sys.executable, "-m", "app.api.haproxy", "-db", "-f", str(config), "-sf", "1"],
        env={**os.environ, REAL_BINARY: str(binary)},
        stdout=subprocess.PIPE,
        text=True,
    )
    out, _ = process.communicate(timeout=30)
    # The same process, so that Ray's signals reach HAProxy itself.
    assert out == f"pid {process.pid}: -db -f {config} -sf 1\n"
    assert "127.0.0.1:8404" in config.read_text()
    assert str(tmp_path / "unavailable.http") in config.read_text()


@pytest.mark.parametrize("arguments", [["-v"], ["-vv"]])
def test_without_a_configuration_it_only_passes_on(arguments: list[str], tmp_path: Path) -> None:
    process = subprocess.run(
        [sys.executable, "-m", "app.api.haproxy", *arguments],
        env={**os.environ, REAL_BINARY: "/bin/echo"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert process.stdout.split() == arguments
