from __future__ import annotations

from tests.unit.commandline import check_json, dataflex, parsed_once

__all__ = ["check_json", "dataflex", "parsed_once"]
