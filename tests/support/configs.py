"""The smallest configuration that is valid, for tests that change one thing in it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

_ARGS: dict[str, Any] = {
    "model": {"name": "tiny", "source": "builtin:smollm2-135m-instruct"},
    "routing": {
        "lengths": [{"name": "short", "max_prompt_tokens": 1000}, {"name": "long"}],
        "rules": [{"class": "batch", "pool": "batch"}, {"pool": "interactive"}],
    },
    "pools": {
        name: {
            "executor": {"kind": "cpu"},
            "engine": {"max_model_len": 2048, "kv_cache_memory_mib": 256},
        }
        for name in ("interactive", "batch")
    },
}


def minimal_args() -> dict[str, Any]:
    """An application's `args`: two pools on the CPU executor. A new copy each time."""
    return copy.deepcopy(_ARGS)


def minimal_document() -> dict[str, Any]:
    """A Serve config file's content around `minimal_args`."""
    return {
        "http_options": {"host": "127.0.0.1", "port": 8000},
        "applications": [
            {"name": "sluice", "route_prefix": "/", "import_path": "app.main:build", "args": minimal_args()}
        ],
    }


def write(path: Path, document: Any) -> Path:
    """Writes a document as YAML and returns its path."""
    path.write_text(yaml.safe_dump(document, sort_keys=False))
    return path


def put(document: Any, path: str, value: Any) -> None:
    """Sets what is at a dotted path, as error messages write it."""
    *parents, last = path.split(".")
    for part in parents:
        document = document[int(part)] if isinstance(document, list) else document[part]
    if isinstance(document, list):
        document[int(last)] = value
    else:
        document[last] = value
