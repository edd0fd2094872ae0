"""The fork server: preloads the trainer stack, then forks a Ray worker per request until its owner is gone.

Started as a script by ``forkserver.py``, which explains the whole.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import socket
import sys
import time
import traceback
from typing import Any, NoReturn

# As a script, this file's directory leads sys.path, and its module names would shadow others. The package's root is
# added last: the workers' own path comes from Ray.
_HERE = os.path.dirname(os.path.abspath(__file__))
if __name__ == "__main__":
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != _HERE]
    sys.path.append(os.path.dirname(os.path.dirname(_HERE)))

from dataflex_verl.local.forkserver import PRELOAD, STREAMS, process_exists, receive  # noqa: E402
from dataflex_verl.local.preload import EARLY_PRELOAD, RAY_PRELOAD, Job, preload  # noqa: E402

_LOOK_SECONDS = 0.5
_LONGEST_MESSAGE = 1 << 22
_PR_SET_PDEATHSIG = 1


def serve(listener: socket.socket, path: str, owner: int) -> None:
    """Preload, then fork a child per request until ``owner`` and all children are gone."""
    chosen = os.environ.get(PRELOAD)
    preload(EARLY_PRELOAD if chosen is None else chosen.split())
    job = Job(() if chosen is not None else RAY_PRELOAD)
    open(f"{path}.ready", "w").close()
    children: dict[int, socket.socket] = {}
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda signum, frame: None)
    ends = _ends_with(owner)
    while children or process_exists(owner):
        waiting = [] if children else ends
        ready, _, _ = select.select([listener, wake_read, *children.values(), *waiting], [], [], _LOOK_SECONDS)
        if wake_read in ready:
            os.read(wake_read, 4096)
        _reap(children)
        for pid, connection in children.items():
            # A client says nothing more, so this is its end: it was killed, and its worker must not outlive it.
            if connection in ready:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if listener in ready:
            connection, _ = listener.accept()
            pid = _answer(connection, job, [listener, *children.values()], [wake_read, wake_write, *ends])
            if pid is None:
                connection.close()
            else:
                children[pid] = connection
    shutil.rmtree(os.path.dirname(path), ignore_errors=True)


def _ends_with(owner: int) -> list[int]:
    """A descriptor that becomes readable when ``owner`` ends, where the system has one."""
    try:
        return [os.pidfd_open(owner)]
    except (AttributeError, OSError):
        return []


def _reap(children: dict[int, socket.socket]) -> None:
    while children:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            break
        if pid == 0:
            break
        connection = children.pop(pid, None)
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.sendall(f"{os.waitstatus_to_exitcode(status):8d}".encode())
            connection.close()


def _answer(connection: socket.socket, job: Job, sockets: list[socket.socket], descriptors: list[int]) -> int | None:
    """Read one request and fork for it. A connection without a request is only somebody asking whether we live.

    Args:
        connection: to the client.
        job: whose workers may be forked.
        sockets: of the server, closed in the child.
        descriptors: of the server, closed in the child.
    """
    connection.settimeout(5.0)
    streams = array.array("i")
    try:
        space = socket.CMSG_SPACE(STREAMS * streams.itemsize)
        head, ancillary, _, _ = connection.recvmsg(4, space)
        for _, _, data in ancillary:
            streams.frombytes(data[: len(data) - len(data) % streams.itemsize])
        size = int.from_bytes(head, "big")
        if len(head) < 4 or len(streams) != STREAMS or size > _LONGEST_MESSAGE:
            return None
        request = json.loads(receive(connection, size))
        if not job.admits(request["environment"]):
            return None
        pid = os.fork()
        if pid == 0:
            _become_worker(request, list(streams), [*sockets, connection], descriptors)
    except (OSError, ValueError):
        return None
    finally:
        for stream in streams:
            os.close(stream)
    with contextlib.suppress(OSError):
        connection.sendall(f"{pid:8d}".encode())
    return pid


def _become_worker(
    request: dict[str, Any], streams: list[int], sockets: list[socket.socket], descriptors: list[int]
) -> NoReturn:
    """In the child: leave the server's things, take over the caller's streams, environment and command line."""
    import runpy

    status = 1
    try:
        # Ray ends a worker by a signal to its process group, which must not be that of its siblings.
        os.setpgid(0, 0)
        signal.set_wakeup_fd(-1)
        for one in sockets:
            one.close()
        for descriptor in descriptors:
            os.close(descriptor)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        for target, stream in enumerate(streams):
            os.dup2(stream, target)
            os.close(stream)
        os.chdir(request["directory"])
        os.environ.clear()
        os.environ.update(request["environment"])
        if hasattr(time, "tzset"):
            time.tzset()
        _refresh()
        arguments = [a for a in request["arguments"] if a != "-u"]
        if arguments != request["arguments"]:
            sys.stdout.reconfigure(write_through=True)  # type: ignore[union-attr]
            sys.stderr.reconfigure(write_through=True)  # type: ignore[union-attr]
        sys.argv = arguments
        sys.path.insert(0, os.path.dirname(arguments[0]))
        runpy.run_path(arguments[0], run_name="__main__")
        status = 0
    except SystemExit as exc:
        status = exc.code if isinstance(exc.code, int) else int(exc.code is not None)
        if isinstance(exc.code, str):
            print(exc.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        _end(status)


def _refresh() -> None:
    """Give the child what a fresh process takes from chance and from its environment."""
    import random

    random.seed()
    if "ray._raylet" in sys.modules:
        # Reads the RAY_ variables again, token authentication among them.
        sys.modules["ray._raylet"].Config.initialize("")
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(int(threads) if threads.isdigit() else os.cpu_count() or 1)


def _end(status: int) -> NoReturn:
    """What the interpreter does at its end, up to taking modules apart."""
    import atexit
    import threading

    with contextlib.suppress(BaseException):
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    with contextlib.suppress(BaseException):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status & 0xFF)


def main() -> None:
    """Listen, leave the caller and serve. Arguments: the socket's path and the owner's process id."""
    path, owner = sys.argv[1], int(sys.argv[2])
    # A client blocks signals while it waits, and workers would inherit that.
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    # Nobody has to wait for this process later, and the caller can connect from now on.
    if os.fork():
        os._exit(0)
    serve(listener, path, owner)


if __name__ == "__main__":
    main()
