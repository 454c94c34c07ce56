"""The servers that `./scripts/bench fleet` compares, each on three simulated GPUs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

from app.engine.simulated import simulated_engine_args
from app.model_cache import builtin_model_path
from scripts.fleet.scenarios import GPUS, TARGETS
from scripts.streaming.arms import MODEL_NAME, launch

TITLES = {
    "sluice": "Sluice",
    "silos": "Sluice without spillover",
    "fcfs": "one FCFS pool, Ray's routing",
    "ray-llm": "ray.serve.llm, three replicas",
    "all-batch": "all GPUs given to batch",
}
# What the dials of the interactive class are set to, by arm.
DIALS: dict[str, dict[str, Any]] = {
    "latency": {"preset": "latency"},
    "step-0.25": {"preset": "balanced", "step_tpot_share": 0.25},
    "balanced": {"preset": "balanced"},
    "throughput": {"preset": "throughput"},
}
TITLES.update({arm: f"interactive dials: {arm}" for arm in DIALS})
_MODEL = "smollm2-135m-instruct"
_MAX_MODEL_LEN = 65536
_TIERS = {"interactive": "priority", "standard": "default", "batch": "flex"}


def command(arm: str, profile: str, scale: float, port: int, folder: Path) -> list[str]:
    """What starts an arm."""
    path = folder / f"{arm}-{port}.yaml"
    if arm == "ray-llm":
        path.write_text(yaml.safe_dump(_ray_llm(profile, scale, port)))
        return [str(Path(sys.executable).with_name("serve")), "run", str(path)]
    path.write_text(yaml.safe_dump(_sluice(arm, profile, scale, port)))
    return launch(path, "haproxy")


def _engine(max_num_seqs: int, max_num_batched_tokens: int, **more: Any) -> dict[str, Any]:
    return {
        "max_model_len": _MAX_MODEL_LEN,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max_num_batched_tokens,
        **more,
    }


def _sluice(arm: str, profile: str, scale: float, port: int) -> dict[str, Any]:
    executor = {"kind": "simulated", "profile": profile, "time_scale": scale}
    base = {"executor": executor, "num_cpus": 0.2}
    lengths: list[dict[str, Any]] = [{"name": "short", "max_prompt_tokens": 8192}, {"name": "long"}]
    if arm == "fcfs":
        engine = _engine(256, 8192, scheduler="vllm")
        pools = {"all": {**base, "num_replicas": GPUS, "engine": engine}}
        routing: dict[str, Any] = {"lengths": lengths, "rules": [{"pool": "all"}], "admission": False}
    elif arm == "all-batch":
        pools = {"batch": {**base, "num_replicas": GPUS, "engine": _engine(256, 8192)}}
        routing = {"lengths": lengths, "rules": [{"pool": "batch"}]}
    else:
        pools = {
            "interactive": {**base, "engine": _engine(256, 8192), "reserve": {"interactive": 0.25}},
            "batch": {**base, "engine": _engine(256, 8192), "reserve": {"batch": 0.1}},
            "long_context": {**base, "engine": _engine(256, 8192)},
        }
        rules = [
            {"class": "batch", "length": "short", "pool": "batch"},
            {"length": "short", "pool": "interactive"},
            {"pool": "long_context"},
        ]
        routing = {"lengths": lengths, "rules": rules, "spillover": arm == "sluice"}
    args = {
        "model": {"name": MODEL_NAME, "source": f"builtin:{_MODEL}"},
        # Without targets vLLM's own scheduler serves first come, first served.
        "classes": {name: _class(name, None if arm == "fcfs" else TARGETS[name], scale, arm) for name in TARGETS},
        "routing": routing,
        "pools": pools,
        "ingress": {"num_cpus": 0.2},
    }
    app = {"name": "sluice", "route_prefix": "/", "import_path": "app.main:build", "args": args}
    return {"http_options": {"host": "127.0.0.1", "port": port}, "applications": [app]}


def _class(name: str, targets: tuple[float, float, float] | None, scale: float, arm: str) -> dict[str, Any]:
    tier = {"service_tier": _TIERS[name]}
    if targets is None:
        return {**tier, "dials": {"hold_ms": 60_000 * scale}}
    base, per_1k, tpot = (value * 1000 * scale for value in targets)
    dials = DIALS.get(arm, {}) if name == "interactive" else {}
    return {
        **tier,
        "targets": {"ttft_ms": base, "ttft_ms_per_1k_tokens": per_1k, "tpot_ms": tpot},
        "dials": {"hold_ms": 1000 * scale, **dials},
    }


def _ray_llm(profile: str, scale: float, port: int) -> dict[str, Any]:
    simulated = simulated_engine_args(profile, scale)
    config = {
        "model_loading_config": {"model_id": MODEL_NAME, "model_source": str(builtin_model_path(_MODEL))},
        "accelerator_config": {"kind": "cpu"},
        "deployment_config": {"num_replicas": GPUS, "ray_actor_options": {"num_cpus": 0.2}},
        "placement_group_config": {"bundles": [{"CPU": 0.2}]},
        "engine_kwargs": _engine(256, 8192),
        "callback_config": {
            "callback_class": "scripts.fleet.ray_llm.SimulatedGpus",
            "callback_kwargs": {"engine_args": simulated},
        },
    }
    ingress = {"num_replicas": 1, "ray_actor_options": {"num_cpus": 0.2}}
    args = {"llm_configs": [config], "ingress_deployment_config": ingress}
    app = {"name": "llm", "route_prefix": "/", "import_path": "ray.serve.llm:build_openai_app", "args": args}
    return {"http_options": {"host": "127.0.0.1", "port": port}, "applications": [app]}
