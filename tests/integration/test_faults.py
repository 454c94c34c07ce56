"""Engines and replicas that die, and applications that end: nothing hangs, and nothing is left behind."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest

from tests.support.serving import (
    BIN,
    CONFIGS,
    environment,
    get,
    named,
    open_client,
    running,
    stop,
    url_of,
    variant,
    wait_for,
    wait_ready,
)

pytestmark = pytest.mark.integration

MODEL = "llama-3.1-8b-simulated"


def only_interactive(document: dict[str, Any]) -> None:
    """One pool with one replica on a slow simulated GPU: quick to start, and requests last as long as a test needs."""
    args = document["applications"][0]["args"]
    pool = args["pools"]["interactive"]
    pool["num_gpus"] = 0
    pool["executor"] = {**pool["executor"], "time_scale": 20.0}
    args["pools"] = {"interactive": pool}
    args["routing"] = {"lengths": [{"name": "any"}], "rules": [{"pool": "interactive"}]}
    args["ingress"] = {"num_cpus": 0.2}


class RunningApp:
    """`serve run` with its processes."""

    def __init__(self, url: str, process: Any) -> None:
        self.url = url
        self.process = process

    def tree(self) -> list[psutil.Process]:
        root = psutil.Process(self.process.pid)
        return [root, *root.children(recursive=True)]

    def only(self, text: str) -> psutil.Process:
        def one() -> psutil.Process | None:
            found = named(self.tree(), text)
            return found[0] if len(found) == 1 else None

        return wait_for(f"one process {text}", one)

    def replica(self) -> psutil.Process:
        return self.only("ServeReplica:sluice:interactive")

    def engine(self) -> psutil.Process:
        return self.only("VLLM::EngineCore")

    def is_ready(self) -> bool:
        return get(f"{self.url}/ready")[0] == 200


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningApp]:
    folder = tmp_path_factory.mktemp("faults")
    config = variant(CONFIGS / "simulated.yaml", folder / "config.yaml", only_interactive)
    log = folder / "serve.log"
    with running([str(BIN / "serve"), "run", str(config)], log) as process:
        wait_ready(url_of(config), lambda: process.poll() is None, log)
        yield RunningApp(url_of(config), process)


class LongStream:
    """A stream that is still going when the test does something to its server."""

    def __init__(self, app: RunningApp) -> None:
        self.started = threading.Event()
        self.text = ""
        self.status = 0
        self._url = app.url
        self.thread = threading.Thread(target=self._read)
        self.thread.start()
        assert self.started.wait(60)

    def _read(self) -> None:
        body = {"model": MODEL, "prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=60) as answer:
            self.status = answer.status_code
            for chunk in answer.iter_text():
                self.text += chunk
                self.started.set()

    def join(self) -> None:
        self.thread.join(30)
        assert not self.thread.is_alive(), "the stream hangs"


@pytest.mark.parametrize("victim", ["engine", "replica"])
def test_a_killed_process_is_replaced_and_nothing_hangs(app: RunningApp, victim: str) -> None:
    replica, engine = app.replica(), app.engine()
    stream = LongStream(app)
    (engine if victim == "engine" else replica).kill()
    stream.join()
    *_, error, done, end = stream.text.split("\n\n")
    assert json.loads(error.removeprefix("data: "))["error"]["code"] in (500, 503)
    assert (done, end) == ("data: [DONE]", "")

    _, alive = psutil.wait_procs([replica, engine], timeout=40)
    assert not alive
    wait_for("a new replica", lambda: app.is_ready() and named(app.tree(), "VLLM::EngineCore"), timeout_s=180)
    assert app.replica().pid != replica.pid
    with open_client(app.url) as client:
        assert client.completions.create(model=MODEL, prompt="x", max_tokens=1).usage is not None


def test_a_replica_killed_while_it_starts_its_engine_leaves_no_engine(app: RunningApp) -> None:
    first = app.replica()
    first.kill()

    def starting() -> tuple[psutil.Process, list[psutil.Process]] | None:
        for process in named(app.tree(), "ServeReplica:sluice:interactive"):
            if process.pid != first.pid and (children := process.children()):
                return process, children
        return None

    replica, children = wait_for("a replica that starts its engine", starting, timeout_s=90, every_s=0.02)
    replica.kill()
    _, alive = psutil.wait_procs(children, timeout=10)
    assert not alive
    wait_for("a new replica", app.is_ready, timeout_s=180)


def shut_down(app: RunningApp) -> None:
    result = subprocess.run(
        [str(BIN / "serve"), "shutdown", "-y"],
        env=environment({"RAY_AUTH_MODE": "token"}),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr


# Last, because it ends the application.
def test_serve_shutdown_ends_the_engines(app: RunningApp) -> None:
    ours = [app.replica(), app.engine()]
    shut_down(app)
    _, alive = psutil.wait_procs(ours, timeout=20)
    assert not alive


def test_interrupting_serve_run_leaves_no_process(app: RunningApp) -> None:
    processes = app.tree()
    stop(app.process)
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert not alive
