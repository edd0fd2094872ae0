"""Everything that a demo run reads, made once and kept under a key of its settings and of this package's code.

Torch and transformers are imported only where something has to be made: finding what is there takes no time.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dataflex_verl.demo.warm_start import WarmStart

HERE = Path(__file__).parent
SOURCES = ("tasks.py", "tokenizer.py", "model.py", "warm_start.py", "reward.py", "build.py")


@dataclass(frozen=True)
class DemoSettings:
    """Sizes of the demo.

    Attributes:
        train_per_domain: training tasks a domain.
        val_per_domain: validation tasks a domain.
        hidden: width of the model.
        layers: transformer blocks of the model.
        warm_start: settings of the supervised start, None for its defaults.
    """

    train_per_domain: int = 120
    val_per_domain: int = 24
    hidden: int = 64
    layers: int = 2
    warm_start: WarmStart | None = None


@dataclass(frozen=True)
class DemoFiles:
    """Where the demo's files are. The reward function in ``reward_path`` is called ``compute_score``."""

    model_dir: Path
    train_parquet: Path
    val_parquet: Path
    reward_path: Path


def build_demo(directory: str | Path, seed: int = 0, settings: DemoSettings | None = None) -> DemoFiles:
    """Make tasks, tokenizer, warm-started model and reward file, or find those made before.

    Files are written to a temporary folder that is renamed when complete, so an interrupted or concurrent call leaves
    nothing half made behind. Prints nothing.

    Args:
        directory: cache folder, made if absent; each combination of seed, settings and code has a folder in it.
        seed: decides the splits, the initial weights and the warm start.
        settings: sizes; the defaults take about 10 seconds on one core.
    """
    settings = settings or DemoSettings()
    directory = Path(directory).expanduser().resolve()
    home = directory / f"demo-{_content_key(seed, settings)}"
    if not home.exists():
        directory.mkdir(parents=True, exist_ok=True)
        making = Path(tempfile.mkdtemp(prefix=f".{home.name}-", dir=directory))
        try:
            _write(making, seed, settings)
            _publish(making, home)
        finally:
            shutil.rmtree(making, ignore_errors=True)
    return DemoFiles(
        model_dir=home / "model",
        train_parquet=home / "train.parquet",
        val_parquet=home / "val.parquet",
        reward_path=home / "reward.py",
    )


def _content_key(seed: int, settings: DemoSettings) -> str:
    digest = hashlib.sha256()
    versions = {name: metadata.version(name) for name in ("torch", "transformers")}
    digest.update(json.dumps([seed, asdict(settings), versions], sort_keys=True).encode())
    for name in SOURCES:
        digest.update((HERE / name).read_bytes())
    return digest.hexdigest()[:16]


def _write(folder: Path, seed: int, settings: DemoSettings) -> None:
    from dataflex_verl.demo.model import make_model
    from dataflex_verl.demo.tasks import make_splits, write_parquet
    from dataflex_verl.demo.tokenizer import make_tokenizer
    from dataflex_verl.demo.warm_start import WarmStart, warm_start

    splits = make_splits(seed, settings.train_per_domain, settings.val_per_domain)
    tokenizer = make_tokenizer()
    model = make_model(tokenizer, seed, settings.hidden, settings.layers)
    warm_start(model, tokenizer, splits.warm_start, seed, settings.warm_start or WarmStart())
    with _no_progress_bar():
        model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write_parquet(splits.train, folder / "train.parquet", "train")
    write_parquet(splits.val, folder / "val.parquet", "val")
    shutil.copyfile(HERE / "reward.py", folder / "reward.py")


def _publish(making: Path, home: Path) -> None:
    """Rename ``making`` to ``home``; when another process was faster, its equal folder stays."""
    making.chmod(0o755)
    try:
        os.rename(making, home)
    except OSError:
        if not home.is_dir():
            raise


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    from transformers.utils import logging as transformers_logging

    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()
