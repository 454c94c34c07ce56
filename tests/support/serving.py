"""Running the real thing: Serve config files through the real command lines, with their logs kept for failures."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import openai
import psutil
import yaml

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "serve_configs"
BIN = Path(sys.executable).parent

_T = TypeVar("_T")

_QUIET = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "RAY_USAGE_STATS_ENABLED": "0"}


def wait_for(
    what: str,
    ask: Callable[[], _T | None],
    timeout_s: float = 60.0,
    every_s: float = 0.1,
    otherwise: Callable[[], object] | None = None,
) -> _T:
    """Ask until the answer is neither None nor False; `otherwise` adds to what the failure tells."""
    deadline = time.monotonic() + timeout_s
    while True:
        answer = ask()
        if answer is not None and answer is not False:
            return answer
        if time.monotonic() > deadline:
            told = f": {otherwise()}" if otherwise is not None else ""
            raise AssertionError(f"{what}: not within {timeout_s:g} s{told}")
        time.sleep(every_s)


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def variant(config: Path, target: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a Serve config file, changed; on a free port."""
    document = yaml.safe_load(config.read_text())
    document["http_options"]["port"] = free_port()
    change(document)
    target.write_text(yaml.safe_dump(document, sort_keys=False))
    return target


def url_of(config: Path) -> str:
    """Where a config file's application answers."""
    return f"http://127.0.0.1:{yaml.safe_load(config.read_text())['http_options']['port']}"


def get(url: str) -> tuple[int, bytes]:
    """Status and body of a GET; status 0 where nobody answers."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except OSError:
        return 0, b""


def wait_ready(url: str, alive: Callable[[], bool], log: Path, timeout_s: float = 420.0) -> None:
    """Wait for /ready; fails with the log's end when the process ends before that."""

    def ready() -> bool:
        if not alive():
            raise AssertionError(f"ended before it was ready:\n{log.read_text()[-4000:]}")
        return get(f"{url}/ready")[0] == 200

    try:
        wait_for(f"{url}/ready", ready, timeout_s, every_s=0.5)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{log.read_text()[-4000:]}") from None


def environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """This process's environment for children that must not phone home."""
    return {**os.environ, **_QUIET, "PATH": f"{BIN}:{os.environ['PATH']}", **(extra or {})}


@contextmanager
def running(command: list[str], log: Path, env: Mapping[str, str] | None = None) -> Iterator[subprocess.Popen[bytes]]:
    """A command with its output in a log file, interrupted as by Ctrl-C at the end, and all of its children gone."""
    with log.open("wb") as output:
        # A shell that runs tests in the background ignores SIGINT, and children inherit that.
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(env),
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,
        )
    try:
        yield process
    finally:
        stop(process)


def stop(process: subprocess.Popen[bytes], timeout_s: float = 60.0) -> None:
    """Interrupt a process as Ctrl-C does and wait for its end; kill what is left of it."""
    children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    _, alive = psutil.wait_procs(children, timeout=10)
    for child in alive:
        child.kill()


def open_client(url: str) -> openai.OpenAI:
    """An OpenAI client that does not retry; a context manager."""
    return openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=120)


def named(processes: list[psutil.Process], text: str) -> list[psutil.Process]:
    """Those of the processes whose command line contains `text`."""
    found = []
    for process in processes:
        try:
            if text in " ".join(process.cmdline()):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found
