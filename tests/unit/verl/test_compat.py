"""Names of verl's that the code relies on: all listed, looked up at the start, refused in one message."""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from typer.testing import CliRunner

pytest.importorskip("verl", reason="needs verl: pip install 'dataflex-verl[local]'")

import dataflex_verl  # noqa: E402
from dataflex_verl import compat  # noqa: E402
from dataflex_verl.cli import app  # noqa: E402
from dataflex_verl.local import patches  # noqa: E402

PACKAGE = Path(dataflex_verl.__file__).parent
LISTED = {
    f"{module}.{name.replace('()', '')}"
    for table in (compat.TRAINER, compat.LOCAL)
    for module, names in table.items()
    for name in names
}
MODULES = {*compat.TRAINER, *compat.LOCAL}
TRAINER_BASE = "verl.trainer.ppo.v1.trainer_base.PPOTrainer"
# Class bodies without a base of their own, and what they are laid over.
LAID_OVER = {
    ("trainer.py", "DataFlexTrainer"): TRAINER_BASE,
    ("replay_buffer.py", "MixingBuffer"): "verl.trainer.ppo.v1.replay_buffer.ReplayBuffer",
}
# What our subclasses of verl's classes add.
OWN = {"server", "watch", "_step"}
HOSTS = ("verl", "transfer_queue")


def parents(name: str) -> Iterator[str]:
    while name:
        yield name
        name = name.rpartition(".")[0]


def is_listed(name: str) -> bool:
    """Whether the name, or a part that it starts with, is in a table; or it is a module whose names are."""
    return name in MODULES or any(prefix in LISTED for prefix in parents(name)) or _starts_a_listed_one(name)


def _starts_a_listed_one(name: str) -> bool:
    return any(one.startswith(f"{name}.") for one in LISTED)


def chain(node: ast.AST, names: dict[str, str]) -> str | None:
    """``a.b.c`` in full where ``a`` stands for something of verl's."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        owner = chain(node.value, names)
        return None if owner is None else f"{owner}.{node.attr}"
    return None


def used(tree: ast.AST, names: dict[str, str]) -> set[str]:
    """Everything that the code takes from verl, as full names; ``names`` says what variables stand for."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in HOSTS:
            for alias in node.names:
                names[alias.asname or alias.name] = f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.split(".")[0] in HOSTS:
                    names[alias.asname or alias.name] = alias.name
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            pairs = [(node.targets[0], node.value)]
            if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(node.targets[0].elts, node.value.elts, strict=True))
            for target, value in pairs:
                full = chain(value, names)
                if isinstance(target, ast.Name) and full is not None:
                    names[target.id] = full
    found |= {full for full in names.values() if full.split(".")[0] in HOSTS}
    for node in ast.walk(tree):
        full = chain(node, names) if isinstance(node, ast.Attribute) else None
        if full is not None:
            found.add(full)
    return found


def from_base(tree: ast.ClassDef, base: str) -> set[str]:
    """What a class takes from ``base``: ``super()`` calls, attributes of ``self``, and methods laid over its own."""
    defined = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))}

    def is_of_self(node: ast.AST) -> bool:
        return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "self"

    read, found = set(), set()
    constructor = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "__init__"]
    assigned = {
        node.attr
        for body in constructor
        for node in ast.walk(body)
        if is_of_self(node) and isinstance(node.ctx, ast.Store)
    }
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        if is_of_self(node):
            read.add(node.attr)
        elif isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") == "super":
            found.add(node.attr)
    annotated = {node.target.id for node in tree.body if isinstance(node, ast.AnnAssign)}
    found |= read - assigned - defined - annotated - OWN
    found |= {name for name in defined if not name.startswith("_")} - OWN
    return {f"{base}.{name}" for name in found} - {f"{base}.__init__"}


def relied_on() -> set[str]:
    names_used: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        names: dict[str, str] = {}
        names_used |= used(tree, names)
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                bases = [chain(base, names) for base in node.bases]
                names_used |= {full for base in bases if base for full in from_base(node, base)}
    for (file, name), base in LAID_OVER.items():
        tree = ast.parse((PACKAGE / file).read_text())
        (body,) = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
        names_used |= from_base(body, base)
    for module, hook in patches._HOOKS:
        names_used |= used(ast.parse(inspect.getsource(hook)), {"module": module})
    return names_used


def test_every_name_of_verls_that_the_code_uses_is_listed():
    names = relied_on()
    platform = "verl.plugin.platform.platform_base.PlatformBase"
    assert {f"{TRAINER_BASE}._balance_batch", f"{TRAINER_BASE}.global_steps", "transfer_queue.kv_batch_get"} <= names
    assert "verl.workers.engine.fsdp.transformer_impl.DTensor" in names
    assert f"{platform}.device_name" in names and "verl.workers.rollout.replica.RolloutReplica.launch_servers" in names
    missing = sorted(name for name in names if not is_listed(name))
    assert missing == []


def test_the_walk_sees_what_is_not_listed():
    code = "from verl.a import b as c\nimport transfer_queue as tq\nc.d.e()\ntq.kv_new()\nx = c.f\nx.g\n"
    found = used(ast.parse(code), {})
    assert {"verl.a.b.d.e", "transfer_queue.kv_new", "verl.a.b.f.g"} <= found
    assert {name for name in found if not is_listed(name)} == found - {"transfer_queue"}


def test_nothing_listed_is_unused():
    names = relied_on()
    used_at_all = {prefix for name in names for prefix in parents(name)}
    overridden = {f"{TRAINER_BASE}.__init__", "verl.trainer.ppo.v1.replay_buffer.ReplayBuffer.__init__"}
    assert sorted(LISTED - used_at_all - overridden) == []


@pytest.mark.parametrize("table", [compat.TRAINER, compat.LOCAL], ids=["trainer", "local"])
def test_this_verl_has_every_name(table):
    compat.require(table)


def test_one_refusal_lists_everything_that_is_missing():
    table = {
        "verl.trainer.ppo.v1.trainer_base": (
            "PPOTrainer.step",
            "PPOTrainer._fit_batch",
            "PPOTrainer().no_such_counter",
        ),
        "verl.trainer.ppo.v2": ("PPOTrainer",),
    }
    with pytest.raises(compat.UnsupportedVerl) as caught:
        compat.require(table)
    text = str(caught.value)
    assert [line.strip() for line in text.splitlines()[1:]] == [
        "verl.trainer.ppo.v1.trainer_base.PPOTrainer._fit_batch",
        "verl.trainer.ppo.v1.trainer_base.PPOTrainer().no_such_counter",
        "verl.trainer.ppo.v2.PPOTrainer",
    ]
    assert text.startswith("verl 0.9.") and compat.SUPPORTED in text


def test_a_run_is_refused_before_anything_else(mocker):
    from dataflex_verl import trainer

    mocker.patch.dict(vars(importlib.import_module("verl.workers.utils.losses")))
    del importlib.import_module("verl.workers.utils.losses").ppo_loss
    built = mocker.patch.object(trainer, "prepare_with")
    with pytest.raises(compat.UnsupportedVerl, match=r"verl\.workers\.utils\.losses\.ppo_loss"):
        trainer.prepare(None)
    built.assert_not_called()


def test_names_of_the_local_backend_are_looked_up_when_its_hook_runs(mocker):
    hook = mocker.Mock(__name__="hook")
    module = ModuleType("verl.utils.model")
    module.get_hf_auto_model_class = None
    with pytest.raises(compat.UnsupportedVerl, match="verl.utils.model.load_valuehead_model"):
        compat.checked(hook)(module)
    hook.assert_not_called()
    module.load_valuehead_model = None
    compat.checked(hook)(module)
    hook.assert_called_once_with(module)


@pytest.fixture
def old_verl(tmp_path, monkeypatch):
    """A verl of another version, found in place of the real one by whoever does not import it."""
    from dataflex_verl.commands import hydra_config

    (tmp_path / "verl" / "version").mkdir(parents=True)
    (tmp_path / "verl" / "version" / "version").write_text("0.8.0\n")
    spec = mocker_spec(tmp_path / "verl")
    monkeypatch.setattr(hydra_config, "find_spec", lambda name: spec)
    return tmp_path / "verl"


def mocker_spec(directory: Path):
    from importlib.machinery import ModuleSpec

    spec = ModuleSpec("verl", None, is_package=True)
    spec.submodule_search_locations = [str(directory)]
    return spec


@pytest.mark.parametrize("command", ["check", "train"])
def test_a_verl_without_the_v1_trainer_gives_one_refusal(old_verl, command):
    result = CliRunner().invoke(app, [command, "trainer.v1.trainer_mode=dataflex_sync", "+dataflex=[nonsense"])
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr.count("verl 0.8.0 has no v1 trainer") == 1 and compat.SUPPORTED in result.stderr
    assert "Traceback" not in result.stderr and "nonsense" not in result.stderr


def test_with_the_v1_trainer_the_version_is_no_matter(old_verl):
    assert compat.unsupported(old_verl).startswith("verl 0.8.0 has no v1 trainer (trainer/ppo/v1/trainer_base.py)")
    (old_verl / "trainer" / "ppo" / "v1").mkdir(parents=True)
    (old_verl / "trainer" / "ppo" / "v1" / "trainer_base.py").touch()
    assert compat.unsupported(old_verl) is None


def test_looking_at_verls_files_imports_neither_verl_nor_torch():
    code = (
        "import sys, json\n"
        "from dataflex_verl.compat import unsupported\n"
        "from dataflex_verl.commands.hydra_config import verl_directory\n"
        "reason = unsupported(verl_directory())\n"
        "print(json.dumps([reason, sorted({'verl', 'torch', 'ray'} & set(sys.modules))]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == [None, []]
