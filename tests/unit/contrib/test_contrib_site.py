"""What is on the path for a test is gone after it, and the same when it comes back."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from importlib.metadata import entry_points
from pathlib import Path

from dataflex_hooks import REGISTRY
from tests.wheels import CONTRIB, Site, build, contrib_site, install

GOOD = ["trainer.v1.trainer_mode=dataflex_sync", "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8"]


def test_outside_of_a_test_that_wants_them_nothing_of_them_is_there(check_json):
    with contrib_site().on_path():
        import dataflex_example  # noqa: F401

        assert "example" in entry_points(group="dataflex_hooks").names
    assert "example" not in entry_points(group="dataflex_hooks").names
    assert "dataflex_example" not in sys.modules
    (problem,) = check_json(*GOOD, "+dataflex.plugins.example.longest=3")["problems"]
    assert problem["setting"] == "dataflex.plugins.example.plugin"


def test_back_on_the_path_modules_and_components_are_the_same(tmp_path):
    text = "import dataflex_hooks as dh\n@dh.register_scorer('kept')\nclass Kept(dh.Scorer): pass\n"
    (tmp_path / "kept_module.py").write_text(text)
    site = Site(tmp_path)
    with site.on_path():
        import kept_module

        assert REGISTRY.get("scorer", "kept") is kept_module.Kept
    assert "kept" not in REGISTRY.names("scorer") and "kept_module" not in sys.modules
    with site.on_path():
        assert sys.modules["kept_module"] is kept_module
        assert REGISTRY.get("scorer", "kept") is kept_module.Kept


def test_where_a_package_is_installed_its_tests_are_of_that_one(tmp_path, monkeypatch):
    (wheel,) = (build() / "wheels").glob("dataflex_example-*.whl")
    install([wheel], tmp_path)
    test = CONTRIB / "dataflex-example" / "tests" / "test_dataflex_example.py"
    spec = importlib.util.spec_from_file_location("conftest_of_contrib", CONTRIB / "conftest.py")
    conftest = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(conftest)

    def place() -> Path:
        with conftest._package_installed(test):
            return Path(importlib.import_module("dataflex_example").__file__).parent

    assert place().parent == contrib_site().folder
    monkeypatch.syspath_prepend(str(tmp_path))
    assert place().parent == tmp_path
    del sys.modules["dataflex_example"]
