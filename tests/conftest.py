"""Shared by all tests. The environment must stand before anything imports verl."""

from __future__ import annotations

import os
import tempfile

from dataflex_verl.local.settings import local_environment

for _name, _value in local_environment().items():
    os.environ.setdefault(_name, _value)
os.environ.setdefault("RAY_TMPDIR", tempfile.mkdtemp(prefix="dfray-", dir="/tmp"))
