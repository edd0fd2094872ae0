from __future__ import annotations

from tests.unit.commandline import dataflex, parsed_once

__all__ = ["dataflex", "parsed_once"]
