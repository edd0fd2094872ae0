from __future__ import annotations

import pytest

from tests.unit.commandline import dataflex

pytest.importorskip("pyarrow", reason="needs pyarrow: pip install 'dataflex-verl[analysis]'")

__all__ = ["dataflex"]
