"""Every config file in serve_configs/ builds into deployments that ask Ray for the right things."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from app.errors import ConfigError
from app.main import build
from tests.support.serving import CONFIGS

FILES = sorted(CONFIGS.glob("*.yaml"))


def args_of(path: Path) -> dict[str, Any]:
    (application,) = yaml.safe_load(path.read_text())["applications"]
    args: dict[str, Any] = application["args"]
    return args


def deployments(args: dict[str, Any]) -> dict[str, Any]:
    ingress = build(args)
    _, handles = ingress._bound_deployment.init_args
    pools = {name: pool._bound_deployment for name, pool in handles.items()}
    return {"ingress": ingress._bound_deployment, **pools}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_config_builds(path: Path) -> None:
    args = args_of(path)
    built = deployments(args)
    assert set(built) == {"ingress", *args["pools"]}
    for name, deployment in built.items():
        assert deployment.name == name


def test_the_folder_has_the_three_ways_to_run() -> None:
    assert {"local.yaml", "simulated.yaml", "gpu.yaml"} <= {path.name for path in FILES}


def test_a_simulated_replica_asks_for_one_gpu() -> None:
    for name, deployment in deployments(args_of(CONFIGS / "simulated.yaml")).items():
        assert deployment.ray_actor_options.get("num_gpus", 0) == (0 if name == "ingress" else 1)


def test_tensor_parallel_replicas_get_one_bundle_per_gpu() -> None:
    built = deployments(args_of(CONFIGS / "gpu.yaml"))
    long_context = built["long_context"]
    bundles = long_context._deployment_config, long_context._replica_config.placement_group_bundles
    assert [bundle["GPU"] for bundle in bundles[1]] == [1, 1]
    assert long_context._replica_config.placement_group_strategy == "STRICT_PACK"
    # The replica's own actor must leave the GPUs of its bundles to vLLM's workers.
    assert long_context.ray_actor_options.get("num_gpus", 0) == 0
    first = bundles[1][0]
    assert first["CPU"] >= long_context.ray_actor_options["num_cpus"]
    interactive = built["interactive"]
    assert interactive.ray_actor_options["num_gpus"] == 1
    assert interactive.ray_actor_options["accelerator_type"] == "H100"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("no_such_field", 1, "no such field"),
        ("max_model_len", 1, "set it there"),
        ("structured_outputs_config", {"nonsense": 1}, "vLLM refuses it"),
    ],
)
def test_what_is_passed_on_to_vllm_is_checked(key: str, value: Any, message: str) -> None:
    args = args_of(CONFIGS / "simulated.yaml")
    args["pools"]["batch"]["engine"]["vllm"] = {key: value}
    with pytest.raises(ConfigError, match=f"pools.batch.engine.vllm.{key}: .*{message}"):
        build(args)


def test_a_config_error_is_one_sentence_with_the_path() -> None:
    args = args_of(CONFIGS / "local.yaml")
    args["pools"]["batch"]["engine"]["max_model_length"] = 5
    with pytest.raises(ConfigError) as caught:
        build(args)
    assert (
        str(caught.value) == "args: pools.batch.engine.max_model_length: unknown key; remove it or correct its spelling"
    )
