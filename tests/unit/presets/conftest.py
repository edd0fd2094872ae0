from __future__ import annotations

from tests.unit.commandline import check_json, dataflex, parsed_once, yaml_file

__all__ = ["check_json", "dataflex", "parsed_once", "yaml_file"]
