"""``dataflex check`` without torch, and torch whole where a plugin needs it after all. A process for each."""

from __future__ import annotations

import subprocess
import sys

CHECK = """
import sys
from typer.testing import CliRunner
from dataflex_verl.cli import app
base = ["trainer.v1.trainer_mode=dataflex_sync", "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=8"]
def check(*more):
    return CliRunner().invoke(app, ["check", *base, *more])
def refused(*more):
    result = check(*more)
    assert result.exit_code == 2 and "Traceback" not in result.output, result.output
    return result.stderr
"""


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_check_loads_neither_torch_nor_verl_and_says_the_same_as_with_them() -> None:
    program = (
        CHECK
        + """
lazy = check("+dataflex=[difffilter,per,topk,softmax,ar]")
wrong = refused("+dataflex=per", "+dataflex.aply=true", "++dataflex.plugins.per.actuator.params.alpha=big")
assert lazy.exit_code == 0 and lazy.stdout.count("DataFlex plan: ") > 9
assert CliRunner().invoke(app, ["plugins", "--all"]).exit_code == 0
assert not [name for name in sys.modules if name.split(".")[0] in ("verl", "ray", "transformers")]
assert [name for name in sys.modules if name.split(".")[0] == "torch"] == ["torch"], "torch was loaded"
import torch
assert float(torch.ones(2).sum()) == 2 and "torch.nn" in sys.modules
assert check("+dataflex=[difffilter,per,topk,softmax,ar]").stdout == lazy.stdout
assert refused("+dataflex=per", "+dataflex.aply=true", "++dataflex.plugins.per.actuator.params.alpha=big") == wrong
"""
    )
    run(program)


def test_a_postponed_torch_is_whole_for_those_who_use_it() -> None:
    program = """
import sys
from dataflex_verl.commands.lazy_torch import postpone_torch
postpone_torch()
import torch
from torch import Tensor
from typing import Optional, get_type_hints
import dataflex_hooks as dh
assert "torch._C" not in sys.modules

import torch.nn.functional as functional
assert "torch._C" in sys.modules and sys.modules["torch"] is torch
assert torch.nn is sys.modules["torch.nn"] and torch.nn.functional is functional
assert torch.nn.__spec__.name == "torch.nn" and type(torch.nn.__spec__.loader).__name__ == "SourceFileLoader"
row = functional.softmax(torch.ones(2), dim=0)
assert isinstance(row, Tensor) and not isinstance(1.0, Tensor)
class Mine(Tensor): pass
assert issubclass(Mine, Tensor) and issubclass(Mine, torch.Tensor) and not issubclass(int, Tensor)
assert (Tensor | None) == (torch.Tensor | None) == (None | Tensor)
assert Tensor.add is torch.Tensor.add and Tensor([1.0]).shape == (1,)
assert Optional[Tensor] is not None
decision = dh.UpdateDecision(mask=torch.tensor([True, False]))
assert decision.mask.tolist() == [True, False]
"""
    run(program)


def test_postponing_does_nothing_where_torch_is_loaded() -> None:
    program = """
import sys, torch
from dataflex_verl.commands.lazy_torch import postpone_torch
finders = list(sys.meta_path)
postpone_torch()
assert sys.modules["torch"] is torch and type(torch).__name__ == "module" and sys.meta_path == finders
"""
    run(program)


def test_a_torch_that_does_not_load_says_so_with_its_own_error(tmp_path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libc10.so: no such file')\n")
    program = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from dataflex_verl.commands.lazy_torch import postpone_torch
postpone_torch()
import torch
try:
    torch.ones(1)
except ImportError as error:
    assert "libc10.so" in str(error)
else:
    raise AssertionError
assert "torch" not in sys.modules
"""
    run(program)
