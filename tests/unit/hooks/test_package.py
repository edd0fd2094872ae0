"""The package as a whole: what it imports, what it exports, what its specifications say."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pluggy
import pytest

import dataflex_hooks
from dataflex_hooks import hookspecs
from dataflex_hooks.decisions import DECISION_OF

PACKAGE = Path(dataflex_hooks.__file__).parent
HOSTS = {"verl", "ray", "transfer_queue", "tensordict"}
ALLOWED = {"torch", "numpy", "pluggy", "omegaconf", "dataflex_hooks"}
ANALYSIS = {"decision_log": {"pyarrow"}, "whatif": {"pyarrow"}}
"""What rooms that need the extra ``analysis`` import besides; nothing else imports them before they are asked for."""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent, timeout=120, check=False
    )


def test_importing_the_package_imports_no_host():
    code = (
        "import sys, dataflex_hooks\n"
        "dataflex_hooks.REGISTRY.names('scorer')\n"
        "import dataflex_hooks.plugins.select, dataflex_hooks.plugins.reweight\n"
        f"print(sorted({HOSTS!r} & set(sys.modules)))"
    )
    result = run(code)
    assert (result.returncode, result.stdout.strip()) == (0, "[]"), result.stderr


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_file_imports_anything_but_the_declared_packages(path):
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            imported.add(str(node.module).split(".")[0])
    more = ANALYSIS.get(path.relative_to(PACKAGE).parts[0], set())
    assert imported <= ALLOWED | more | set(sys.stdlib_module_names)


def test_the_package_loads_what_only_the_extra_brings_when_it_is_asked_for():
    done = run("import sys, dataflex_hooks, dataflex_hooks.manager\nprint('pyarrow' in sys.modules)")
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr


def test_without_torch_the_import_says_what_to_install():
    code = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch':\n"
        "            raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')\n"
        "sys.meta_path.insert(0, Block())\n"
        "import dataflex_hooks\n"
    )
    result = run(code)
    assert result.returncode == 1
    assert result.stderr.strip().splitlines()[-1] == (
        "ImportError: dataflex_hooks needs PyTorch. Install the build for your machine, e.g.: pip install torch"
    )


def test_every_exported_name_is_there():
    assert sorted(dataflex_hooks.__all__, key=str.lower) == sorted(set(dataflex_hooks.__all__), key=str.lower)
    for name in dataflex_hooks.__all__:
        assert getattr(dataflex_hooks, name) is not None
    assert (PACKAGE / "py.typed").exists()


def test_hook_table_agrees_with_the_specifications():
    manager = pluggy.PluginManager("dataflex_hooks")
    manager.add_hookspecs(hookspecs)
    specified = {name: tuple(caller.spec.argnames) for name, caller in vars(manager.hook).items()}
    assert specified == dict(hookspecs.HOOKS)
    assert set(DECISION_OF) == set(specified)
    assert specified.keys() >= hookspecs.CALLED


@pytest.mark.parametrize("name", sorted(hookspecs.HOOKS))
def test_contract_docstrings_have_their_parts_in_order(name):
    text = inspect.getdoc(getattr(hookspecs, name))
    parts = ["Fires ", "Runs in the trainer process", "Args:", "Returns:", "None ", "Raises:", "Example::", "Since:"]
    positions = [text.index(part) for part in parts]
    assert positions == sorted(positions)
    assert ("Not called yet in this version" in text) == (name not in hookspecs.CALLED)
    returned = inspect.signature(getattr(hookspecs, name)).return_annotation
    assert returned == f"{DECISION_OF[name].__name__} | None"
