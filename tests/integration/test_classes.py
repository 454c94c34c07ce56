"""Keys, limits, cancellation, resuming and changes while it runs: two ingress replicas, as `serve deploy` has them."""

from __future__ import annotations

import hashlib
import json
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
import pytest
import yaml

from tests.support.serving import BIN, CONFIGS, ROOT, environment, free_port, url_of, variant, wait_for, wait_ready

pytestmark = pytest.mark.integration

MODEL = "llama-3.1-8b-simulated"
# Many tokens of it take long enough to meddle with the stream.
LONG = {"model": MODEL, "prompt": "Once", "max_tokens": 400, "stream": True, "ignore_eos": True}


def hashed(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


@dataclass(frozen=True)
class Deployed:
    """The app, its config file and its keys file."""

    url: str
    config: Path
    keys: Path
    env: dict[str, str]

    def run(self, *command: str) -> None:
        result = subprocess.run(
            [str(BIN / command[0]), *command[1:]], cwd=ROOT, env=self.env, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stdout + result.stderr

    @contextmanager
    def client(self, key: str = "sk-main") -> Iterator[openai.OpenAI]:
        with openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=60) as client:
            yield client

    @contextmanager
    def http(self, key: str = "sk-main") -> Iterator[httpx.Client]:
        headers = {"authorization": f"Bearer {key}"}
        with httpx.Client(base_url=self.url, headers=headers, timeout=60, trust_env=False) as client:
            yield client


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    folder = tmp_path_factory.mktemp("classes")
    keys = folder / "keys.yaml"
    known = [
        {"name": "main", "sha256": hashed("sk-main")},
        {"name": "nightly", "sha256": hashed("sk-nightly"), "classes": ["batch"]},
        {"name": "slow", "sha256": hashed("sk-slow"), "requests_per_minute": 4},
    ]
    keys.write_text(yaml.safe_dump({"keys": known}))

    def change(document: dict[str, Any]) -> None:
        args = document["applications"][0]["args"]
        args["keys"] = {"file": str(keys)}
        args["ingress"] = {"num_cpus": 0.2, "num_replicas": 2}
        del args["pools"]["long_context"]
        args["routing"]["rules"] = [{"class": "batch", "pool": "batch"}, {"pool": "interactive"}]
        for pool in args["pools"].values():
            pool["num_gpus"] = 0
            pool["executor"] = {**pool["executor"], "time_scale": 4.0}

    config = variant(CONFIGS / "simulated.yaml", folder / "simulated.yaml", change)
    port, dashboard = free_port(), free_port()
    env = environment(
        {
            "RAY_ADDRESS": f"127.0.0.1:{port}",
            "RAY_DASHBOARD_ADDRESS": f"http://127.0.0.1:{dashboard}",
            "RAY_AUTH_MODE": "disabled",
        }
    )
    app = Deployed(url_of(config), config, keys, env)
    app.run(
        "ray", "start", "--head", f"--port={port}", "--num-cpus=8", f"--dashboard-port={dashboard}",
        "--node-ip-address=127.0.0.1", "--disable-usage-stats",
    )  # fmt: skip
    try:
        app.run("serve", "deploy", str(config))
        log = folder / "status.txt"
        log.write_text("see `serve status`")
        wait_ready(app.url, lambda: True, log)
        yield app
    finally:
        engines = [child for one in replicas() for child in one.children()]
        app.run("serve", "shutdown", "-y")
        app.run("ray", "stop")
        _, alive = psutil.wait_procs(engines, timeout=10)
        assert not alive


def replicas() -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        try:
            if "ServeReplica:sluice:" in " ".join(process.cmdline()):
                found.append(process)
        except (psutil.NoSuchProcess, psutil.ZombieProcess):
            continue
    return found


def texts(lines: Iterator[str]) -> tuple[list[str], list[int]]:
    """Texts and ids of a stream's events."""
    parts: list[str] = []
    ids: list[int] = []
    for line in lines:
        if line.startswith("id: "):
            ids.append(int(line[4:]))
        if line.startswith("data: {"):
            chunk = json.loads(line[6:])
            assert "error" not in chunk, chunk
            parts += [choice["text"] for choice in chunk["choices"]]
    return parts, ids


class TestKeys:
    """Whose a request is."""

    def test_a_key_is_needed(self, deployed: Deployed) -> None:
        with deployed.client("sk-unknown") as client:
            with pytest.raises(openai.AuthenticationError):
                client.models.list()
            with pytest.raises(openai.AuthenticationError, match="not known"):
                client.completions.create(model=MODEL, prompt="Hi", max_tokens=2)
        with urllib.request.urlopen(f"{deployed.url}/health", timeout=10) as answer:
            assert answer.status == 200

    def test_a_key_has_its_classes(self, deployed: Deployed) -> None:
        with deployed.client("sk-nightly") as client:
            client.completions.create(model=MODEL, prompt="Hi", max_tokens=2, extra_body={"service_tier": "flex"})
            with pytest.raises(openai.PermissionDeniedError, match="`batch`"):
                client.completions.create(model=MODEL, prompt="Hi", max_tokens=2)

    def test_a_key_has_its_rate_and_is_told_when_to_come_back(self, deployed: Deployed) -> None:
        body = {"model": MODEL, "prompt": "Hi", "max_tokens": 2}
        with deployed.http("sk-slow") as http:
            # Each of the two ingress replicas lets two through.
            answers = [http.post("/v1/completions", json=body) for _ in range(5)]
        assert answers[0].status_code == 200
        refused = [answer for answer in answers if answer.status_code != 200]
        assert refused
        for answer in refused:
            assert answer.status_code == 429
            assert 1 <= int(answer.headers["retry-after"]) <= 30
            assert answer.json()["error"]["details"] == {"reason": "requests_per_minute"}

    def test_keys_come_and_go_while_it_runs(self, deployed: Deployed) -> None:
        before = deployed.keys.read_text()
        more = {"name": "new", "sha256": hashed("sk-new")}
        with deployed.client("sk-new") as client:

            def answers() -> bool:
                try:
                    # Both replicas have to know it.
                    for _ in range(8):
                        client.models.list()
                except openai.AuthenticationError:
                    return False
                return True

            assert not answers()
            deployed.keys.write_text(yaml.safe_dump({"keys": [*yaml.safe_load(before)["keys"], more]}))
            wait_for("the new key is known", answers, 20)
            # A mistake in the file changes nothing.
            deployed.keys.write_text("keys: [{name: oops}]")
            assert answers()
            deployed.keys.write_text(before)
            wait_for("the key is gone again", lambda: not answers(), 20)


class TestById:
    """Whichever replica has the request."""

    @pytest.mark.parametrize("attempt", range(3))
    def test_a_request_is_cancelled(self, deployed: Deployed, attempt: int) -> None:
        name = f"cancel-{attempt}-{time.time_ns()}"
        with (
            deployed.http() as http,
            http.stream("POST", "/v1/completions", json=LONG, headers={"x-request-id": name}) as answer,
        ):
            lines = answer.iter_lines()
            assert next(lines).startswith("data: {")
            with deployed.http("sk-nightly") as other:
                assert other.post(f"/v1/requests/{name}/cancel").status_code == 404
            with deployed.http() as other:
                assert other.post(f"/v1/requests/{name}/cancel").json()["status"] == "cancelled"
            rest = [line for line in lines if line]
        assert "RequestCancelledError" in rest[-2]
        assert rest[-1] == "data: [DONE]"

    @pytest.mark.parametrize("attempt", range(3))
    def test_a_stream_goes_on_where_it_broke(self, deployed: Deployed, attempt: int) -> None:
        name = f"resume-{attempt}-{time.time_ns()}"
        headers = {"x-request-id": name, "x-sluice-resume": "allow"}
        seen: list[str] = []
        with (
            deployed.http() as http,
            http.stream("POST", "/v1/completions", json=LONG, headers=headers) as answer,
        ):
            for line in answer.iter_lines():
                seen.append(line)
                if len(seen) > 12 and not line:
                    break
        first, ids = texts(iter(seen))
        with (
            deployed.http() as http,
            http.stream("GET", f"/v1/requests/{name}/events", headers={"last-event-id": str(ids[-1])}) as answer,
        ):
            assert answer.status_code == 200
            rest, more = texts(answer.iter_lines())
        assert ids + more == list(range(1, len(ids) + len(more) + 1))
        with deployed.http() as http:
            whole = http.post("/v1/completions", json={**LONG, "stream": False}).json()
        assert "".join(first + rest) == whole["choices"][0]["text"]

    def test_what_is_over_or_never_was_is_gone(self, deployed: Deployed) -> None:
        with deployed.http() as http:
            assert http.get("/v1/requests/nothing/events").status_code == 410
            assert http.post("/v1/requests/nothing/cancel").status_code == 404


def test_classes_change_while_it_runs_and_no_stream_is_dropped(deployed: Deployed) -> None:
    pids = {process.pid for process in replicas()}
    document = yaml.safe_load(deployed.config.read_text())
    classes = document["applications"][0]["args"]["classes"]
    capped = {**classes, "standard": {**classes["standard"], "dials": {"max_output_tokens": 3}}}
    changed = {**document["applications"][0], "deployments": [{"name": "ingress", "user_config": {"classes": capped}}]}
    target = deployed.config.with_name("changed.yaml")
    target.write_text(yaml.safe_dump({**document, "applications": [changed]}))
    with (
        deployed.http() as http,
        http.stream("POST", "/v1/completions", json=LONG) as answer,
        deployed.client() as client,
    ):
        lines = answer.iter_lines()
        assert next(lines).startswith("data: {")
        deployed.run("serve", "deploy", str(target))

        def is_capped() -> bool:
            answers = [
                client.completions.with_raw_response.create(model=MODEL, prompt="Hi", max_tokens=9) for _ in range(4)
            ]
            notes = {one.headers.get("x-sluice-notes") for one in answers}
            usages = [one.parse().usage for one in answers]
            return notes == {"max_tokens=3"} and all(
                usage is not None and usage.completion_tokens == 3 and usage.model_dump()["notes"] == ["max_tokens=3"]
                for usage in usages
            )

        wait_for("the cap holds", is_capped, 60)
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]"
    assert {process.pid for process in replicas()} == pids
