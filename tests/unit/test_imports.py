"""Imports point one way, and what touches Ray or vLLM is where docs/architecture.md says it is."""

import ast
from pathlib import Path

import pytest

APP = Path(__file__).parents[2] / "app"

# A package may import from those below it, never from those above.
LAYERS = [
    *("main", "http_path", "api", "pools", "engine", "routing", "telemetry"),
    *("serve_file", "model_cache", "config", "errors", "types"),
]

MAY_IMPORT = {
    "ray": {
        "main.py",
        "pools/client.py",
        "pools/replica.py",
        "pools/router.py",
        "telemetry/metrics.py",
        "serve_file.py",
    },
    "vllm": {
        "engine/arguments.py",
        "engine/environment.py",
        "engine/render.py",
        "engine/scheduler.py",
        "engine/simulated.py",
        "engine/stats.py",
        "engine/vllm.py",
    },
}

MODULES = sorted(path for path in APP.rglob("*.py") if path.name != "__init__.py")


def imported(path: Path) -> list[str]:
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.append(node.module or "")
    return names


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(APP)))
def test_imports_point_downward(path: Path) -> None:
    own = path.relative_to(APP).parts[0].removesuffix(".py")
    for name in imported(path):
        parts = name.split(".")
        if parts[0] == "app" and len(parts) > 1:
            assert LAYERS.index(parts[1]) >= LAYERS.index(own), f"{path.relative_to(APP)} must not import {name}"


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(APP)))
def test_foreign_internals_stay_in_their_modules(path: Path) -> None:
    relative = str(path.relative_to(APP))
    for name in imported(path):
        root = name.split(".")[0]
        if root in MAY_IMPORT:
            assert relative in MAY_IMPORT[root], f"{relative} must not import {name}"


@pytest.mark.parametrize("package", ["routing"])
def test_decisions_are_pure(package: str) -> None:
    for path in (APP / package).glob("*.py"):
        assert not {"time", "asyncio", "random", "os"} & {name.split(".")[0] for name in imported(path)}, path
