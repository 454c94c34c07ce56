"""Starts the app with `serve run`, shows how far it is, and leaves no process behind when it ends.

`./scripts/serve` calls this after scripts/setup. `main` returns the exit status: 0 after Ctrl-C or SIGTERM while
serving, 130 after one during the start, 2 for a mistake that was found before anything heavy started, 1 for a failure.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import http.client
import json
import os
import re
import shlex
import signal
import socket
import ssl
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import urlsplit

from app.config import PoolConfig
from app.engine.environment import TELEMETRY_OFF
from app.errors import ConfigError
from app.http_path import Choice, HttpPath, choose_http_path
from app.model_cache import cache_dir
from app.serve_file import ServeFile, check_host, default_config_name, load_serve_file

ROOT = Path(__file__).resolve().parents[1]
CONFIGS = ROOT / "serve_configs"

RUN_ID = "SLUICE_RUN_ID"

# Ray Serve's HTTP entry reads this when it starts.
_CLEAN_HEADERS = {"RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH": "app.api.edge:middlewares"}

_DEFAULT_DASHBOARD = "http://127.0.0.1:8265"
_POLL_S = 0.5
# Together with the sweep after it, less than the 10 s that an operator is promised.
_GRACE_S = 7.0
_TERM_S = 1.0
_KILL_S = 1.0
# A cluster that was there before isn't swept, so Serve has the time it wants to stop the app.
_CLUSTER_GRACE_S = 120.0
_LOGS_KEPT = 10
_END_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM, signal.SIGHUP})


@dataclass(frozen=True)
class Options:
    """What the command line asks for."""

    config: Path
    timeout_s: float
    http: Choice = "auto"
    print_environment: bool = False


@dataclass(frozen=True)
class Cluster:
    """A Ray cluster that `serve run` will join instead of starting its own."""

    address: str
    origin: str


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the launcher and returns the exit status."""
    try:
        options = parse_options(sys.argv[1:] if argv is None else argv)
        # Paths in a config file mean the same from wherever this is called, and the same as for `serve run` in the
        # project's folder.
        os.chdir(ROOT)
        if options.print_environment:
            print(environment_text(choose_http_path(options.http, tls=load_serve_file(options.config).tls)))
            return 0
        cluster = find_cluster(os.environ)
        if cluster is not None:
            check_cluster(cluster)
        file = load_serve_file(options.config)
        check_host(file, joins_cluster=cluster is not None)
        http = None if cluster is not None else choose_http_path(options.http, tls=file.tls)
    except ConfigError as error:
        print(f"serve: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    try:
        return _Run(file, cluster, http, options.timeout_s, Progress(sys.stdout)).run()
    except OSError as error:
        print(f"serve: the app could not be started ({error}); run ./scripts/setup and try again", file=sys.stderr)
        return 2
    finally:
        if http is not None:
            http.clean_up()


def parse_options(argv: Sequence[str]) -> Options:
    """The command line.

    Raises:
        ConfigError: there is no such config file.
    """
    parser = argparse.ArgumentParser(
        prog="scripts/serve",
        description="Set up what is missing, start the app, and stop all of it on Ctrl-C.",
    )
    parser.add_argument(
        "config",
        nargs="?",
        metavar="CONFIG",
        help="a Serve config file, or the name of one in serve_configs/ (default: local, on NVIDIA GPUs local_gpu)",
    )
    parser.add_argument(
        "--timeout",
        type=_positive_seconds,
        default=600.0,
        metavar="SECONDS",
        help="give up when the app is not ready after this time (default: 600)",
    )
    parser.add_argument(
        "--http",
        choices=("auto", "haproxy", "proxy"),
        default="auto",
        help="how requests reach the app: through HAProxy, which is faster, or through Ray Serve's Python proxy "
        "(default: auto, HAProxy where it runs)",
    )
    parser.add_argument(
        "--print-environment",
        action="store_true",
        help="print what `ray start` needs in its environment for the same way, as shell commands, and end",
    )
    parser.add_argument("--no-setup", action="store_true", help="do not check the environment and the model first")
    parsed = parser.parse_args(argv)
    config = find_config(parsed.config or default_config_name())
    return Options(config, parsed.timeout, parsed.http, parsed.print_environment)


def find_config(name: str) -> Path:
    """The config file that `name` means: a path, or the name of a file in serve_configs/.

    Raises:
        ConfigError: there is no such file.
    """
    path = Path(name).expanduser()
    if path.is_file():
        return path.absolute()
    if len(path.parts) == 1:
        for candidate in (CONFIGS / name, CONFIGS / f"{name}.yaml"):
            if candidate.is_file():
                return candidate
    known = ", ".join(sorted(file.stem for file in CONFIGS.glob("*.yaml")))
    raise ConfigError(f"there is no config file `{name}`; name an existing file, or one of serve_configs/: {known}")


def find_cluster(environment: Mapping[str, str]) -> Cluster | None:
    """The Ray cluster that `serve run` will join, by the rules of `ray.init()`: RAY_ADDRESS, else the cluster that
    the last `ray start` on this machine left; None if it will start its own."""
    address = environment.get("RAY_ADDRESS", "")
    if address == "local":
        return None
    if address and address != "auto":
        return Cluster(address, "RAY_ADDRESS")
    folder = environment.get("RAY_TMPDIR", environment.get("TMPDIR", "/tmp"))
    file = Path(folder) / "ray" / "ray_current_cluster"
    try:
        return Cluster(file.read_text().strip(), str(file))
    except OSError:
        return None


def check_cluster(cluster: Cluster) -> None:
    """Checks that the cluster answers, which `serve run` would wait for a long time.

    Raises:
        ConfigError: it does not.
    """
    parts = urlsplit(cluster.address if "://" in cluster.address else f"//{cluster.address}")
    try:
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or not port:
        raise ConfigError(f"{cluster.origin}: `{cluster.address}` is not a Ray address; use HOST:PORT, or unset it")
    try:
        with socket.create_connection((host, port), timeout=5):
            return
    except OSError:
        fix = "start it or unset RAY_ADDRESS" if cluster.origin == "RAY_ADDRESS" else "run `ray stop`"
        raise ConfigError(
            f"{cluster.origin} names a Ray cluster at {cluster.address} that does not answer; {fix} and try again"
        ) from None


def environment_text(http: HttpPath) -> str:
    """Shell commands that give Ray's processes what `./scripts/serve` would give them."""
    environment = {**TELEMETRY_OFF, **_CLEAN_HEADERS, **http.environment}
    lines = [f"export {name}={shlex.quote(value)}" for name, value in environment.items()]
    if http.why is not None:
        lines.append(f"# Not by HAProxy: {http.why}")
    return "\n".join(lines)


def http_text(http: HttpPath | None, state: Mapping[str, Any]) -> str:
    """How requests reach the app, and if that is the slow way, why, and how to get the fast one."""
    if state.get("http") == "haproxy":
        return "HAProxy, straight to the ingress"
    if http is None:
        return "Ray Serve's Python proxy, as this cluster was started; for the fast way see --print-environment"
    return f"Ray Serve's Python proxy, slower than HAProxy: {http.why}"


def ready_text(
    file: ServeFile, cluster: Cluster | None, dashboard: str, log: Path, took_s: float, http: str = ""
) -> str:
    """What is shown when the app is ready: where it is, its pools, and how to try it."""
    body = {
        "model": file.config.model.name,
        "messages": [{"role": "user", "content": "Say hello."}],
        "max_tokens": 64,
        "stream": True,
    }
    rows = [("pool", "executor", "replicas")]
    rows += [(name, _executor_text(pool), str(file.replica_counts[name])) for name, pool in file.config.pools.items()]
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    table = [f"  {row[0]:<{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:>{widths[2]}}" for row in rows]
    tls = " --insecure" if file.tls else ""
    python = [
        "from openai import OpenAI",
        f"client = OpenAI(base_url={json.dumps(file.url + '/v1')}, api_key={json.dumps('none')})",
        f"answer = client.chat.completions.create(model={json.dumps(file.config.model.name)},",
        '    messages=[{"role": "user", "content": "Say hello."}], max_tokens=64, service_tier="priority")',
        "print(answer.choices[0].message.content)",
    ]
    shared = f" (the Ray cluster at {cluster.address}, which stays when this ends)" if cluster else ""
    lines = [
        f"Ready after {took_s:.0f} s: {file.url}",
        "",
        *table,
        "",
        *([f"  HTTP       {http}"] if http else []),
        f"  dashboard  {dashboard}{shared}",
        f"  log        {log}",
        "",
        "Try it with curl:",
        "",
        f"  curl -N{tls} {shlex.quote(file.url + '/v1/chat/completions')} -H 'content-type: application/json' \\",
        f"    -d {shlex.quote(json.dumps(body))}",
        "",
        f"or with Python ({_shown(ROOT / '.venv/bin/python')}):",
        "",
        *(f"  {line}" for line in python),
        "",
        "With RAY_AUTH_MODE=token, `serve status` tells more (Ray's token authentication is on). Ctrl-C ends this.",
    ]
    return "\n".join(lines)


def telling_lines(log: str, limit: int = 3) -> list[str]:
    """The lines of a `serve run` log that say best why it failed."""
    lines = [_plain(line) for line in log.splitlines()]
    errors = [match for line in lines if (match := _ERROR.search(line)) and not _UNHELPFUL.search(match[0])]
    own = [match["message"] for match in errors if match["name"].endswith("ConfigError")]
    if own:
        return [own[-1].strip()]
    if errors:
        return [errors[-1][0].strip()]
    marked = [line.strip() for line in lines if re.search(r"\b(ERROR|CRITICAL|FATAL)\b|^\w*Error\b", line)]
    filled = [line.strip() for line in lines if line.strip()]
    return (marked or filled)[-limit:]


def processes_of(run_id: str) -> list[int]:
    """Ids of the living processes that carry this run's mark in their environment, except this one."""
    mark = f"{RUN_ID}={run_id}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        # Processes end while this looks at them, and other users' are not readable. A zombie's environment is empty.
        with contextlib.suppress(OSError):
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found


def sweep(run_id: str, *, term_s: float = _TERM_S, kill_s: float = _KILL_S) -> list[int]:
    """Ends every process that carries this run's mark: SIGTERM, then SIGKILL. Returns those that still live."""
    for number, patience in ((signal.SIGTERM, term_s), (signal.SIGKILL, kill_s)):
        deadline = time.monotonic() + patience
        signalled: set[int] = set()
        while alive := processes_of(run_id):
            # Those that were started meanwhile are signalled too.
            for pid in set(alive) - signalled:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
                signalled.add(pid)
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
        else:
            return []
    return processes_of(run_id)


class Progress:
    """Shows what is going on: one line that is rewritten on a terminal, a line per change elsewhere."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._begin = clock()
        self._rewrites = stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._shown = ""

    @property
    def elapsed_s(self) -> float:
        """Seconds since this was made."""
        return self._clock() - self._begin

    def update(self, text: str) -> None:
        """Shows the present state."""
        if self._rewrites:
            width = max(20, os.get_terminal_size(self._stream.fileno()).columns - 1)
            self._write(f"\r\033[K{f'  {text} ... {self.elapsed_s:.0f} s'[:width]}")
        elif text != self._shown:
            self._write(f"  [{self.elapsed_s:3.0f} s] {text}\n")
        self._shown = text

    def say(self, text: str) -> None:
        """Writes lines that stay."""
        self._write(f"\r\033[K{text}\n" if self._rewrites else f"{text}\n")

    def _write(self, text: str) -> None:
        # Whoever read this may be gone; stopping in order matters more.
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
            self._stream.flush()


def serve_command(config: Path) -> list[str]:
    """The command that runs a config file: `serve run` of the environment that this runs in."""
    return [str(Path(sys.executable).with_name("serve")), "run", str(config)]


class _Run:
    """One run of `serve run`, from its start to the end of its last process."""

    def __init__(
        self, file: ServeFile, cluster: Cluster | None, http: HttpPath | None, timeout_s: float, progress: Progress
    ) -> None:
        self._file = file
        self._cluster = cluster
        self._http = http
        self._ready: Mapping[str, Any] = {}
        self._timeout_s = timeout_s
        self._progress = progress
        self._run_id = uuid.uuid4().hex
        self._log = _new_log(self._run_id)

    def run(self) -> int:
        # From here on the signals that end a program wait until they are asked for, so that none is lost.
        signal.pthread_sigmask(signal.SIG_BLOCK, _END_SIGNALS)
        self._progress.say(f"Starting {_shown(self._file.path)}. Log: {self._log}")
        if self._cluster is not None:
            address, origin = self._cluster.address, self._cluster.origin
            self._progress.say(f"Joining the Ray cluster at {address} (from {origin}) instead of starting one.")
        process = self._start()
        try:
            failure = self._wait_until_ready(process)
            if failure is None:
                took_s = self._progress.elapsed_s
                http = http_text(self._http, self._ready)
                text = ready_text(self._file, self._cluster, self._dashboard(), self._log, took_s, http)
                self._progress.say(text)
                failure = self._wait_for_end(process)
        except _EndRequested as end:
            self._stop(process)
            return end.status
        reasons = telling_lines(self._log_text())
        self._stop(process)
        print(f"serve: {failure}", file=sys.stderr)
        for line in reasons:
            print(f"  {line}", file=sys.stderr)
        print(f"  The whole log: {self._log}", file=sys.stderr)
        return 1

    def _start(self) -> subprocess.Popen[bytes]:
        environment = {
            **TELEMETRY_OFF,
            **_CLEAN_HEADERS,
            **(self._http.environment if self._http is not None else {}),
            "PYTHONUNBUFFERED": "1",
            **os.environ,
            RUN_ID: self._run_id,
        }
        with self._log.open("ab") as log:
            return subprocess.Popen(
                serve_command(self._file.path),
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Ctrl-C must reach only this process, which then stops the others in order.
                start_new_session=True,
                preexec_fn=_prepare_child,
            )

    def _wait_until_ready(self, process: subprocess.Popen[bytes]) -> str | None:
        """None when the app is ready, else why it will not be."""
        deadline = time.monotonic() + self._timeout_s
        while True:
            log = self._log_text()
            if process.poll() is not None:
                return "Ray Serve ended while it was starting:"
            if _FAILED.search(log):
                # What follows this line in the log says why.
                self._pause(1.0, ready=False)
                return "the app could not be deployed:"
            # A Serve that runs in a cluster may still answer for the app that this replaces.
            submitted = "Submitted deploy config" in log
            state = _ask_ready(self._file.url) if submitted or self._cluster is None else None
            if state is not None and state.get("ready") is True:
                self._ready = state
                return None
            if time.monotonic() > deadline:
                return f"the app was not ready after {self._timeout_s:g} s; see the log, or allow more with --timeout:"
            self._progress.update(_start_text(log, submitted, state))
            self._pause(_POLL_S, ready=False)

    def _wait_for_end(self, process: subprocess.Popen[bytes]) -> str:
        while process.poll() is None:
            self._pause(_POLL_S, ready=True)
        return "Ray Serve ended by itself:"

    def _pause(self, seconds: float, *, ready: bool) -> None:
        """Waits; raises when a signal asks to end."""
        received = signal.sigtimedwait(_END_SIGNALS, seconds)
        if received is not None:
            raise _EndRequested(0 if ready else 130)

    def _stop(self, process: subprocess.Popen[bytes]) -> None:
        grace_s = _GRACE_S if self._cluster is None else _CLUSTER_GRACE_S
        begin = time.monotonic()
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        while process.poll() is None and time.monotonic() - begin < grace_s:
            self._progress.update("stopping")
            if signal.sigtimedwait(_END_SIGNALS, 0.1) is not None:
                self._progress.say("Not waiting any longer.")
                break
        self._progress.update("stopping")
        left = sweep(self._run_id)
        process.poll()
        if left:
            self._progress.say(f"These processes could not be ended: {', '.join(map(str, left))}")
        else:
            self._progress.say("Stopped.")

    def _dashboard(self) -> str:
        match = re.search(r"View the dashboard at (https?://[^\s\x1b]+)", self._log_text())
        return match[1] if match else _DEFAULT_DASHBOARD

    def _log_text(self) -> str:
        return _ANSI.sub("", self._log.read_text(encoding="utf-8", errors="replace"))


class _EndRequested(Exception):
    """Ctrl-C, SIGTERM or SIGHUP arrived."""

    def __init__(self, status: int) -> None:
        super().__init__()
        self.status = status


_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
# Ray writes before every line which process it came from: `(ServeReplica:app:pool pid=123) `.
_ORIGIN = re.compile(r"^(?:\([^()]*\bpid=\d+[^()]*\)\s?)+")
_REPEATED = re.compile(r"\s*\[repeated \d+x across cluster\].*$")
_ERROR = re.compile(
    r"(?<![\w.])(?P<name>(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Fault))(?:\(\w+\))?: (?P<message>\S.*)"
)
# Errors that only say that another one happened.
_UNHELPFUL = re.compile(
    r"[Rr]oot cause|RayTaskError|ActorDiedError|RayActorError|TaskCancelledError|failed to start|: Traceback "
)
_FAILED = re.compile(
    r"Deploying app '[^']*' failed|Runtime env setup for app '[^']*' failed|Failed to update the deployments \["
    r"|Unexpected error occurred while (?:deploying|applying config)"
)
_REPLICA_FAILED = re.compile(r"Exception in Replica\(id='[^']*', deployment='([^']*)'")


def _plain(line: str) -> str:
    return _REPEATED.sub("", _ORIGIN.sub("", _ANSI.sub("", line)))


def _start_text(log: str, submitted: bool, state: Mapping[str, Any] | None) -> str:
    """One line on how far the start is."""
    failed = sorted(set(_REPLICA_FAILED.findall(log)))
    again = f"; trying again where a replica failed: {', '.join(failed)}" if failed else ""
    pools = state.get("pools") if state is not None else None
    if isinstance(pools, dict):
        counts = [f"{name} {pool['healthy']}/{pool['replicas']}" for name, pool in pools.items()]
        return f"loading the model into the pools: {', '.join(counts)}{again}"
    if submitted:
        return f"starting the ingress and the pools{again}"
    if "Started a local Ray instance" in log or "Connected to Ray" in log:
        return "starting Ray Serve"
    return "starting Ray"


def _ask_ready(url: str) -> dict[str, Any] | None:
    """What `/ready` answers; None while nothing or something else does."""
    parts = urlsplit(url)
    # Not urllib, which would send this through a proxy that the environment names.
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        # The certificate is for the name that clients use, which need not be this one.
        connection = http.client.HTTPSConnection(
            parts.hostname or "", parts.port, timeout=5, context=ssl._create_unverified_context()
        )
    else:
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=5)
    with contextlib.closing(connection):
        try:
            connection.request("GET", f"{parts.path}/ready")
            answer = json.loads(connection.getresponse().read())
        except (OSError, http.client.HTTPException, ValueError):
            return None
    return answer if isinstance(answer, dict) and "ready" in answer else None


def _prepare_child() -> None:
    """In the child, before `serve`: signals as usual, and SIGINT should this process be killed."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGINT, 0, 0, 0)


_LIBC = ctypes.CDLL(None)
_PR_SET_PDEATHSIG = 1


def _new_log(run_id: str) -> Path:
    folder = cache_dir() / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    _remove_old(folder.glob("serve-*.log"))
    log = folder / f"serve-{time.strftime('%Y%m%d-%H%M%S')}-{run_id[:6]}.log"
    log.touch()
    return log


def _remove_old(logs: Iterable[Path]) -> None:
    # Their names begin with the time.
    for log in sorted(logs)[: -(_LOGS_KEPT - 1)]:
        log.unlink(missing_ok=True)


def _executor_text(pool: PoolConfig) -> str:
    executor = pool.executor
    if executor.kind == "simulated":
        return f"simulated ({executor.profile})"
    if executor.kind == "gpu" and executor.tensor_parallel_size > 1:
        return f"gpu, {executor.tensor_parallel_size} per replica"
    return executor.kind


def _shown(path: Path) -> str:
    with contextlib.suppress(ValueError):
        return str(path.relative_to(Path.cwd()))
    return str(path)


def _positive_seconds(text: str) -> float:
    value = float(text)
    if not value > 0:
        raise argparse.ArgumentTypeError("it must be above 0")
    return value


if __name__ == "__main__":
    sys.exit(main())
