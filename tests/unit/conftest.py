"""Builders of batches and of installed distributions."""

from __future__ import annotations

import importlib
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import dataflex_hooks as dh
from dataflex_hooks import discovery
from dataflex_hooks.testing import Row, make_batch

torch.set_num_threads(1)


class BatchBuilder:
    """Builds batches out of rows; the reward lies on a row's last token."""

    Row = Row

    def rows(self, rewards: Sequence[Sequence[float]], **common: Any) -> list[Row]:
        """One group per inner list, one single-output session per reward."""
        return [
            Row(uid=f"uid_{group}", session=session, reward=reward, **common)
            for group, of_group in enumerate(rewards)
            for session, reward in enumerate(of_group)
        ]

    def groups(self, *rewards: Sequence[float], **common: Any) -> dh.RolloutBatch:
        return self.build(self.rows(rewards, **common))

    def build(
        self,
        rows: Sequence[Row],
        without: Sequence[str] = (),
        columns: Mapping[str, Any] | None = None,
        **token_fields: torch.Tensor,
    ) -> dh.RolloutBatch:
        # Bare: one column beside the fields, so that a test says what is there.
        bare = {"data_source", "dataflex_domain", "dataflex_row"} - set(columns or {})
        return make_batch(rows, columns=columns, token_fields=token_fields, without=(*without, *bare))


@pytest.fixture(scope="session")
def batches() -> BatchBuilder:
    return BatchBuilder()


@pytest.fixture(scope="session")
def ctx() -> dh.StepContext:
    return dh.StepContext(step=3)


@pytest.fixture(scope="session")
def token_mean() -> dh.LossCoefficients:
    return dh.LossCoefficients("token")


def write_distribution(
    folder: Path,
    name: str,
    version: str,
    entry_points: Mapping[str, str],
    modules: Mapping[str, str],
    requires: Sequence[str] = (),
    presets: Mapping[str, str] | None = None,
) -> None:
    """Lay out what pip would have installed: the modules (or other files, by path) and a dist-info folder."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    needed = "".join(f"Requires-Dist: {requirement}\n" for requirement in requires)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n{needed}")
    groups = {"dataflex_hooks": entry_points, "dataflex_presets": presets or {}}
    listed = [f"[{group}]\n" + "".join(f"{k} = {v}\n" for k, v in points.items()) for group, points in groups.items()]
    (info / "entry_points.txt").write_text("".join(listed))
    for module, source in modules.items():
        path = folder / (module if "." in module else f"{module}.py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))


@pytest.fixture(scope="session", autouse=True)
def own_entry_points(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Make `select` and `reweight` discoverable in a checkout that is not installed."""
    if {"select", "reweight"} <= set(discovery.entry_point_names()):
        yield
        return
    folder = tmp_path_factory.mktemp("own")
    points = {
        "select": "dataflex_hooks.plugins.select:SelectPlugin",
        "reweight": "dataflex_hooks.plugins.reweight:ReweightPlugin",
    }
    write_distribution(folder, "dataflex-verl", dh.__version__, points, {})
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Install a fake distribution for one test: `distribution(name, entry_points, modules, version=...)`."""
    loaded: list[str] = []

    def install(
        name: str, entry_points: Mapping[str, str], modules: Mapping[str, str], version: str = "1.2.3", **more: Any
    ) -> None:
        folder = tmp_path / name
        write_distribution(folder, name, version, entry_points, modules, **more)
        monkeypatch.syspath_prepend(str(folder))
        importlib.invalidate_caches()
        loaded.extend(modules)

    yield install
    for module in loaded:
        sys.modules.pop(module, None)


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dh.registry.Registry:
    """The registry of components, restored after the test."""
    for kind in ("scorer", "selector", "reweighter", "mixer"):
        dh.REGISTRY.names(kind)
    copies = {kind: dict(classes) for kind, classes in dh.REGISTRY._classes.items()}
    monkeypatch.setattr(dh.REGISTRY, "_classes", copies)
    return dh.REGISTRY


@pytest.fixture
def problems() -> Callable[..., list[str]]:
    """Build a manager from a bad `dataflex` block; return each problem's text."""

    def collect(
        block: Mapping[str, Any], estimator: str = "grpo", has_groups: bool | None = True, **extra: Any
    ) -> list[str]:
        with pytest.raises(dh.ConfigError) as caught:
            dh.HookManager.from_config(block, estimator=estimator, has_groups=has_groups, **extra)
        return [str(problem) for problem in caught.value.problems]

    return collect
