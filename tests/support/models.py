"""Model folders for tests."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from app.engine.step_cost import PROFILES
from app.model_cache import builtin_model_path

SMOLLM2 = "smollm2-135m-instruct"


def tokenizer_folder() -> Path:
    """A folder with a real tokenizer and a small model's config.json; SLUICE_TEST_MODEL names another one."""
    named = os.environ.get("SLUICE_TEST_MODEL")
    return Path(named) if named else builtin_model_path(SMOLLM2)


def llama_shape() -> str:
    """`--hf-overrides` that give the folder the shape of Llama-3.1-8B."""
    shape: dict[str, Any] = PROFILES["h100-llama-3.1-8b"].hf_overrides
    return json.dumps(shape)
