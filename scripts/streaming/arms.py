"""The servers that `./scripts/bench streaming` compares, started and stopped one at a time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

from app.engine.environment import TELEMETRY_OFF
from scripts.launcher import RUN_ID, processes_of, sweep

ROOT = Path(__file__).resolve().parents[2]
MODEL_NAME = "tiny"
_MAX_MODEL_LEN = 2048
_MAX_NUM_SEQS = 128
_MAX_NUM_BATCHED_TOKENS = 2048
_KV_CACHE_MIB = 512
_START_TIMEOUT_S = 240.0


@dataclass(frozen=True)
class Arm:
    """One server under test."""

    name: str
    title: str


BARE = "vllm"
ARMS = {
    arm.name: arm
    for arm in (
        Arm(BARE, "bare vLLM OpenAI server"),
        Arm("ray-llm", "ray.serve.llm as shipped"),
        Arm("ray-llm-0", "ray.serve.llm, batching interval 0"),
        Arm("sluice", "Sluice"),
        Arm("sluice-proxy", "Sluice without HAProxy"),
    )
}


# The first that a process's title contains.
_ROLES = (
    ("VLLM::", "engine"),
    ("ServeReplica:sluice:ingress", "ingress"),
    ("OpenAiIngress", "ingress"),
    ("ServeReplica", "replica"),
    ("ProxyActor", "Serve's proxy"),
    ("HAProxyManager", "rest of Ray"),
    ("haproxy", "HAProxy"),
    ("api_server", "front end"),
)


@dataclass(frozen=True)
class Server:
    """A server that answers."""

    run_id: str
    port: int
    root: int

    def processes(self) -> list[int]:
        """Ids of all of its processes."""
        # Some overwrite their environment with a title, some leave the tree; none does both.
        tree: set[int] = set()
        with contextlib.suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.root)
            tree = {self.root, *(child.pid for child in root.children(recursive=True))}
        return sorted(tree | set(processes_of(self.run_id)))

    def cpu_seconds(self) -> dict[tuple[int, str], float]:
        """CPU time that its processes have used by now, by process id and role."""
        ticks = os.sysconf("SC_CLK_TCK")
        used: dict[tuple[int, str], float] = {}
        for pid in self.processes():
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
                title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                used[pid, role_of(title)] = (int(fields[11]) + int(fields[12])) / ticks
        return used


def role_of(title: str) -> str:
    """What a process is in the way of a token, by its command line."""
    for mark, role in _ROLES:
        if mark.lower() in title.lower():
            return role
    return "rest of Ray"


@contextmanager
def running(arm: str, model: Path, folder: Path) -> Iterator[Server]:
    """Start an arm, wait until it answers a chat completion, and leave no process behind.

    Raises:
        RuntimeError: it did not start; the end of its log is in the message.
    """
    port = free_port()
    command, environment = _command(arm, model, port, folder)
    with started(arm, command, environment, port, folder) as server:
        yield server


@contextmanager
def started(name: str, command: list[str], environment: Mapping[str, str], port: int, folder: Path) -> Iterator[Server]:
    """As `running`, for any command whose server listens on `port`."""
    run_id = uuid.uuid4().hex
    log = folder / f"{name}-{run_id[:6]}.log"
    environment = {
        **os.environ,
        **TELEMETRY_OFF,
        "HF_HUB_OFFLINE": "1",
        # Equal niceness for every arm: Ray's workers would otherwise yield to everything else.
        "RAY_worker_niceness": "0",
        "RAY_ADDRESS": "local",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "OMP_NUM_THREADS": "1",
        # vLLM's CPU workers would take cores for themselves.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        **environment,
        RUN_ID: run_id,
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL) and None,
        )
    server = Server(run_id, port, process.pid)
    try:
        _wait_until_answering(server, process, log)
        yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(15)
        sweep(run_id)
        process.poll()


def _command(arm: str, model: Path, port: int, folder: Path) -> tuple[list[str], dict[str, str]]:
    if arm == BARE:
        return _bare(model, port), {}
    if arm.startswith("ray-llm"):
        config = folder / f"{arm}-{port}.yaml"
        config.write_text(yaml.safe_dump(_ray_llm(model, port, stock=arm == "ray-llm")))
        return [str(Path(sys.executable).with_name("serve")), "run", str(config)], {}
    config = folder / f"{arm}-{port}.yaml"
    config.write_text(yaml.safe_dump(sluice_config(model, port)))
    return launch(config, "proxy" if arm == "sluice-proxy" else "haproxy"), {}


def launch(config: Path, http: str) -> list[str]:
    """The command that starts this app as ./scripts/serve does."""
    return [sys.executable, "-P", str(ROOT / "scripts/launcher.py"), "--http", http, str(config)]


def _bare(model: Path, port: int) -> list[str]:
    return [
        *(sys.executable, "-m", "vllm.entrypoints.openai.api_server"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *("--model", str(model), "--served-model-name", MODEL_NAME, "--load-format", "dummy", "--enforce-eager"),
        *("--max-model-len", str(_MAX_MODEL_LEN), "--max-num-seqs", str(_MAX_NUM_SEQS)),
        *("--max-num-batched-tokens", str(_MAX_NUM_BATCHED_TOKENS)),
        *("--kv-cache-memory-bytes", str(_KV_CACHE_MIB << 20), "--distributed-executor-backend", "uni"),
    ]


def _ray_llm(model: Path, port: int, *, stock: bool) -> dict[str, Any]:
    config: dict[str, Any] = {
        "model_loading_config": {"model_id": MODEL_NAME, "model_source": str(model)},
        "accelerator_config": {"kind": "cpu"},
        "deployment_config": {"num_replicas": 1, "ray_actor_options": {"num_cpus": 0.5}},
        "engine_kwargs": {
            "load_format": "dummy",
            "enforce_eager": True,
            "max_model_len": _MAX_MODEL_LEN,
            "max_num_seqs": _MAX_NUM_SEQS,
            "max_num_batched_tokens": _MAX_NUM_BATCHED_TOKENS,
            "kv_cache_memory_bytes": _KV_CACHE_MIB << 20,
            "distributed_executor_backend": "uni",
        },
    }
    if not stock:
        config["experimental_configs"] = {"stream_batching_interval_ms": 0}
    return {
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [
            {
                "name": "llm",
                "route_prefix": "/",
                "import_path": "ray.serve.llm:build_openai_app",
                "args": {
                    "llm_configs": [config],
                    "ingress_deployment_config": {"num_replicas": 1, "ray_actor_options": {"num_cpus": 0.5}},
                },
            }
        ],
    }


def sluice_config(model: Path, port: int) -> dict[str, Any]:
    """The Serve config file of this app as it is compared."""
    engine = {
        "load_format": "dummy",
        "enforce_eager": True,
        "max_model_len": _MAX_MODEL_LEN,
        "max_num_seqs": _MAX_NUM_SEQS,
        "max_num_batched_tokens": _MAX_NUM_BATCHED_TOKENS,
        "kv_cache_memory_mib": _KV_CACHE_MIB,
    }
    pool = {"executor": {"kind": "cpu", "threads": 1}, "num_cpus": 0.5, "engine": engine}
    return app_config(model, port, pool, {"num_cpus": 0.2})


def app_config(model: Path, port: int, pool: dict[str, Any], ingress: dict[str, Any]) -> dict[str, Any]:
    """A Serve config file of this app with one pool."""
    return {
        "http_options": {"host": "127.0.0.1", "port": port},
        "applications": [
            {
                "name": "sluice",
                "route_prefix": "/",
                "import_path": "app.main:build",
                "args": {
                    "model": {"name": MODEL_NAME, "source": str(model)},
                    "routing": {"lengths": [{"name": "any"}], "rules": [{"pool": "only"}]},
                    "pools": {"only": pool},
                    "ingress": ingress,
                },
            }
        ],
    }


def _wait_until_answering(server: Server, process: subprocess.Popen[bytes], log: Path) -> None:
    body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": "w0001"}], "max_tokens": 2}
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/v1/chat/completions",
        json.dumps(body).encode(),
        # Whose key this is, an arm with API keys knows.
        {"content-type": "application/json", "authorization": "Bearer nobody"},
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + _START_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        try:
            with opener.open(request, timeout=30):
                return
        except (OSError, urllib.error.URLError):
            time.sleep(0.5)
    raise RuntimeError(f"{log.name}: the server did not start:\n{log.read_text(errors='replace')[-3000:]}")


def check_equal_treatment(server: Server, cores: Sequence[int]) -> None:
    """Every process of the server may use the same cores, at this process's niceness.

    Raises:
        RuntimeError: one may not.
    """
    own = os.getpriority(os.PRIO_PROCESS, 0)
    for pid in server.processes():
        with contextlib.suppress(ProcessLookupError):
            if os.getpriority(os.PRIO_PROCESS, pid) != own or os.sched_getaffinity(pid) != set(cores):
                name = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")[:80].decode(errors="replace")
                raise RuntimeError(f"process {pid} ({name}) has another niceness or other cores than this one")


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
