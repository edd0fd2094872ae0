"""Names of prompts by a function of the user's, asked once for each distinct prompt."""

from __future__ import annotations

import hashlib
import importlib
import pickle
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dataflex_hooks import ParameterError

Columns = Mapping[str, NDArray[Any]]
Classifier = Callable[[Columns], Sequence[str]]
REMEMBERED = 200_000
"""Prompts whose name is remembered; the oldest go first. About 100 bytes each."""


def load_classifier(name: str) -> Classifier:
    """Import ``module:function``.

    Raises:
        ParameterError: it is none, or importing it fails.
    """
    module, _, function = name.partition(":") if isinstance(name, str) else ("", "", "")
    accepted = "module:function, a function of columns that returns a name for each prompt"
    if not module or not function:
        raise ParameterError("classifier", name, accepted)
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ParameterError("classifier", name, f"{accepted}; importing it raised {error}") from error
    if not callable(found):
        raise ParameterError("classifier", name, accepted)
    return found


class CachedClassifier:
    """Asks ``classify`` about prompts that it has not been asked about, all of a step in one call.

    Args:
        classify: given columns by name, one entry for each prompt, returns as many names.
        name: of the function, for messages.
    """

    def __init__(self, classify: Classifier, name: str) -> None:
        self._classify, self._name = classify, name
        self._known: OrderedDict[bytes, str] = OrderedDict()
        self.asked = 0

    def __call__(self, columns: Columns) -> list[str]:
        """Return a name for each of n prompts; columns are (n,) each."""
        rows = list(zip(*columns.values(), strict=True))
        keys = [hashlib.blake2b(pickle.dumps(row), digest_size=16).digest() for row in rows]
        new = {key: place for place, key in enumerate(keys) if key not in self._known}
        if new:
            places = list(new.values())
            names = self._classify({name: column[places] for name, column in columns.items()})
            names = names.tolist() if isinstance(names, np.ndarray) else list(names)
            if len(names) != len(places) or not all(isinstance(name, str) for name in names):
                shown = f"{len(names)} values" if len(names) != len(places) else f"{names[:3]!r}..."
                raise ValueError(f"{self._name} returned {shown}; accepted: one name (text) for each of {len(places)}")
            self._known.update(zip(new, names, strict=True))
            self.asked += len(places)
        found = [self._known[key] for key in keys]
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return found
