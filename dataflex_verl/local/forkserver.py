"""Ray workers that start in a tenth of a second: forked from one process that has already imported the trainer stack.

A verl run needs eight processes one after another and each spends 5-10 CPU seconds importing torch, transformers, Ray
and verl. This file is the ``py_executable`` of the local backend's Ray runtime environment. Ray starts it once a
worker, in place of Python, with the worker's command line; it hands that, its environment, directory and standard
streams to the fork server (``forkserver_process.py``) and waits for the child.

Every job has a server of its own, which ends with its owner: the driver, if that called :func:`start_server`, else the
raylet whose first worker needed one. Jobs, users and interpreters therefore share nothing. A server is asked only by
workers whose code and import-time environment equal its own, and if it cannot be used for any reason, the worker
starts in the ordinary way.

Standard library only, and no import of this package: run as a script, a call costs milliseconds.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import hashlib
import json
import os
import shlex
import shutil
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Mapping

OWNER = "DATAFLEX_FORK_OWNER"
PRELOAD = "DATAFLEX_FORK_PRELOAD"
STREAMS = 3
_ANSWER_SECONDS = 120.0
_LONGEST_PATH = 100  # the kernel's limit for a socket is 108 bytes
# Read while modules are imported, so a server that was preloaded with other values must not serve the worker.
_IMPORT_TIME = ("PYTHON", "LD_", "DYLD_", "HF_", "TRANSFORMERS_", "TORCH", "VERL_", "TQ_", "MKL_", "KMP_", "OPENBLAS_")
# Set by Ray, torch or verl after the server started, and read late.
_READ_LATE = ("PYTHONBREAKPOINT", "TORCHINDUCTOR_CACHE_DIR", "VERL_FULL_DETERMINISM", "VERL_RL_INSIGHT_ENABLE")


def py_executable() -> str:
    """The command for Ray's ``runtime_env.py_executable``: this file under this interpreter, isolated and bare."""
    return f"{shlex.quote(sys.executable)} -I -S {shlex.quote(os.path.abspath(__file__))}"


def is_wanted(command: list[str]) -> bool:
    """Whether a process's command line gives Ray this file as ``py_executable``: a driver that will need a server."""
    name = os.path.basename(__file__)
    return any("py_executable=" in part and name in part for part in command)


def start_server() -> None:
    """Start the server of a job whose driver is this process, so that it preloads while the driver starts Ray.

    Workers find it through an environment variable that this sets, which Ray's processes inherit. Does nothing where
    an ancestor has done so already. Returns at once: preloading goes on behind.

    Raises:
        OSError: no server could be started. Workers then start by other means.
    """
    owner = os.environ.get(OWNER, "")
    if owner.isdigit() and process_exists(int(owner)) and _alive(socket_path(int(owner), os.environ)):
        return
    _start(socket_path(os.getpid(), os.environ), os.getpid())
    os.environ[OWNER] = str(os.getpid())


def socket_path(owner: int, environment: Mapping[str, str], job: str = "") -> str:
    """Where the server for this owner, interpreter, code and import-time environment listens.

    Args:
        owner: process with which the server ends.
        environment: of the worker.
        job: Ray's id of the job, as far as known when the server is started.

    Raises:
        PermissionError: others could enter the directory.
    """
    base = os.environ.get("TMPDIR") or "/tmp"
    name = os.path.join(f"dataflex-{os.getuid()}", str(owner), f"{_key(environment, job)}.sock")
    if len(os.path.join(base, name).encode()) > _LONGEST_PATH:
        base = "/tmp"
    home = os.path.join(base, f"dataflex-{os.getuid()}")
    os.makedirs(home, mode=0o700, exist_ok=True)
    status = os.lstat(home)
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode) or status.st_mode & 0o077:
        raise PermissionError(f"{home} is open to other users")
    os.makedirs(os.path.join(home, str(owner)), mode=0o700, exist_ok=True)
    return os.path.join(base, name)


def _key(environment: Mapping[str, str], job: str) -> str:
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    parts = [sys.executable, root, job]
    for package in ("dataflex_verl", "dataflex_hooks"):
        for directory, _, files in sorted(os.walk(os.path.join(root, package))):
            for name in sorted(files):
                if name.endswith(".py"):
                    parts.append(f"{name}:{os.stat(os.path.join(directory, name)).st_mtime_ns}")
    names = sorted(name for name in environment if name.startswith((*_IMPORT_TIME, PRELOAD)))
    parts += [f"{name}={environment[name]}" for name in names if name not in _READ_LATE]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def process_exists(pid: int) -> bool:
    """Whether ``pid`` runs; a zombie does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return True


def _start(path: str, owner: int) -> None:
    """Start the server at ``path`` unless one is there or was there and died; return once it can be connected to."""
    _remove_stale(os.path.dirname(os.path.dirname(path)))
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _alive(path):
            return
        if os.path.exists(path) and not os.path.exists(f"{path}.ready"):
            raise ConnectionError(f"the fork server ended while it preloaded; see {path}.log")
        for left in (path, f"{path}.ready"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(left)
        server = os.path.join(os.path.dirname(os.path.abspath(__file__)), "forkserver_process.py")
        command = [sys.executable, server, path, str(owner)]
        with open(f"{path}.log", "w") as log:
            status = subprocess.call(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        if status:
            raise ConnectionError(f"no fork server came up; see {path}.log")


def _remove_stale(home: str) -> None:
    """Remove what servers left that were killed: the directories of owners that are gone."""
    for name in os.listdir(home):
        if name.isdigit() and not process_exists(int(name)):
            shutil.rmtree(os.path.join(home, name), ignore_errors=True)


def _alive(path: str) -> bool:
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(path)
            return True
    except OSError:
        return False


def run_worker(arguments: list[str]) -> int:
    """Have the server fork a process for ``arguments`` and wait for it. Returns its exit status.

    Raises:
        OSError: no server can be used; nothing was started.
    """
    # Ray may stop a worker through the process it started; that is this one.
    passed_on = (signal.SIGTERM, signal.SIGINT)
    signal.pthread_sigmask(signal.SIG_BLOCK, passed_on)
    try:
        connection, child = _fork(arguments)
        for number in passed_on:
            signal.signal(number, lambda signum, frame: _forward(child, signum))
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, passed_on)
    connection.settimeout(None)
    try:
        return int(receive(connection, 8))
    except ConnectionError:
        # The server was killed, and its children with it.
        return 1


def _fork(arguments: list[str]) -> tuple[socket.socket, int]:
    """Ask the driver's server, else that of the raylet and job, which is started if need be."""
    owner = os.environ.get(OWNER, "")
    if owner.isdigit() and process_exists(int(owner)):
        with contextlib.suppress(OSError):
            return _request(socket_path(int(owner), os.environ), arguments)
    raylet = os.getppid()
    # A client whose raylet has ended is a child of init, and a server of init's would never end.
    if raylet == 1 or not process_exists(raylet):
        raise ConnectionError("Ray has ended")
    path = socket_path(raylet, os.environ, job=os.environ.get("RAY_JOB_ID", ""))
    _start(path, raylet)
    return _request(path, arguments)


def _request(path: str, arguments: list[str]) -> tuple[socket.socket, int]:
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(_ANSWER_SECONDS)
    connection.connect(path)
    request = {"arguments": arguments, "environment": dict(os.environ), "directory": os.getcwd()}
    body = json.dumps(request).encode(errors="surrogateescape")
    streams = array.array("i", range(STREAMS))
    connection.sendmsg([len(body).to_bytes(4, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams.tobytes())])
    connection.sendall(body)
    return connection, int(receive(connection, 8))


def _forward(child: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signum)


def receive(connection: socket.socket, size: int) -> bytes:
    """Read exactly ``size`` bytes.

    Raises:
        ConnectionError: the other side closed before that.
    """
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("the fork server closed the connection")
        data += part
    return data


def main() -> None:
    """Run a worker through the server, or in the ordinary way."""
    arguments = sys.argv[1:]
    try:
        status = run_worker(arguments)
    except (OSError, ValueError) as exc:
        print(f"dataflex fork server not usable ({exc}); starting the worker the slow way", file=sys.stderr)
        os.execv(sys.executable, [sys.executable, *arguments])
    if status < 0:
        # End as the child did, so that Ray sees the signal.
        with contextlib.suppress(OSError):  # no handler stands before SIGKILL
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    main()
