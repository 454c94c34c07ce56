"""Puts ray.serve.llm's engines on simulated GPUs: a callback that Ray calls in each replica before its engine starts.

ray.serve.llm takes no executor but its own two, so the one that it has chosen is replaced in the engine's arguments.
"""

from __future__ import annotations

from typing import Any

from ray.llm._internal.common.callbacks.base import CallbackBase


class SimulatedGpus(CallbackBase):
    """`callback_kwargs`: `engine_args`, what `app.engine.simulated.simulated_engine_args` gives."""

    async def on_before_node_init(self) -> None:
        """Ray calls it."""
        from ray.llm._internal.serve.engines.vllm.vllm_models import VLLMEngineConfig

        original = VLLMEngineConfig.get_initialization_kwargs
        engine_args: dict[str, Any] = self.kwargs["engine_args"]

        def with_simulated_gpu(config: Any) -> dict[str, Any]:
            return {**original(config), **engine_args}

        VLLMEngineConfig.get_initialization_kwargs = with_simulated_gpu
        # There is nothing to download.
        self.ctx.run_init_node = False
