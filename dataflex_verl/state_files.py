"""Files of the hooks in a checkpoint folder: ``dataflex/state.json``, a safetensors file that it names, and metrics.

Nothing is pickled. ``state.json`` is renamed into place last, so whoever finds it finds all of it.
"""

from __future__ import annotations

import hashlib
import json
import numbers
import os
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dataflex_hooks import DataFlexError, HookManager, __version__
from dataflex_hooks.state import SavedPlugin
from dataflex_hooks.state_values import Packed, StateValueError, pack, unpack
from dataflex_hooks.whole_files import sync, written_whole

FOLDER = "dataflex"
STATE_FILE = "state.json"
METRICS_FILE = "metrics.json"
FORMAT = "dataflex state"
VERSION = 1
DOMAIN_FORMAT = "dataflex domain sampler 1"
"""What the domain sampler's state begins with."""


class CheckpointError(DataFlexError):
    """A checkpoint's state that cannot be read: damaged, incomplete, or of a newer version."""


@dataclass(frozen=True)
class SavedState:
    """What ``state.json`` holds.

    Attributes:
        folder: the ``dataflex`` folder it came from.
        step: verl's global step.
        plugins: by label.
        metrics: logged metrics of the step, ``ctx.last_metrics`` of the next.
    """

    folder: Path
    step: int
    plugins: Mapping[str, SavedPlugin]
    metrics: Mapping[str, Any] = field(default_factory=dict)


def write(checkpoint: Path, hooks: HookManager, step: int, metrics: Mapping[str, Any]) -> Path:
    """Write the state of every plugin into a checkpoint folder, so that it is there whole or not at all.

    Args:
        checkpoint: verl's ``global_step_N``; made if it is not there, as verl does.
        hooks: the plugins.
        step: verl's global step.
        metrics: of the step so far; :func:`write_metrics` completes them.

    Returns:
        The ``dataflex`` folder.

    Raises:
        PluginError: a plugin's state cannot be stored; names the plugin and the path of the value.
    """
    plugins = hooks.state_dict(step)
    tensors = {
        f"{label}/{name}": tensor
        for label, plugin in plugins.items()
        if plugin.state is not None
        for name, tensor in plugin.state.tensors.items()
    }
    folder = checkpoint / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "format": FORMAT,
        "version": VERSION,
        "written_by": f"dataflex-verl {__version__}",
        "step": step,
        "plugins": {label: _plugin_record(plugin) for label, plugin in plugins.items()},
        "tensors": _write_tensors(folder, tensors) if tensors else None,
        "metrics": _storable(metrics),
    }
    _write_json(folder / STATE_FILE, record)
    named = record["tensors"]["file"] if tensors else None
    for old in folder.glob("tensors-*.safetensors"):
        if old.name != named:
            old.unlink()
    (folder / METRICS_FILE).unlink(missing_ok=True)
    sync(folder)
    sync(checkpoint)
    return folder


def write_metrics(folder: Path, step: int, metrics: Mapping[str, Any]) -> None:
    """Store a step's metrics once they are complete: verl goes on to add some after it saved the checkpoint."""
    _write_json(folder / METRICS_FILE, {"step": step, "metrics": _storable(metrics)})


def read(checkpoint: Path, with_tensors: bool = True) -> SavedState | None:
    """Read what :func:`write` wrote; None for a checkpoint without it.

    Args:
        checkpoint: verl's ``global_step_N``.
        with_tensors: False to look at the list of plugins only; their states then cannot be unpacked.

    Raises:
        CheckpointError: the files are damaged, incomplete, or of a newer version.
    """
    folder = checkpoint / FOLDER
    try:
        text = (folder / STATE_FILE).read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        record = json.loads(text)
        if record["format"] != FORMAT:
            raise CheckpointError(f"{folder / STATE_FILE}: its format is {record['format']!r}, not {FORMAT!r}")
        if record["version"] > VERSION:
            raise CheckpointError(
                f"{folder / STATE_FILE}: version {record['version']}, written by {record['written_by']}; this one is "
                f"dataflex-verl {__version__} and reads up to version {VERSION}: install the newer one"
            )
        tensors = _read_tensors(folder, record["tensors"]) if with_tensors and record["tensors"] else {}
        plugins = {label: _plugin(label, given, tensors) for label, given in record["plugins"].items()}
        return SavedState(folder, record["step"], plugins, _read_metrics(folder, record))
    except (KeyError, TypeError, ValueError, StateValueError) as error:
        raise CheckpointError(f"{folder / STATE_FILE} cannot be read: {type(error).__name__}: {error}") from error


def is_domain_state(path: Path) -> bool | None:
    """Whether a ``data.pt`` of verl's checkpoint is the domain sampler's; None when it is not there.

    Nothing is unpickled: the file is verl's, a pickle inside a zip, and the sampler's state begins with its format.

    Args:
        path: of the file. One that is damaged is nobody's.
    """
    if not path.is_file():
        return None
    try:
        with zipfile.ZipFile(path) as archive:
            (pickled,) = (name for name in archive.namelist() if name.endswith("/data.pkl"))
            return DOMAIN_FORMAT.encode() in archive.read(pickled)
    except (ValueError, zipfile.BadZipFile):
        return False


def _plugin_record(plugin: SavedPlugin) -> dict[str, Any]:
    record: dict[str, Any] = {
        "plugin": plugin.plugin,
        "scorer": plugin.scorer,
        "actuator": plugin.actuator,
        "source": plugin.source,
        "disabled": plugin.disabled,
    }
    return record if plugin.state is None else {**record, "state": plugin.state.tree}


def _plugin(label: str, record: Mapping[str, Any], tensors: Mapping[str, Any]) -> SavedPlugin:
    own = {name.removeprefix(f"{label}/"): value for name, value in tensors.items() if name.startswith(f"{label}/")}
    state = Packed(record["state"], own) if "state" in record else None
    described = {key: record[key] for key in ("plugin", "scorer", "actuator", "source", "disabled")}
    return SavedPlugin(**described, state=state)


def _write_tensors(folder: Path, tensors: Mapping[str, Any]) -> dict[str, str]:
    from safetensors.torch import save

    content = save(dict(tensors))
    digest = hashlib.sha256(content).hexdigest()
    path = folder / f"tensors-{digest[:16]}.safetensors"
    _write_whole(path, content)
    return {"file": path.name, "sha256": digest}


def _read_tensors(folder: Path, named: Mapping[str, str]) -> dict[str, Any]:
    from safetensors.torch import load

    path = folder / Path(named["file"]).name
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise CheckpointError(f"{path}, which {STATE_FILE} names, is not there") from None
    if hashlib.sha256(content).hexdigest() != named["sha256"]:
        raise CheckpointError(f"{path} is damaged: its checksum is not the one in {STATE_FILE}")
    return load(content)


def _read_metrics(folder: Path, record: Mapping[str, Any]) -> dict[str, Any]:
    try:
        completed = json.loads((folder / METRICS_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        completed = {}
    tree = completed["metrics"] if completed.get("step") == record["step"] else record["metrics"]
    return unpack(Packed(tree))


def _storable(metrics: Mapping[str, Any]) -> Any:
    # verl's metrics are numbers of all kinds; now and then something else is among them, which no plugin could use.
    plain = {
        name: value if isinstance(value, int) else float(value)
        for name, value in metrics.items()
        if isinstance(value, numbers.Real)
    }
    return pack(plain).tree


def _write_json(path: Path, record: Mapping[str, Any]) -> None:
    _write_whole(path, (json.dumps(record, indent=1, allow_nan=False) + "\n").encode())


def _write_whole(path: Path, content: bytes) -> None:
    with written_whole(path, path.with_name(f".{path.name}.{os.getpid()}")) as file:
        file.write(content)
