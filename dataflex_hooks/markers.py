"""The pluggy markers: ``@hookspec`` for the specifications, ``@hookimpl`` for a plugin's methods."""

from __future__ import annotations

import pluggy

GROUP = "dataflex_hooks"
"""The pluggy project name and the entry-point group."""

hookspec = pluggy.HookspecMarker(GROUP)
hookimpl = pluggy.HookimplMarker(GROUP)
