"""./scripts/serve beyond the set-up: what it starts, shows, reports and ends. A stand-in takes `serve run`'s place."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from app.errors import ConfigError
from app.serve_file import load_serve_file
from scripts import launcher
from scripts.launcher import Cluster, Progress, find_cluster, find_config, parse_options, ready_text, telling_lines
from tests.support.configs import minimal_document, put, write
from tests.support.serving import ROOT, free_port, wait_for


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever runs on this machine is not found."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))


class TestOptions:
    """The command line."""

    def test_without_arguments_the_local_config_is_started(self) -> None:
        options = parse_options([])
        assert options.config == ROOT / "serve_configs" / "local.yaml"
        assert options.timeout_s == 600

    @pytest.mark.parametrize("name", ["simulated", "simulated.yaml"])
    def test_a_bare_name_is_one_of_the_projects_configs(
        self, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)
        assert find_config(name) == ROOT / "serve_configs" / "simulated.yaml"

    def test_a_file_of_the_callers_comes_first(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "local.yaml").touch()
        monkeypatch.chdir(tmp_path)
        assert find_config("local.yaml") == tmp_path / "local.yaml"
        assert find_config("./local.yaml") == tmp_path / "local.yaml"

    def test_a_missing_config_is_refused_with_those_there_are(self) -> None:
        with pytest.raises(ConfigError, match=r"no config file `fast`; .*local, local_gpu, simulated"):
            find_config("fast")

    @pytest.mark.parametrize("value", ["0", "-1", "soon", "nan"])
    def test_a_timeout_is_a_positive_number(self, value: str, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit, match="2"):
            parse_options(["--timeout", value])
        assert "--timeout" in capsys.readouterr().err


class TestCluster:
    """Which Ray cluster `serve run` will join."""

    def test_none_is_joined_without_an_address_or_a_session(self, tmp_path: Path) -> None:
        assert find_cluster({"TMPDIR": str(tmp_path)}) is None

    def test_the_environments_address_wins(self, tmp_path: Path) -> None:
        self.session(tmp_path, "10.0.0.1:6379")
        found = find_cluster({"RAY_ADDRESS": "10.0.0.2:6379", "RAY_TMPDIR": str(tmp_path)})
        assert found == Cluster("10.0.0.2:6379", "RAY_ADDRESS")

    def test_a_started_head_node_is_found(self, tmp_path: Path) -> None:
        file = self.session(tmp_path, "10.0.0.1:6379\n")
        assert find_cluster({"RAY_TMPDIR": str(tmp_path)}) == Cluster("10.0.0.1:6379", str(file))
        assert find_cluster({"RAY_TMPDIR": str(tmp_path), "RAY_ADDRESS": "local"}) is None

    def test_a_cluster_that_does_not_answer_is_refused(self, tmp_path: Path) -> None:
        cluster = Cluster(f"127.0.0.1:{free_port()}", "RAY_ADDRESS")
        with pytest.raises(
            ConfigError, match=r"RAY_ADDRESS names a Ray cluster at .* that does not answer; start it or"
        ):
            launcher.check_cluster(cluster)

    @pytest.mark.parametrize("address", ["nonsense", "10.0.0.1", "10.0.0.1:port", "10.0.0.1:99999999"])
    def test_what_is_no_address_is_refused(self, address: str) -> None:
        with pytest.raises(ConfigError, match="is not a Ray address"):
            launcher.check_cluster(Cluster(address, "RAY_ADDRESS"))

    def test_a_cluster_that_answers_is_accepted(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as server:
            port = server.getsockname()[1]
            launcher.check_cluster(Cluster(f"127.0.0.1:{port}", "RAY_ADDRESS"))
            launcher.check_cluster(Cluster(f"ray://127.0.0.1:{port}", "RAY_ADDRESS"))

    def session(self, folder: Path, address: str) -> Path:
        file = folder / "ray" / "ray_current_cluster"
        file.parent.mkdir()
        file.write_text(address)
        return file


class TestReadyText:
    """What is shown when the app is ready."""

    def text(self, tmp_path: Path, cluster: Cluster | None = None) -> str:
        document = minimal_document()
        put(document, "applications.0.args.model.name", "it's a model")
        put(document, "applications.0.args.pools.batch.executor", {"kind": "simulated", "profile": "h200"})
        put(document, "applications.0.args.pools.batch.num_replicas", 12)
        file = load_serve_file(write(tmp_path / "config.yaml", document))
        return ready_text(file, cluster, "http://127.0.0.1:8265", tmp_path / "serve.log", 12.3)

    def test_it_tells_the_url_the_pools_the_dashboard_and_the_log(self, tmp_path: Path) -> None:
        lines = [line.split() for line in self.text(tmp_path).splitlines()]
        assert lines[0] == ["Ready", "after", "12", "s:", "http://127.0.0.1:8000"]
        assert ["interactive", "cpu", "1"] in lines
        assert ["batch", "simulated", "(h200)", "12"] in lines
        assert ["dashboard", "http://127.0.0.1:8265"] in lines
        assert ["log", str(tmp_path / "serve.log")] in lines

    def test_the_curl_line_is_one_that_a_shell_reads_rightly(self, tmp_path: Path) -> None:
        text = self.text(tmp_path)
        command = text[text.index("curl -N") :].split("\n\n")[0]
        words = shlex.split(command.replace("\\\n", " "))
        assert words[2] == "http://127.0.0.1:8000/v1/chat/completions"
        assert json.loads(words[words.index("-d") + 1])["model"] == "it's a model"

    def test_the_python_lines_are_python(self, tmp_path: Path) -> None:
        text = self.text(tmp_path)
        lines = textwrap.dedent(text[text.index("  from openai") :].split("\n\n")[0])
        compile(lines, "snippet", "exec")
        assert '"http://127.0.0.1:8000/v1"' in lines

    def test_it_says_that_a_joined_cluster_stays(self, tmp_path: Path) -> None:
        assert "the Ray cluster at h:1, which stays" in self.text(tmp_path, Cluster("h:1", "RAY_ADDRESS"))


class TestTellingLines:
    """Which lines of the log are shown after a failure."""

    def test_a_mistake_in_the_configuration_is_the_sentence_alone(self) -> None:
        log = """\
            \x1b[36m(ServeController pid=7)\x1b[0m WARNING controller 7 -- Deploying app 'sluice' failed with exception:
            \x1b[36m(ServeController pid=7)\x1b[0m Traceback (most recent call last):
            \x1b[36m(ServeController pid=7)\x1b[0m   File "app/main.py", line 1, in build
            \x1b[36m(ServeController pid=7)\x1b[0m app.errors.ConfigError: args: pools.fast: change it: now
            \x1b[36m(ServeController pid=7)\x1b[0m RuntimeError: something later
        """
        assert telling_lines(textwrap.dedent(log)) == ["args: pools.fast: change it: now"]

    def test_an_error_that_only_points_at_another_is_passed_over(self) -> None:
        log = """\
            (ServeReplica:sluice:batch pid=9) (EngineCore pid=10) ERROR [core.py:1] ValueError: too few blocks
            (ServeReplica:sluice:batch pid=9) RuntimeError: Engine core initialization failed. See root cause above.
            (ServeController pid=7) ray.exceptions.RayTaskError(RuntimeError): ray::Replica.init() (pid=9)
            (ServeController pid=7) RuntimeError: Traceback (most recent call last):
        """
        assert telling_lines(textwrap.dedent(log)) == ["ValueError: too few blocks"]

    def test_rays_note_on_repetitions_is_left_out(self) -> None:
        log = "(ServeReplica:a:b pid=9) OSError: no file\x1b[32m [repeated 3x across cluster] (see docs)\x1b[0m"
        assert telling_lines(log) == ["OSError: no file"]

    def test_without_an_exception_the_lines_marked_as_errors_are_shown(self) -> None:
        assert telling_lines("INFO all well\n2026 ERROR raylet: it broke\nINFO bye") == ["2026 ERROR raylet: it broke"]

    def test_without_errors_the_end_is_shown(self) -> None:
        assert telling_lines("one\ntwo\n\nthree\nfour\n\n") == ["two", "three", "four"]
        assert telling_lines("") == []


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return 1


class TestProgress:
    """Progress on terminals and elsewhere."""

    def test_elsewhere_only_changes_are_written_as_plain_lines(self) -> None:
        stream = io.StringIO()
        progress = Progress(stream, iter([0.0, 1.0, 3.0]).__next__)
        progress.update("starting")
        progress.update("starting")
        progress.update("loading")
        progress.say("Ready")
        assert stream.getvalue() == "  [  1 s] starting\n  [  3 s] loading\nReady\n"

    def test_on_a_terminal_one_line_is_rewritten_and_never_wraps(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setattr("os.get_terminal_size", lambda fd: os.terminal_size((40, 24)))
        stream = Terminal()
        progress = Progress(stream)
        progress.update("x" * 100)
        progress.update("y")
        progress.say("Ready")
        lines = stream.getvalue().split("\r\033[K")
        assert len(lines[1]) == 39
        assert "\n" not in "".join(lines[:3])
        assert lines[3] == "Ready\n"

    def test_a_reader_that_went_away_does_no_harm(self) -> None:
        stream = io.StringIO()
        stream.close = lambda: None  # type: ignore[method-assign]
        progress = Progress(stream)
        io.StringIO.close(stream)
        progress.say("Ready")


@pytest.fixture
def spawn() -> Iterator[Callable[[str, str], subprocess.Popen[str]]]:
    """Starts a Python program that carries a run's mark; it says `up` when it has come to its end."""
    with contextlib.ExitStack() as stack:

        def start(run_id: str, program: str) -> subprocess.Popen[str]:
            process = stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", program + "\nprint('up', flush=True)\nimport time\ntime.sleep(600)"],
                    env={**os.environ, launcher.RUN_ID: run_id},
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            stack.callback(process.kill)
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            return process

        yield start


class TestSweep:
    """No process of a run survives it, and no other one is touched."""

    def test_only_the_runs_own_processes_end(self, spawn: Callable[[str, str], subprocess.Popen[str]]) -> None:
        run_id = uuid.uuid4().hex
        own, other = spawn(run_id, ""), spawn(uuid.uuid4().hex, "")
        assert launcher.processes_of(run_id) == [own.pid]
        assert launcher.sweep(run_id) == []
        assert own.wait(timeout=10) == -signal.SIGTERM
        assert other.poll() is None

    def test_one_that_ignores_sigterm_is_killed(self, spawn: Callable[[str, str], subprocess.Popen[str]]) -> None:
        run_id = uuid.uuid4().hex
        process = spawn(run_id, "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)")
        assert launcher.sweep(run_id, term_s=0.1) == []
        assert process.wait(timeout=10) == -signal.SIGKILL

    def test_orphans_in_sessions_of_their_own_are_found(
        self, spawn: Callable[[str, str], subprocess.Popen[str]], tmp_path: Path
    ) -> None:
        run_id = uuid.uuid4().hex
        child = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], {})"
        parent = spawn(run_id, child.format("start_new_session=True, stdout=subprocess.DEVNULL"))
        parent.kill()
        parent.wait(timeout=10)
        assert len(launcher.processes_of(run_id)) == 1
        assert launcher.sweep(run_id) == []
        assert launcher.processes_of(run_id) == []


# Stands in for `serve run CONFIG`: {behaviour} happens after it has left a grandchild in a session of its own.
STAND_IN = """\
#!{python}
import http.server, json, os, signal, subprocess, sys, time
assert sys.argv[1] == "run", sys.argv
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
print("View the dashboard at http://127.0.0.1:4321", flush=True)
POOLS = {{"interactive": {{"replicas": 1, "healthy": 1}}, "batch": {{"replicas": 1, "healthy": 1}}}}
class Handler(http.server.BaseHTTPRequestHandler):
    asked = 0
    def do_GET(self):
        Handler.asked += 1
        ready = Handler.asked > 1
        body = json.dumps({{"ready": ready, "pools": POOLS}}).encode()
        self.send_response(200 if ready else 503)
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args):
        pass
{behaviour}
"""
SERVE_FOREVER = "http.server.HTTPServer(('127.0.0.1', {port}), Handler).serve_forever()"


class Launch:
    """A launcher in a process of its own, as ./scripts/serve starts it, with a stand-in for `serve`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.port = free_port()
        document = minimal_document()
        put(document, "http_options.port", self.port)
        put(document, "applications.0.args.model.source", str(folder))
        self.config = write(folder / "config.yaml", document)
        self.process: subprocess.Popen[str] | None = None

    def start(self, behaviour: str, *arguments: str) -> subprocess.Popen[str]:
        serve = self.folder / "serve"
        serve.write_text(STAND_IN.format(python=sys.executable, behaviour=behaviour.format(port=self.port)))
        serve.chmod(0o755)
        program = (
            "import sys; from scripts import launcher; "
            f"launcher.serve_command = lambda config: [{str(serve)!r}, 'run', str(config)]; "
            "sys.exit(launcher.main(sys.argv[1:]))"
        )
        self.process = subprocess.Popen(
            [sys.executable, "-c", program, str(self.config), *arguments],
            cwd=ROOT,
            env={**os.environ, "SLUICE_CACHE_DIR": str(self.folder / "cache"), "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        return self.process

    def read_until(self, beginning: str) -> str:
        """Reads what it shows up to a line that begins so."""
        assert self.process is not None
        assert self.process.stdout is not None
        shown = ""
        for line in self.process.stdout:
            shown += line
            if line.strip().startswith(beginning):
                return shown
        raise AssertionError(f"it ended without {beginning!r}: {shown}")

    def descendants(self) -> list[psutil.Process]:
        """What it has started and that lives, with the one that is no child of its children any more."""
        assert self.process is not None
        return psutil.Process(self.process.pid).children(recursive=True)


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launch]:
    started = Launch(tmp_path)
    yield started
    if started.process is not None:
        with started.process:
            started.process.kill()


class TestRun:
    """A whole run."""

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
    def test_it_gets_ready_and_ends_on_a_signal_with_everything_it_started(
        self, launch: Launch, number: signal.Signals
    ) -> None:
        process = launch.start(SERVE_FOREVER)
        shown = launch.read_until("With RAY_AUTH_MODE")
        assert f"http://127.0.0.1:{launch.port}\n" in shown
        assert "interactive 1/1, batch 1/1" in shown
        assert "dashboard  http://127.0.0.1:4321" in shown
        descendants = launch.descendants()
        assert len(descendants) == 2
        process.send_signal(number)
        rest, errors = process.communicate(timeout=20)
        assert process.returncode == 0
        assert rest.endswith("Stopped.\n")
        assert errors == ""
        assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in descendants)

    def test_one_that_does_not_stop_is_ended_within_ten_seconds(self, launch: Launch) -> None:
        process = launch.start("signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + SERVE_FOREVER)
        launch.read_until("With RAY_AUTH_MODE")
        descendants = launch.descendants()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=10)
        assert process.returncode == 0
        assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in descendants)

    def test_a_second_signal_ends_the_patience(self, launch: Launch) -> None:
        process = launch.start("signal.signal(signal.SIGINT, signal.SIG_IGN)\n" + SERVE_FOREVER)
        launch.read_until("With RAY_AUTH_MODE")
        process.send_signal(signal.SIGINT)
        launch.read_until("[")
        process.send_signal(signal.SIGINT)
        launch.read_until("Not waiting any longer.")
        process.communicate(timeout=5)
        assert process.returncode == 0

    def test_a_signal_during_the_start_ends_it_too(self, launch: Launch) -> None:
        process = launch.start("time.sleep(600)")
        launch.read_until("[")
        wait_for("the stand-in's child", lambda: len(launch.descendants()) == 2)
        descendants = launch.descendants()
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=20)
        assert process.returncode == 130
        assert not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in descendants)

    def test_the_reason_is_shown_when_serve_dies_during_the_start(self, launch: Launch) -> None:
        process = launch.start("print('app.errors.ConfigError: args: pools.fast: no such pool'); sys.exit(0)")
        _, errors = process.communicate(timeout=20)
        assert process.returncode == 1
        assert errors.splitlines()[:2] == [
            "serve: Ray Serve ended while it was starting:",
            "  args: pools.fast: no such pool",
        ]
        assert "Traceback" not in errors

    def test_the_reason_is_shown_when_the_app_cannot_be_deployed(self, launch: Launch) -> None:
        report = "Deploying app 'sluice' failed with exception:\\nValueError: no room"
        process = launch.start(f'print("{report}", flush=True); time.sleep(600)')
        _, errors = process.communicate(timeout=20)
        assert process.returncode == 1
        assert errors.splitlines()[:2] == ["serve: the app could not be deployed:", "  ValueError: no room"]

    def test_the_end_is_an_error_when_nobody_asked_for_it(self, launch: Launch) -> None:
        behaviour = "import threading; threading.Thread(target={serve}, daemon=True).start(); time.sleep(3)"
        serve = f"http.server.HTTPServer(('127.0.0.1', {launch.port}), Handler).serve_forever"
        process = launch.start(behaviour.replace("{serve}", serve))
        _, errors = process.communicate(timeout=20)
        assert process.returncode == 1
        assert errors.startswith("serve: Ray Serve ended by itself:\n")

    def test_the_start_has_a_deadline(self, launch: Launch) -> None:
        process = launch.start("time.sleep(600)", "--timeout", "1")
        _, errors = process.communicate(timeout=20)
        assert process.returncode == 1
        assert errors.startswith("serve: the app was not ready after 1 s; see the log, or allow more with --timeout:\n")

    def test_mistakes_are_one_sentence_before_anything_starts(self, launch: Launch) -> None:
        with socket.create_server(("127.0.0.1", launch.port)):
            process = launch.start("sys.exit('must not start')")
            shown, errors = process.communicate(timeout=20)
        assert process.returncode == 2
        assert shown == ""
        assert errors == (
            f"serve: {launch.config}: http_options.port: port {launch.port} of 127.0.0.1 is in use; stop what listens "
            "there, or choose another port\n"
        )

    def test_telemetry_is_off_unless_the_caller_decides(self, launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("VLLM_NO_USAGE_STATS", raising=False)
        monkeypatch.setenv("DO_NOT_TRACK", "0")
        process = launch.start(
            "import os; print('ValueError: ' + os.environ['VLLM_NO_USAGE_STATS'] + os.environ['DO_NOT_TRACK'])"
        )
        _, errors = process.communicate(timeout=20)
        assert errors.splitlines()[1] == "  ValueError: 10"


def test_the_environment_for_a_cluster_is_printed_as_shell_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert launcher.main(["--print-environment", "simulated"]) == 0
    printed = capsys.readouterr().out
    script = f"{printed}\nenv"
    told = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout.splitlines()
    environment = dict(line.split("=", 1) for line in told if "=" in line)
    assert environment["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    assert environment["RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"] == "app.api.edge:middlewares"
    wrapper = Path(environment["RAY_SERVE_HAPROXY_BINARY_PATH"])
    assert wrapper.is_file()
    shutil.rmtree(wrapper.parent)
