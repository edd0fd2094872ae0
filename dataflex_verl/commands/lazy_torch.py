"""Torch, loaded when something computes with it: importing it takes longer than all that ``check`` does.

Modules of plugins say ``import torch`` and ``from torch import Tensor`` at their top, and a check of settings runs none
of their mathematics. ``importlib.util.LazyLoader`` would load torch at the second of the two lines, and execute
``torch.nn`` twice where a module imports that first.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

_NAME = "torch"


def postpone_torch() -> None:
    """From now on ``import torch`` loads it at the first use of anything in it but the bare name ``Tensor``.

    For processes that end after a check. Does nothing where torch is loaded already, or is not installed.
    """
    spec = importlib.util.find_spec(_NAME) if _NAME not in sys.modules else None
    if spec is None:
        return
    module = importlib.util.module_from_spec(spec)
    module.__class__ = _Postponed
    sys.modules[_NAME] = module
    sys.meta_path.insert(0, _Submodules())


class _Postponed(ModuleType):
    """The module before it is loaded. Whoever asks for what it lacks gets it from the real one, which it becomes."""

    def __getattr__(self, name: str) -> Any:
        if name == "Tensor":
            return _TENSOR
        _load(self)
        return getattr(self, name)


def _load(module: ModuleType) -> None:
    module.__class__ = ModuleType
    spec = module.__spec__
    assert spec is not None and spec.loader is not None
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(_NAME, None)
        raise


class _Submodules(MetaPathFinder):
    """Loads torch before any of its submodules; most of them are loaded with it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package = sys.modules.get(_NAME)
        if not fullname.startswith(f"{_NAME}.") or not isinstance(package, _Postponed):
            return None
        _load(package)
        return ModuleSpec(fullname, _Loaded(sys.modules[fullname])) if fullname in sys.modules else None


class _Loaded(Loader):
    """Hands out a module that was loaded while it was looked for."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


class _Tensor:
    """Stands for ``torch.Tensor`` in modules imported before torch was loaded, wherever a class may stand."""

    def __mro_entries__(self, bases: tuple[object, ...]) -> tuple[type]:
        return (_tensor(),)

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, _tensor())

    def __subclasscheck__(self, subclass: type) -> bool:
        return issubclass(subclass, _tensor())

    def __getattr__(self, name: str) -> Any:
        return getattr(_tensor(), name)

    def __call__(self, *values: Any, **named: Any) -> Any:
        return _tensor()(*values, **named)

    def __or__(self, other: Any) -> Any:
        return _tensor() | other

    def __ror__(self, other: Any) -> Any:
        return other | _tensor()


_TENSOR = _Tensor()


def _tensor() -> type:
    package = sys.modules[_NAME]
    if isinstance(package, _Postponed):
        _load(package)
    return package.Tensor
