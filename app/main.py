"""From the configuration to bound deployments: the only module that knows all parts. Serve imports `build`."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

from app.config import PoolConfig, SluiceConfig, parse_config, reconfigured
from app.engine.environment import TELEMETRY_OFF, prepare_process, settle_process
from app.pools.replica import VLLMReplica

# Serve's messages between processes may have 4 MiB unless told otherwise; prompts and whole answers may have more.
_MESSAGES = {"RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(256 << 20)}

# The replica's generator is asked for its next item when the last one has left, instead of running ahead of its
# reader: what accumulates meanwhile is then sent as one. Serve reads this when the replica's process starts.
_REPLICA_ENVIRONMENT = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0", **_MESSAGES, **TELEMETRY_OFF}

_INGRESS_ENVIRONMENT = {
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    **_MESSAGES,
    **TELEMETRY_OFF,
}

logger = logging.getLogger("ray.serve")

_EVERY_DEPLOYMENT = {
    "health_check_period_s": 2.0,
    "health_check_timeout_s": 30.0,
    # How often a replica that is stopped looks whether its requests are done.
    "graceful_shutdown_wait_loop_s": 0.5,
}


@serve.ingress()
class Ingress:
    """The ingress deployment."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, config: SluiceConfig, handles: dict[str, DeploymentHandle]
    ) -> None:
        # vLLM reads its environment when it is imported.
        prepare_process()
        from app.api.http import http_path
        from app.api.ingress import build_app
        from app.api.keys import KeyStore
        from app.engine.render import Renderer
        from app.pools.client import HealthWatch, Peers, PoolClient, listening_host
        from app.pools.dispatcher import Dispatcher
        from app.serve_file import check_reach
        from app.telemetry.metrics import RequestMetrics
        from app.telemetry.otlp_metrics import OtlpMetrics
        from app.telemetry.tracing import Tracing

        # Serve keeps listening where it did when it was started, whatever a later config file says.
        check_reach(await asyncio.to_thread(listening_host), config)
        self._config = config
        self._tracing = Tracing(config.tracing, role="ingress")
        self._otlp = OtlpMetrics.configured(config.metrics, config.tracing.service_name, config.model.name)
        renderer = Renderer(config)
        renderer.warm_up()
        pools = {
            name: PoolClient(name, handle, config.pools[name].accept_timeout_s) for name, handle in handles.items()
        }
        dispatcher = Dispatcher(config, pools)
        health = HealthWatch(serve.get_replica_context().app_name, list(pools))
        metrics = RequestMetrics(config.classes, dispatcher.admission.held_by_class, dispatcher.fleet.answering_by_pool)
        self._gauges = asyncio.create_task(metrics.keep_gauges())
        # Alone, a replica knows all requests.
        peers = Peers(serve.get_replica_context().app_name, "ingress") if config.ingress.num_replicas > 1 else None
        ask, ask_all = (None, None) if peers is None else (peers.ask, peers.ask_all)
        store = KeyStore(config.keys, config.ingress.num_replicas)
        self._keys = asyncio.create_task(store.keep_current())
        self._app = build_app(
            config,
            renderer,
            pools,
            dispatcher,
            health,
            self._tracing,
            metrics,
            store.keys,
            ask,
            ask_all,
            [] if self._otlp is None else [self._otlp],
        )
        if http_path() == "haproxy":
            logger.info("Requests arrive by HAProxy.")
        else:
            logger.warning(
                "Requests arrive by Ray Serve's Python proxy. For HAProxy, which is faster, start Ray with the "
                "environment that `./scripts/serve --print-environment` prints."
            )
        settle_process()

    async def reconfigure(self, user_config: dict[str, Any]) -> None:
        """Serve calls it with the deployment's `user_config`, at the start and whenever that changes."""
        self._app.configure(reconfigured(self._config, user_config))

    async def cancel_request(self, request_id: str, key: str) -> bool | None:
        """For other ingress replicas: cancel a caller's request, if it is here; else None."""
        return self._app.requests.cancel(request_id, key) or None

    async def console_snapshot(self, key: str, window_s: float) -> Any:
        """For the console: what this ingress replica has seen."""
        return self._app.console.snapshot(key, window_s)

    async def describe_request(self, request_id: str, key: str) -> Any:
        """For other ingress replicas: what is known of a caller's request, if it is or was here; else None."""
        return self._app.everywhere.describe_here(request_id, key)

    async def read_request(self, request_id: str, key: str, last: int) -> Any:
        """For other ingress replicas: what came of a resumable stream after an event, if it is here; else None."""
        return await self._app.requests.excerpt(request_id, key, last)

    def __serve_build_asgi_app__(self) -> Any:
        return self._app

    async def __del__(self) -> None:
        if hasattr(self, "_gauges"):
            self._gauges.cancel()
        if hasattr(self, "_keys"):
            self._keys.cancel()
        if hasattr(self, "_tracing"):
            await asyncio.to_thread(self._tracing.shutdown)
        otlp = getattr(self, "_otlp", None)
        if otlp is not None:
            await asyncio.to_thread(otlp.shutdown)


def build(args: dict[str, Any]) -> serve.Application:
    """The application that a Serve config file with `import_path: app.main:build` runs.

    Raises:
        ConfigError: with one sentence naming the key and the fix.
    """
    config = parse_config(args)
    from app.api.keys import read_keys

    read_keys(config.keys)
    if any(pool.engine.vllm for pool in config.pools.values()):
        # Imports vLLM, so only where there is something to check.
        prepare_process()
        from app.engine.arguments import check_engine_args

        check_engine_args(config)
    handles = {name: _pool(name, config, pool) for name, pool in config.pools.items()}
    ingress = serve.deployment(Ingress).options(
        name="ingress",
        num_replicas=config.ingress.num_replicas,
        max_ongoing_requests=config.ingress.max_ongoing_requests,
        ray_actor_options={"num_cpus": config.ingress.num_cpus, "runtime_env": {"env_vars": _INGRESS_ENVIRONMENT}},
        graceful_shutdown_timeout_s=config.ingress.graceful_shutdown_timeout_s,
        # One line per request is enough, and ours tells more.
        logging_config={"enable_access_log": not config.ingress.access_log},
        **_EVERY_DEPLOYMENT,
    )
    return ingress.bind(config, handles)


def _pool(name: str, config: SluiceConfig, pool: PoolConfig) -> serve.Application:
    deployment = serve.deployment(VLLMReplica).options(
        name=name,
        num_replicas=pool.num_replicas,
        # Each ingress replica has a channel to each replica, which Serve counts as one more request.
        max_ongoing_requests=pool.most_ongoing_requests + config.ingress.num_replicas,
        max_queued_requests=pool.max_queued_requests,
        # The ingress's tells the same, once.
        logging_config={"enable_access_log": False},
        request_router_config=RequestRouterConfig(request_router_class="app.pools.router:PoolRouter"),
        graceful_shutdown_timeout_s=pool.graceful_shutdown_timeout_s,
        **_EVERY_DEPLOYMENT,
        **_placement(pool),
    )
    return deployment.bind(config.model, pool)


def _placement(pool: PoolConfig) -> dict[str, Any]:
    actor: dict[str, Any] = {
        "num_cpus": pool.num_cpus,
        "resources": dict(pool.resources),
        "runtime_env": {"env_vars": _REPLICA_ENVIRONMENT},
    }
    if pool.accelerator_type is not None:
        actor["accelerator_type"] = pool.accelerator_type
    if pool.executor.kind == "gpu" and pool.executor.tensor_parallel_size > 1:
        # The replica's actor only schedules; vLLM's workers take one GPU bundle each.
        worker = {"GPU": 1.0, **({f"accelerator_type:{pool.accelerator_type}": 0.001} if pool.accelerator_type else {})}
        first = {"CPU": pool.num_cpus, **worker, **pool.resources}
        return {
            "ray_actor_options": actor,
            "placement_group_bundles": [first, *[worker] * (pool.executor.tensor_parallel_size - 1)],
            "placement_group_strategy": pool.placement_group_strategy,
        }
    actor["num_gpus"] = pool.num_gpus
    return {"ray_actor_options": actor}
