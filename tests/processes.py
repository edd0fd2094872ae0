"""Whether a process has ended."""

from __future__ import annotations

import time

import psutil


def ends(pid: int, within: float = 30.0) -> bool:
    """Wait for a process to end. One that nobody has collected yet (a zombie) has ended."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.1)
    return False
