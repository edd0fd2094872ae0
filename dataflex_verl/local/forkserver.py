"""Ray workers that start in a tenth of a second: forked from one process that has already imported the trainer stack.

A verl run needs eight processes one after another and each spends 5-10 CPU seconds importing torch, transformers, Ray
and verl. This file is the ``py_executable`` of the local backend's Ray runtime environment. Ray starts it once a
worker, in place of Python, with the worker's command line; it hands that, its environment, directory and standard
streams to the fork server and waits for the child. The first call starts the server, which ends itself when idle.

Run as a script it uses the standard library only, so that a call costs milliseconds. If the server cannot be reached,
the worker starts in the ordinary way.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time

PRELOAD = (
    "verl",
    "verl.trainer.ppo.v1",
    "verl.workers.engine_workers",
    "verl.workers.engine.fsdp",
    "dataflex_verl.local.rollout",
)
IDLE_SECONDS = 20.0
_START_SECONDS = 120.0
_STREAMS = 3
_LONGEST_MESSAGE = 1 << 22


def py_executable() -> str:
    """The command for Ray's ``runtime_env.py_executable``: this file under this interpreter, isolated and bare."""
    return f"{sys.executable} -I -S {os.path.abspath(__file__)}"


def socket_path() -> str:
    """One server per user, interpreter and code version, in a directory only that user can enter."""
    tag = f"{abs(hash_text(sys.executable + os.path.abspath(__file__) + _fingerprint())):x}"
    directory = os.path.join(os.environ.get("TMPDIR", "/tmp"), f"dataflex-{os.getuid()}")
    os.makedirs(directory, mode=0o700, exist_ok=True)
    if os.stat(directory).st_uid != os.getuid():
        raise PermissionError(f"{directory} belongs to another user")
    return os.path.join(directory, f"fork-{tag}.sock")


def hash_text(text: str) -> int:
    """A stable 64-bit hash (``hash()`` differs between processes)."""
    value = 14695981039346656037
    for byte in text.encode():
        value = ((value ^ byte) * 1099511628211) & 0xFFFFFFFFFFFFFFFF
    return value


def _fingerprint() -> str:
    """Changes when code that the server has preloaded changes, so that a stale server is never asked."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    stamps = []
    for package in ("dataflex_verl", "dataflex_hooks"):
        for directory, _, files in os.walk(os.path.join(root, package)):
            stamps += [
                f"{name}:{os.stat(os.path.join(directory, name)).st_mtime_ns}" for name in files if name.endswith(".py")
            ]
    settings = [f"{name}={os.environ.get(name, '')}" for name in ("VERL_PLATFORM", "PYTHONPATH", "VERL_LOGGING_LEVEL")]
    return "|".join(sorted(stamps) + settings)


# ---------------------------------------------------------------- client


def start_server() -> str:
    """Start the server unless one is there and return its socket path. Returns at once: preloading goes on behind."""
    path = socket_path()
    with open(f"{path}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _alive(path):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)
            with open(f"{path}.log", "w") as log:
                subprocess.Popen(
                    [sys.executable, "-W", "ignore", os.path.abspath(__file__), "--serve", path],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            deadline = time.monotonic() + 10
            while not _alive(path) and time.monotonic() < deadline:
                time.sleep(0.02)
    return path


def _alive(path: str) -> bool:
    try:
        with socket.socket(socket.AF_UNIX) as probe:
            probe.connect(path)
            return True
    except OSError:
        return False


def run_worker(arguments: list[str]) -> int:
    """Have the server fork a process for ``arguments`` and wait for it. Returns its exit status."""
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(_START_SECONDS)
    connection.connect(start_server())
    request = json.dumps({"arguments": arguments, "environment": dict(os.environ), "directory": os.getcwd()}).encode()
    streams = array.array("i", range(_STREAMS))
    connection.sendmsg([len(request).to_bytes(4, "big")], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams.tobytes())])
    connection.sendall(request)
    child = int(_receive(connection, 8).decode())
    # Ray may stop a worker through the process it started; that is this one.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda signum, frame: os.kill(child, signum))
    connection.settimeout(None)
    try:
        return int(_receive(connection, 8).decode())
    except ConnectionError:
        # Ray ends everything it started when a job is over, the server included; the child is gone as well.
        return 1


def _receive(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("the fork server closed the connection")
        data += part
    return data


# ---------------------------------------------------------------- server


def serve(path: str) -> None:
    """Preload, then fork a child per request until idle for ``IDLE_SECONDS`` with no child left."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    _preload()
    children: dict[int, socket.socket] = {}
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda signum, frame: None)
    last_use = time.monotonic()
    while children or time.monotonic() - last_use < IDLE_SECONDS:
        ready, _, _ = select.select([listener, wake_read], [], [], 1.0)
        if wake_read in ready:
            os.read(wake_read, 4096)
        last_use = time.monotonic() if _reap(children) or listener in ready else last_use
        if listener in ready:
            connection, _ = listener.accept()
            pid = _answer(connection, [listener, *children.values()])
            if pid is None:
                connection.close()
            else:
                children[pid] = connection
    os.unlink(path)


def _preload() -> None:
    import gc
    import importlib

    for name in PRELOAD:
        importlib.import_module(name)
    # Shared pages stay shared: the collector would otherwise write to every object's header in every child.
    gc.collect()
    gc.freeze()


def _reap(children: dict[int, socket.socket]) -> bool:
    reaped = False
    while children:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if pid == 0:
            break
        connection = children.pop(pid, None)
        reaped = True
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.sendall(f"{os.waitstatus_to_exitcode(status):8d}".encode())
            connection.close()
    return reaped


def _answer(connection: socket.socket, inherited: list[socket.socket]) -> int | None:
    """Read one request and fork for it. A connection without a request is only somebody asking whether we live."""
    connection.settimeout(5.0)
    try:
        space = socket.CMSG_SPACE(_STREAMS * array.array("i").itemsize)
        head, ancillary, _, _ = connection.recvmsg(4, space)
        if len(head) < 4 or not ancillary:
            return None
        size = int.from_bytes(head, "big")
        if size > _LONGEST_MESSAGE:
            return None
        request = json.loads(_receive(connection, size))
    except (OSError, ValueError):
        return None
    streams = array.array("i")
    streams.frombytes(ancillary[0][2][: _STREAMS * streams.itemsize])
    pid = os.fork()
    if pid == 0:
        for other in inherited:
            other.close()
        connection.close()
        _become_worker(request, list(streams))
    for stream in streams:
        os.close(stream)
    with contextlib.suppress(OSError):
        connection.sendall(f"{pid:8d}".encode())
    return pid


def _become_worker(request: dict, streams: list[int]) -> None:
    """In the child: take over the caller's streams, environment and command line. Never returns."""
    import random
    import runpy
    import traceback

    status = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for target, stream in enumerate(streams):
            os.dup2(stream, target)
            os.close(stream)
        os.chdir(request["directory"])
        os.environ.clear()
        os.environ.update(request["environment"])
        # Forked generators would otherwise produce the same "random" names in every worker.
        random.seed()
        arguments = [a for a in request["arguments"] if a != "-u"]
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")
        status = 0
    except SystemExit as exc:
        status = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def main() -> None:
    arguments = sys.argv[1:]
    if arguments[:1] == ["--serve"]:
        # Started as a script, the directory of this file leads sys.path; its module names would shadow others.
        sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != os.path.dirname(__file__)]
        serve(arguments[1])
        return
    try:
        status = run_worker(arguments)
    except (OSError, ValueError) as exc:
        print(f"dataflex fork server not usable ({exc}); starting the worker the slow way", file=sys.stderr)
        os.execv(sys.executable, [sys.executable, *arguments])
    sys.exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    main()
