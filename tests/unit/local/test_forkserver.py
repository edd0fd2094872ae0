"""The fork server: real processes, with a preload that costs nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from dataflex_verl.local import forkserver

CLIENT = [sys.executable, "-I", "-S", forkserver.__file__]


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory for sockets and scripts. Servers of the test belong to this process and end with the test."""
    # pytest's own would make the socket's path too long.
    directory = Path(tempfile.mkdtemp(prefix="fork-", dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(directory))
    monkeypatch.setenv(forkserver.PRELOAD, "json numpy")
    monkeypatch.delenv(forkserver.OWNER, raising=False)
    monkeypatch.chdir(directory)
    yield directory
    for process in servers(directory):
        process.kill()
    shutil.rmtree(directory)


def servers(directory: Path) -> list[psutil.Process]:
    """Servers and their children whose socket is below ``directory``."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        command = process.info["cmdline"] or []
        if len(command) > 2 and "forkserver_process" in command[1] and command[2].startswith(str(directory)):
            found.append(process)
    return found


def wait_until(condition, seconds: float = 10.0):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.02)
    return value


def script(directory: Path, text: str) -> str:
    path = directory / f"worker{len(list(directory.glob('worker*')))}.py"
    path.write_text(text)
    return str(path)


def run(*arguments: str, **kwargs) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*CLIENT, *arguments], capture_output=True, text=True, timeout=30, **kwargs)


def start(*arguments: str, **kwargs) -> subprocess.Popen[str]:
    return subprocess.Popen([*CLIENT, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs)


SHOW = """
import json, os, random, sys, threading
import numpy
print(json.dumps({
    "argv": sys.argv, "directory": os.getcwd(), "mark": os.environ.get("MARK"), "names": sorted(os.environ),
    "parent": os.getppid(), "pid": os.getpid(), "random": random.random(), "numpy": numpy.random.rand(),
    "name": __name__, "path": sys.path[0], "descriptors": len(os.listdir("/proc/self/fd")),
    "input": sys.stdin.read(),
}))
"""


def test_worker_gets_command_line_environment_directory_and_streams(place):
    forkserver.start_server()
    path = script(place, SHOW)
    (place / "sub").mkdir()
    environment = {**os.environ, "MARK": "here"}
    answers = [
        json.loads(run("-u", path, "a b", "--c", env=environment, cwd=place / "sub", input="typed").stdout)
        for _ in range(2)
    ]
    first, second = answers
    assert first["argv"] == [path, "a b", "--c"]
    assert first["directory"] == str(place / "sub")
    assert (first["mark"], first["input"], first["name"], first["path"]) == ("here", "typed", "__main__", str(place))
    assert set(first["names"]) - set(environment) <= {"LC_CTYPE"}
    assert first["parent"] == second["parent"] and first["pid"] != second["pid"]
    assert first["random"] != second["random"] and first["numpy"] != second["numpy"]
    assert first["descriptors"] == second["descriptors"] == 4  # three streams and the listing itself


@pytest.mark.parametrize(
    ("text", "status", "message"),
    [
        ("pass", 0, ""),
        ("import sys; sys.exit(3)", 3, ""),
        ("import sys; sys.exit('went wrong')", 1, "went wrong"),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9, ""),
        ("import atexit; atexit.register(print, 'at the end')", 0, ""),
    ],
)
def test_worker_ends_as_an_ordinary_process_would(place, text, status, message):
    forkserver.start_server()
    path = script(place, text)
    result = run(path)
    ordinary = subprocess.run([sys.executable, path], capture_output=True, text=True)
    assert (result.returncode, result.stdout) == (ordinary.returncode, ordinary.stdout) == (status, ordinary.stdout)
    assert message in result.stderr


def test_a_signal_to_a_workers_process_group_reaches_no_other(place):
    forkserver.start_server()
    path = script(place, "import os, sys; print(os.getpgid(0), flush=True); sys.stdin.read()")
    clients = [start(path, stdin=subprocess.PIPE) for _ in range(2)]
    first, second = (int(client.stdout.readline()) for client in clients)
    os.killpg(first, signal.SIGKILL)
    assert clients[0].wait(timeout=10) == -signal.SIGKILL
    assert clients[1].communicate("", timeout=10) == ("", "") and clients[1].returncode == 0
    clients[0].communicate()
    assert len(servers(place)) == 1


def test_workers_run_side_by_side_and_leave_no_zombie(place):
    forkserver.start_server()
    path = script(place, "import time; time.sleep(0.3); print('done')")
    clients = [start(path) for _ in range(5)]
    assert [client.communicate(timeout=30)[0] for client in clients] == ["done\n"] * 5
    (server,) = servers(place)
    assert server.children() == []


def test_server_ends_with_its_owner_and_removes_its_files(place):
    program = (
        "from dataflex_verl.local import forkserver as f; import os, subprocess, sys\n"
        "f.start_server(); print(os.environ[f.OWNER])\n"
        f"subprocess.run({CLIENT + [script(place, 'print(1)')]!r})"
    )
    owner = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert owner.stdout.split()[-1] == "1" and owner.stderr == ""
    wait_until(lambda: not servers(place))
    assert list(place.glob("dataflex-*/*")) == []


def test_server_outlives_its_owner_while_a_worker_runs(place):
    path = script(place, "import time; print('up', flush=True); time.sleep(1.2); print('done')")
    program = (
        "from dataflex_verl.local import forkserver as f; import subprocess, sys; f.start_server()\n"
        f"p = subprocess.Popen({CLIENT + [path]!r}, stdout=open('out', 'w'))\n"
        "while 'up' not in open('out').read(): pass"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)
    wait_until(lambda: "done" in (place / "out").read_text())
    wait_until(lambda: not servers(place))


def test_first_worker_starts_a_server_that_ends_with_the_parent_of_the_worker(place):
    path = script(place, SHOW)
    program = (
        "import json, os, subprocess, sys\n"
        f"run = lambda: subprocess.run({CLIENT + [path]!r}, capture_output=True, text=True, stdin=subprocess.DEVNULL)\n"
        "print(*[json.loads(run().stdout)['parent'] for _ in range(2)])"
    )
    raylet = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    first, second = raylet.stdout.split()
    assert first == second
    wait_until(lambda: not servers(place))


def test_a_worker_whose_raylet_has_ended_starts_no_server(place, monkeypatch):
    monkeypatch.setattr(os, "getppid", lambda: 1)
    with pytest.raises(ConnectionError, match="Ray has ended"):
        forkserver.run_worker([script(place, "")])
    assert servers(place) == []


def test_worker_ends_when_its_client_is_killed(place):
    forkserver.start_server()
    client = start(script(place, "import os, time; print(os.getpid(), flush=True); time.sleep(60)"))
    worker = psutil.Process(int(client.stdout.readline()))
    client.kill()
    client.communicate()
    wait_until(lambda: not worker.is_running())


@pytest.mark.parametrize("by_driver", [True, False])
def test_termination_is_passed_on_to_the_worker(place, by_driver):
    if by_driver:
        forkserver.start_server()
    text = "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *a: sys.exit(7))\nprint(1, flush=True)\n"
    client = start(script(place, text + "time.sleep(60)"))
    client.stdout.readline()
    client.send_signal(signal.SIGTERM)
    client.communicate(timeout=10)
    assert client.returncode == 7


def test_workers_end_when_the_server_is_killed_and_the_next_one_gets_a_new_server(place):
    forkserver.start_server()
    client = start(script(place, "import os, time; print(os.getpid(), flush=True); time.sleep(60)"))
    worker = psutil.Process(int(client.stdout.readline()))
    worker.parent().kill()
    assert client.wait(timeout=10) == 1
    wait_until(lambda: not worker.is_running())
    client.communicate()
    result = run(script(place, "print('again')"))
    assert (result.stdout, result.stderr) == ("again\n", "")


def test_a_module_that_cannot_be_preloaded_is_left_to_the_worker(place, monkeypatch):
    monkeypatch.setenv(forkserver.PRELOAD, "no_such_module json")
    forkserver.start_server()
    result = run(script(place, "import sys; print('json' in sys.modules)"))
    assert (result.stdout, result.stderr) == ("True\n", "")


def test_workers_start_the_ordinary_way_when_the_server_dies_of_its_preload(place, monkeypatch):
    (place / "deadly.py").write_text("import os; os._exit(9)")
    monkeypatch.setenv("PYTHONPATH", str(place))
    monkeypatch.setenv(forkserver.PRELOAD, "deadly")
    path = script(place, "import sys; print('ran', sys.argv[1:])")
    for _ in range(2):
        result = run("-u", path, "x")
        assert (result.returncode, result.stdout) == (0, "ran ['x']\n")
        assert "starting the worker the slow way" in result.stderr
    assert servers(place) == []


def test_workers_start_the_ordinary_way_without_a_private_directory(place):
    (place / f"dataflex-{os.getuid()}").mkdir(mode=0o777)
    (place / f"dataflex-{os.getuid()}").chmod(0o777)
    result = run(script(place, "print('ran')"))
    assert result.stdout == "ran\n"
    assert "open to other users" in result.stderr


def test_a_worker_with_another_import_time_environment_gets_another_server(place):
    forkserver.start_server()
    path = script(place, SHOW)
    parents = [
        json.loads(run(path, env={**os.environ, **extra}, input="").stdout)["parent"]
        for extra in ({}, {"RANK": "1"}, {"HF_HOME": "/elsewhere"}, {"HF_HOME": "/elsewhere"})
    ]
    assert parents[0] == parents[1] != parents[2] == parents[3]


def test_every_job_gets_a_server(place):
    forkserver.start_server()
    path = script(place, SHOW)
    parents = [
        json.loads(run(path, env={**os.environ, "RAY_JOB_ID": job}, input="").stdout)["parent"]
        for job in ("01", "02", "01", "02")
    ]
    assert parents[:2] == parents[2:] and len(set(parents)) == 2


def test_key_follows_code_interpreter_and_import_time_environment(place, monkeypatch):
    copy = place / "dataflex_verl" / "local" / "forkserver.py"
    copy.parent.mkdir(parents=True)
    copy.touch()
    monkeypatch.setattr(forkserver, "__file__", str(copy))

    def key(**environment):
        return forkserver.socket_path(1, environment)

    before = key()
    assert key(RANK="3", RAY_JOB_ID="1", OMP_NUM_THREADS="4", PYTHONBREAKPOINT="x") == before
    assert len({before, *(key(**{name: "1"}) for name in ("VERL_X", "HF_HUB_OFFLINE", "PYTHONPATH", "TQ_X"))}) == 5
    os.utime(copy, ns=(1, 1))
    changed = key()
    monkeypatch.setattr(sys, "executable", "/another/python")
    assert len({before, changed, key()}) == 3


def test_server_of_an_ancestor_is_shared(place):
    forkserver.start_server()
    program = "from dataflex_verl.local import forkserver as f; import os; f.start_server(); print(os.environ[f.OWNER])"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(result.stdout) == os.getpid()
    assert len(servers(place)) == 1


def test_files_of_owners_that_are_gone_are_removed(place):
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    home = place / f"dataflex-{os.getuid()}"
    home.mkdir(mode=0o700)
    (home / str(gone.pid)).mkdir()
    (home / "other").mkdir()
    forkserver.start_server()
    assert {path.name for path in home.iterdir()} == {"other", str(os.getpid())}


def test_a_path_too_long_for_a_socket_is_moved_to_tmp(place, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(place / ("x" * 90)))
    # An owner that no process can be: this one may have a server, whose directory is not ours to remove.
    path = Path(forkserver.socket_path(2**30, os.environ))
    path.parent.rmdir()
    assert path.is_relative_to(f"/tmp/dataflex-{os.getuid()}/{2**30}")


def test_only_drivers_whose_command_names_the_server_want_one():
    command = ["python", "-m", "verl.trainer.main_ppo", f"a.py_executable='{forkserver.py_executable()}'"]
    assert forkserver.is_wanted(command)
    assert not forkserver.is_wanted(command[:3])
    assert not forkserver.is_wanted([sys.executable, forkserver.__file__, "default_worker.py"])


def test_command_survives_spaces_in_paths(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/a b/python")
    assert forkserver.py_executable().startswith("'/a b/python' -I -S ")
