"""The entry point module itself, without verl."""

from __future__ import annotations

import importlib

import pytest
import wrapt


@pytest.fixture
def autoload(mocker, monkeypatch):
    monkeypatch.delenv("VERL_PLATFORM", raising=False)
    mocker.patch.object(wrapt, "register_post_import_hook")
    import dataflex_verl.autoload

    return importlib.reload(dataflex_verl.autoload)


def test_it_only_installs_post_import_hooks(autoload):
    calls = wrapt.register_post_import_hook.call_args_list
    assert [call.args[1] for call in calls] == ["verl.trainer.ppo.v1", "hydra.core.plugins"]


def test_the_cpu_backend_is_opt_in(autoload, mocker, monkeypatch):
    installed = mocker.patch("dataflex_verl.local.patches.install_local_backend")
    autoload.install()
    installed.assert_not_called()
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    autoload.install()
    installed.assert_called_once_with()


def test_a_failure_is_printed_although_verl_hides_it(mocker, monkeypatch, capsys):
    mocker.patch.object(wrapt, "register_post_import_hook", side_effect=RuntimeError("no hooks today"))
    import dataflex_verl.autoload

    with pytest.raises(RuntimeError):
        importlib.reload(dataflex_verl.autoload)
    assert "no hooks today" in capsys.readouterr().err
    mocker.stopall()
    importlib.reload(dataflex_verl.autoload)
