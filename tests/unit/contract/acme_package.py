"""The sources of a package written by somebody else against the published contract, and its wheel."""

from __future__ import annotations

import base64
import hashlib
import textwrap
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.wheels import Site, install

NAME, VERSION = "acme_dataflex", "2.1"

COMPONENTS = '''
    """Components against the published names only."""

    import torch
    from dataflex_verl.core.actuator import Mixer, Reweighter, Selector
    from dataflex_verl.core.registry import register_mixer, register_reweighter, register_scorer, register_selector
    from dataflex_verl.core.scorer import Scorer


    @register_scorer("acme_spread")
    class Spread(Scorer):
        """Distance of a response's reward from the mean of its group."""

        requires = ["token_level_scores", "response_mask"]
        timing = "post_reward"
        granularity = "response"
        needs_groups = True

        def __init__(self, power=1.0, **kwargs):
            self.power = power
            self.domains = kwargs.get("domains")

        def score(self, batch, step_id, **ctx):
            rewards = batch.batch["token_level_scores"].sum(-1)
            uids = batch.non_tensor_batch["uid"]
            mean = torch.stack([rewards[torch.from_numpy(uids == uid)].mean() for uid in uids])
            return (rewards - mean).abs() ** self.power


    @register_scorer("acme_surprise")
    class Surprise(Scorer):
        """1 - p of each token, padded."""

        requires = ["old_log_probs", "response_mask"]
        granularity = "token"

        def score(self, batch, step_id, **ctx):
            return (1 - batch.batch["old_log_probs"].exp()) * batch.batch["response_mask"]


    @register_selector("acme_above")
    class Above(Selector):
        def __init__(self, limit=0.0, scorer=None, **kwargs):
            self.limit = limit
            self.scorer = scorer

        def act(self, scores, batch, **ctx):
            return [i for i, score in enumerate(scores.tolist()) if score > self.limit]


    @register_reweighter("acme_affine")
    class Affine(Reweighter):
        def __init__(self, slope=1.0, **kwargs):
            self.slope = slope

        def act(self, scores, batch, **ctx):
            return 1.0 + self.slope * scores


    @register_mixer("acme_inverse")
    class Inverse(Mixer):
        def __init__(self, domains=None, window=1, floor=0.0, **kwargs):
            self.domains = list(domains or [])
            self.window = window
            self.floor = floor

        def act(self, scores, batch, *, counts=None, **ctx):
            raw = [1.0 / (1.0 + scores.get(domain, 0.0)) for domain in self.domains]
            return [self.floor + (1 - self.floor * len(raw)) * value / sum(raw) for value in raw]
'''

POINTS = {
    "acme_spread": "acme_dataflex.components:Spread",
    "acme_surprise": "acme_dataflex.components",
    "acme_above": "acme_dataflex.components:Above",
    "acme_affine": "acme_dataflex.components",
    "acme_inverse": "acme_dataflex.components:Inverse",
}


def build_wheel(directory: Path) -> Path:
    """Write the package as a wheel, as any build backend would."""
    info = f"{NAME}-{VERSION}.dist-info"
    points = "".join(f"{name} = {target}\n" for name, target in POINTS.items())
    files = {
        f"{NAME}/__init__.py": "",
        f"{NAME}/components.py": textwrap.dedent(COMPONENTS),
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: acme-dataflex\nVersion: {VERSION}\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: acme\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[dataflex_hooks]\n{points}",
    }
    record = "".join(f"{path},sha256={_digest(text)},{len(text.encode())}\n" for path, text in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n"
    wheel = directory / f"{NAME}-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)
    return wheel


@contextmanager
def installed(folder: Path) -> Iterator[Path]:
    """Have pip install the wheel below ``folder``, on the path of this process for a while; gives the place."""
    install([build_wheel(folder)], folder / "site")
    with Site(folder / "site").on_path() as site:
        yield site


def _digest(text: str) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
