"""What has to be set in a process before vLLM is imported into it, and once it runs. Imports nothing heavy.

Relies on `vllm.envs.enable_envs_cache`.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
from pathlib import Path

from app.config import Executor
from app.engine import die_with_parent

# vLLM, Hugging Face and Ray report to their makers unless told otherwise.
TELEMETRY_OFF = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def prepare_process() -> None:
    """For every process that imports vLLM: no telemetry unless the operator asked for it."""
    for name, value in TELEMETRY_OFF.items():
        os.environ.setdefault(name, value)


def prepare_engine_process(executor: Executor) -> None:
    """For a replica, before it starts its engine.

    Must be called on the thread that will start the engine and that lives as long as the process: the kernel ties the
    engine's life to that thread.
    """
    prepare_process()
    os.environ[die_with_parent.PARENT] = str(os.getpid())
    os.environ[die_with_parent.INTERPRETER] = sys.executable
    multiprocessing.set_executable(str(Path(die_with_parent.__file__).resolve()))
    if executor.kind in ("cpu", "simulated"):
        # Otherwise the CPU build starts a second, busily polling process per engine.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["OMP_NUM_THREADS"] = str(executor.threads if executor.kind == "cpu" else 1)


def settle_process() -> None:
    """For a process that has started all it will need: cheaper look-ups and garbage collections from here on.

    vLLM reads its environment again with every request and step unless told not to, as it tells its own processes.
    """
    from vllm.envs import enable_envs_cache

    enable_envs_cache()
    gc.collect()
    gc.freeze()
