"""Starts HAProxy for Ray Serve with a configuration that is made safe first: `python -m app.api.haproxy ARGUMENTS`.

Ray Serve 2.60 writes HAProxy's configuration by a fixed template: its statistics and metrics listen on all interfaces,
any local user may administer it through its socket, and what it says by itself when no ingress answers is a bare 500.
Serve starts the program that `RAY_SERVE_HAPROXY_BINARY_PATH` names; `scripts/serve` names a script that runs this,
which changes those lines of the file behind `-f` and becomes the real HAProxy.
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

from app.errors import PoolUnavailable

# Set by whoever names this as HAProxy's binary.
REAL_BINARY = "SLUICE_HAPROXY_BINARY"

_OWN_SECTIONS = ("frontend prometheus", "listen stats")
_ANY_INTERFACE = re.compile(r"^(\s*bind )\*?(:\d+)")
_ERROR_FILE = re.compile(r"^(\s*errorfile 50[234] )\S+")
_RETRY_AFTER_S = 5


def secure(config: str, error_file: str) -> str:
    """The configuration with HAProxy's own ports on loopback, its socket for its own user, and `error_file` for
    errors that HAProxy reports by itself."""
    lines = []
    section = ""
    for line in config.splitlines():
        if line and not line[0].isspace() and not line.startswith("#"):
            section = line.strip()
        if section in _OWN_SECTIONS:
            line = _ANY_INTERFACE.sub(r"\g<1>127.0.0.1\2", line)
        if line.lstrip().startswith("stats socket"):
            line = line.replace("mode 666", "mode 600")
        lines.append(_ERROR_FILE.sub(rf"\g<1>{error_file}", line))
    return "\n".join(lines) + "\n"


def unavailable_answer() -> bytes:
    """What clients get from HAProxy itself while no ingress replica answers: HTTP, as it goes over the wire."""
    error = PoolUnavailable("No ingress replica can answer; please retry.", retry_after=_RETRY_AFTER_S)
    body = json.dumps(error.body()).encode()
    head = (
        "HTTP/1.1 503 Service Unavailable\r\n"
        "content-type: application/json\r\n"
        f"content-length: {len(body)}\r\n"
        f"retry-after: {_RETRY_AFTER_S}\r\n"
        "connection: close\r\n\r\n"
    )
    return head.encode() + body


def main() -> None:
    """Secure the configuration that the arguments name, and become HAProxy."""
    arguments = sys.argv[1:]
    if "-f" in arguments:
        path = Path(arguments[arguments.index("-f") + 1])
        error_file = path.with_name("unavailable.http")
        error_file.write_bytes(unavailable_answer())
        path.write_text(secure(path.read_text(), str(error_file)))
    binary = os.environ[REAL_BINARY]
    os.execv(binary, [binary, *arguments])


if __name__ == "__main__":
    main()
