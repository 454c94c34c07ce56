"""simulated.yaml on a Ray head that declares GPUs: each replica is given its own."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests.support.serving import BIN, CONFIGS, ROOT, environment, free_port, open_client, url_of, variant, wait_ready

pytestmark = pytest.mark.integration

MODEL = "llama-3.1-8b-simulated"
POOLS = ("interactive", "batch", "long_context")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """`ray start --head` and `serve deploy`, as README.md has them."""
    folder = tmp_path_factory.mktemp("fleet")
    address = f"127.0.0.1:{free_port()}"
    env = environment({"RAY_ADDRESS": address})

    def run(*command: str) -> None:
        result = subprocess.run(
            [str(BIN / command[0]), *command[1:]], cwd=ROOT, env=env, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stdout + result.stderr

    def change(document: dict[str, Any]) -> None:
        # All three share two cores here, so simulated time runs slower than real time.
        for pool in document["applications"][0]["args"]["pools"].values():
            pool["executor"] = {**pool["executor"], "time_scale": 4.0}

    config = variant(CONFIGS / "simulated.yaml", folder / "simulated.yaml", change)
    port = address.split(":")[1]
    dashboard = free_port()
    env |= {"RAY_DASHBOARD_ADDRESS": f"http://127.0.0.1:{dashboard}", "RAY_AUTH_MODE": "disabled"}
    run(
        "ray", "start", "--head", f"--port={port}", "--num-cpus=8", "--num-gpus=3", f"--dashboard-port={dashboard}",
        "--node-ip-address=127.0.0.1", "--disable-usage-stats",
    )  # fmt: skip
    try:
        run("serve", "deploy", str(config))
        log = folder / "status.txt"
        log.write_text("see `serve status`")
        wait_ready(url_of(config), lambda: True, log)
        yield url_of(config)
    finally:
        engines = [child for process in replicas().values() for child in process.children()]
        run("serve", "shutdown", "-y")
        run("ray", "stop")
        _, alive = psutil.wait_procs(engines, timeout=10)
        assert not alive


def replicas() -> dict[str, psutil.Process]:
    found = {}
    for process in psutil.process_iter():
        for pool in POOLS:
            try:
                if f"ServeReplica:sluice:{pool}" in " ".join(process.cmdline()):
                    found[pool] = process
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
    return found


def test_each_replica_is_given_its_own_gpu(fleet: str) -> None:
    given = {}
    for pool, process in replicas().items():
        # Ray sets the variable in the replica's process; its engine inherits it.
        (engine,) = [child for child in process.children() if "EngineCore" in " ".join(child.cmdline())]
        given[pool] = engine.environ()["CUDA_VISIBLE_DEVICES"]
    assert set(given) == set(POOLS)
    assert sorted(given.values()) == ["0", "1", "2"]


def test_every_pool_answers_and_long_prompts_find_theirs(fleet: str) -> None:
    cases = (("default", 5, "interactive"), ("flex", 5, "batch"), ("priority", 40_000, "long_context"))
    with open_client(fleet) as client:
        for tier, words, pool in cases:
            raw = client.completions.with_raw_response.create(
                model=MODEL, prompt="word " * words, max_tokens=5, extra_body={"service_tier": tier}
            )
            assert raw.headers["x-sluice-pool"] == pool
            usage = raw.parse().usage
            assert usage is not None
            assert usage.completion_tokens == 5


def test_a_context_as_long_as_the_real_model_s_is_taken(fleet: str) -> None:
    with open_client(fleet) as client:
        answer = client.completions.create(model=MODEL, prompt="word " * 120_000, max_tokens=2)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens > 100_000
