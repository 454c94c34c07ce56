"""From the configuration to vLLM's AsyncEngineArgs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from vllm.config import StructuredOutputsConfig
from vllm.engine.arg_utils import AsyncEngineArgs

from app.config import ModelConfig, PoolConfig, SluiceConfig
from app.engine.simulated import simulated_engine_args
from app.errors import ConfigError
from app.model_cache import resolve_source

_MIB = 1 << 20
DEADLINE_SCHEDULER = "app.engine.scheduler.DeadlineScheduler"


def check_engine_args(config: SluiceConfig) -> None:
    """Refuse what the pools' `engine.vllm` may not hold.

    Raises:
        ConfigError: a name that AsyncEngineArgs does not have, or that the configuration sets by itself.
    """
    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    for name, pool in config.pools.items():
        own = set(_own_args(config.model, pool))
        for key in pool.engine.vllm:
            where = f"args: pools.{name}.engine.vllm.{key}"
            if key not in known:
                raise ConfigError(
                    f"{where}: vLLM's AsyncEngineArgs has no such field; remove it or correct its spelling"
                )
            if key in own:
                raise ConfigError(f"{where}: is set from the configuration's own keys; set it there")
        _further_args(pool, f"args: pools.{name}.engine.vllm.")


def engine_args(model: ModelConfig, pool: PoolConfig) -> AsyncEngineArgs:
    """The arguments of a pool's engines."""
    return AsyncEngineArgs(**_own_args(model, pool), **_further_args(pool))


def render_args(model: ModelConfig, pools: dict[str, PoolConfig]) -> AsyncEngineArgs:
    """Arguments for rendering without an engine: as the pool with the longest context has them."""
    longest = max(pools.values(), key=lambda pool: pool.engine.max_model_len)
    return engine_args(model, longest)


def chat_template(model: ModelConfig) -> str | None:
    """The text of the configured chat template; None for the model's own.

    Raises:
        ConfigError: the file cannot be read.
    """
    if model.chat_template is None:
        return None
    path = _packaged_template(model.chat_template)
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"args: model.chat_template: {path} cannot be read: {error}") from None


def _packaged_template(path: Path) -> Path:
    name = str(path)
    if name.startswith("builtin:"):
        return Path(__file__).parent / "templates" / f"{name.removeprefix('builtin:')}.jinja"
    return path


def _further_args(pool: PoolConfig, where: str = "engine.vllm.") -> dict[str, Any]:
    """`engine.vllm`, with mappings turned into vLLM's configuration classes where it wants those."""
    defaults = {
        field.name: field.default_factory() if callable(field.default_factory) else field.default
        for field in dataclasses.fields(AsyncEngineArgs)
        if field.name in pool.engine.vllm
    }
    further: dict[str, Any] = {}
    for key, value in pool.engine.vllm.items():
        default = defaults[key]
        if isinstance(value, dict) and dataclasses.is_dataclass(default):
            try:
                value = type(default)(**value)  # type: ignore[misc]
            except (ValueError, TypeError) as error:
                reason = " ".join(str(error).split())[:200]
                raise ConfigError(f"{where}{key}: vLLM refuses it: {reason}") from None
        further[key] = value
    return further


def _own_args(model: ModelConfig, pool: PoolConfig) -> dict[str, Any]:
    engine = pool.engine
    args: dict[str, Any] = {
        "model": resolve_source(model.source),
        "served_model_name": [model.name],
        "trust_remote_code": model.trust_remote_code,
        "reasoning_parser": model.reasoning_parser or "",
        "hf_overrides": dict(model.hf_overrides),
        "max_model_len": engine.max_model_len,
        "max_num_seqs": engine.max_num_seqs,
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "enable_prefix_caching": engine.enable_prefix_caching,
        "enforce_eager": engine.enforce_eager,
        "dtype": engine.dtype,
        "quantization": engine.quantization,
        "load_format": engine.load_format,
        "scheduling_policy": "priority",
        "disable_log_stats": False,
        "enable_log_requests": False,
    }
    if engine.kv_cache_memory_mib is not None:
        args["kv_cache_memory_bytes"] = engine.kv_cache_memory_mib * _MIB
    if engine.compact_json:
        args["structured_outputs_config"] = StructuredOutputsConfig(backend="xgrammar", disable_any_whitespace=True)
    if engine.scheduler == "deadline":
        args["scheduler_cls"] = DEADLINE_SCHEDULER
    executor = pool.executor
    if executor.kind == "cpu":
        args["distributed_executor_backend"] = "uni"
    elif executor.kind == "gpu":
        args["gpu_memory_utilization"] = engine.gpu_memory_utilization
        args["tensor_parallel_size"] = executor.tensor_parallel_size
        args["distributed_executor_backend"] = "ray" if executor.tensor_parallel_size > 1 else "uni"
    else:
        simulated = simulated_engine_args(executor.profile, executor.time_scale)
        args["hf_overrides"] = {**simulated.pop("hf_overrides", {}), **args["hf_overrides"]}
        args.update(simulated)
    return args
