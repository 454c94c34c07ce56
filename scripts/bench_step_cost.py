"""Simulated GPU: measured step times against the cost model's formula.

Runs vLLM's real engine on the simulated executor under a few loads and compares how long each step took with what the
formula gives for it. All times are simulated ones; what the comparison shows is how exactly they are kept. `idle` is
how long the simulated GPU waited for the engine before a step, which is the engine's own CPU time and no part of the
formula.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from app.config import SimulatedExecutorConfig
from app.engine.environment import prepare_engine_process
from app.engine.simulated import simulated_engine_args
from app.model_cache import builtin_model_path

# Name, prompts at once, tokens per prompt, tokens per answer.
_LOADS = [
    ("1 decode", 1, 64, 200),
    ("16 decodes", 16, 64, 200),
    ("64 decodes", 64, 64, 200),
    ("16 decodes at 4k", 16, 4096, 100),
    ("prefill 16k", 1, 16_384, 2),
    ("prefill 8 x 2k", 8, 2048, 2),
]


async def _measure(profile: str, time_scale: float, share: float) -> list[dict[str, Any]]:
    from vllm import AsyncEngineArgs, SamplingParams
    from vllm.inputs import tokens_input
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    args = AsyncEngineArgs(
        model=str(builtin_model_path("smollm2-135m-instruct")),
        max_model_len=32_768,
        max_num_seqs=128,
        max_num_batched_tokens=2048,
        enable_prefix_caching=False,
        **simulated_engine_args(profile, time_scale),
    )
    engine = AsyncLLM.from_engine_args(args)
    rows = []
    try:
        for index, (name, prompts, prompt_tokens, output_tokens) in enumerate(_LOADS):
            await engine.collective_rpc("sluice_step_records")
            params = SamplingParams(
                max_tokens=max(2, int(output_tokens * share)), ignore_eos=True, output_kind=RequestOutputKind.DELTA
            )

            async def one(number: int, load: int, tokens: int, sampling: Any) -> None:
                prompt = tokens_input([1000 + load, 1000 + number] * (tokens // 2))
                async for _ in engine.generate(prompt, sampling, f"{load}-{number}"):
                    pass

            await asyncio.gather(*(one(number, index, prompt_tokens, params) for number in range(prompts)))
            (records,) = await engine.collective_rpc("sluice_step_records")
            predicted = np.array([record["predicted"] for record in records])
            measured = np.array([record["measured"] for record in records])
            # The first step's is the time since the load before.
            idle = np.array([record["idle"] for record in records[1:]]) * 1000
            ratios = measured / predicted
            late = (measured - predicted) * 1000
            rows.append(
                {
                    "load": name,
                    "steps": len(records),
                    "predicted_ms_median": float(np.median(predicted) * 1000),
                    "ratio_p50": float(np.percentile(ratios, 50)),
                    "ratio_p99": float(np.percentile(ratios, 99)),
                    "late_ms_p50": float(np.percentile(late, 50)),
                    "late_ms_p99": float(np.percentile(late, 99)),
                    "idle_ms_p50": float(np.percentile(idle, 50)),
                    "idle_ms_p99": float(np.percentile(idle, 99)),
                }
            )
    finally:
        engine.shutdown()
    return rows


def main(argv: list[str]) -> int:
    """Print the table, write the JSON; 0 unless the median ratio of a load is off by more than 5 %."""
    parser = argparse.ArgumentParser(prog="bench step-cost", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="a quarter of the steps")
    parser.add_argument("--profile", default="h100-llama-3.1-8b", help="cost profile (default: %(default)s)")
    parser.add_argument("--time-scale", type=float, default=1.0, help="real seconds per simulated second (default: 1)")
    options = parser.parse_args(argv)
    prepare_engine_process(SimulatedExecutorConfig(kind="simulated"))
    rows = asyncio.run(_measure(options.profile, options.time_scale, 0.25 if options.quick else 1.0))

    print(f"\nSimulated {options.profile}, time scale {options.time_scale:g}: measured step time / formula\n")
    print(
        f"{'load':18} {'steps':>6} {'formula':>11} {'p50':>7} {'p99':>7} {'late p50':>10} {'late p99':>10} "
        f"{'idle p50':>10} {'idle p99':>10}"
    )
    for row in rows:
        print(
            f"{row['load']:18} {row['steps']:6} {row['predicted_ms_median']:8.2f} ms {row['ratio_p50']:7.3f} "
            f"{row['ratio_p99']:7.3f} {row['late_ms_p50']:7.2f} ms {row['late_ms_p99']:7.2f} ms "
            f"{row['idle_ms_p50']:7.2f} ms {row['idle_ms_p99']:7.2f} ms"
        )
    if options.json:
        figures = {"simulated": True, "profile": options.profile, "time_scale": options.time_scale, "loads": rows}
        options.json.write_text(json.dumps(figures, indent=2) + "\n")
    return 0 if all(abs(row["ratio_p50"] - 1) <= 0.05 for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
