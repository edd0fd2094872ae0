"""The plugin: which route a prompt takes, and the scale and shift that follow."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

import dataflex_hooks as df
from dataflex_reward_router.classify import CachedClassifier, load_classifier
from dataflex_reward_router.routes import read_route

DEFAULT = "default"
_log = logging.getLogger(__name__)


class RewardRouter:
    """Adjusts the rewards of each prompt by the route that it takes.

    Args:
        routes: settings of a route by its name; see :class:`Route`.
        default: the route of prompts whose name has none; {} leaves their rewards alone.
        column: dataset column whose value is the name, where there is no classifier.
        classifier: ``module:function`` in place of the column: called with columns by name, an entry for each prompt
            it has not seen, returns a name for each.
        columns: dataset columns that the classifier gets; ``raw_prompt`` has the messages of the prompt.

    Raises:
        ConfigError: with everything wrong with the settings.
    """

    provides = frozenset({"reward_scale", "reward_shift"})

    def __init__(
        self,
        routes: Mapping[str, Any],
        default: Mapping[str, Any] | None = None,
        column: str = "data_source",
        classifier: str | None = None,
        columns: Sequence[str] = ("raw_prompt",),
    ) -> None:
        problems: list[df.Problem] = []
        if not isinstance(routes, Mapping) or not routes:
            problems.append(df.Problem("routes", routes, "a mapping of names to routes, at least one"))
            routes = {}
        if DEFAULT in routes:
            accepted = "names of domains; settings of all others stand under default, beside routes"
            problems.append(df.Problem(f"routes.{DEFAULT}", routes[DEFAULT], accepted))
        self.routes = {str(name): read_route(f"routes.{name}", given, problems) for name, given in routes.items()}
        self.default = read_route(DEFAULT, default if default is not None else {}, problems)
        if not isinstance(column, str) or not column:
            problems.append(df.Problem("column", column, "the name of a dataset column"))
        if isinstance(columns, str) or not columns or not all(isinstance(name, str) for name in columns):
            problems.append(df.Problem("columns", columns, "a list of dataset columns, at least one"))
            columns = ()
        self.classify: CachedClassifier | None = None
        if classifier is not None:
            try:
                self.classify = CachedClassifier(load_classifier(classifier), classifier)
            except df.ParameterError as error:
                problems += error.problems
        if problems:
            raise df.ConfigError(problems)
        self._columns = tuple(columns) if classifier is not None else (column,)
        self._table = [*self.routes.values(), self.default]
        self._place = {name: place for place, name in enumerate(self.routes)}
        self._unknown: set[str] = set()
        self.requires = {"post_reward": ("rm_scores", *self._columns)}

    @df.hookimpl
    def post_reward(self, batch: df.RolloutBatch) -> df.RewardDecision:
        """Give every response the scale and the shift of its prompt's route."""
        first = _first_rows(batch.group.cpu().numpy(), batch.n_groups)
        names = self._names({name: batch.column(name)[first] for name in self._columns})
        self._warn([name for name in names if name not in self._place])
        default = len(self._table) - 1
        of_group = np.array([self._place.get(name, default) for name in names], dtype=np.int64)
        route = torch.from_numpy(of_group).to(batch.group.device)[batch.group]
        scale, shift = self._adjust(route, batch)
        return df.RewardDecision(scale=scale, shift=shift, metrics=self._metrics(of_group))

    def _names(self, columns: Mapping[str, NDArray[Any]]) -> list[str]:
        if self.classify is not None:
            return self.classify(columns)
        (values,) = columns.values()
        return [str(value) for value in values]

    def _adjust(self, route: torch.Tensor, batch: df.RolloutBatch) -> tuple[torch.Tensor, torch.Tensor]:
        def table(values: Sequence[float]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float64, device=route.device)[route]

        scale, shift = table([r.scale for r in self._table]), table([r.shift for r in self._table])
        beyond = (batch.n_valid - table([r.free_length for r in self._table])).clamp(min=0)
        shift = shift - table([r.length_penalty for r in self._table]) * beyond
        if any(r.clip for r in self._table):
            scaled = batch.rewards.to(torch.float64) * scale
            low, high = (table([r.clip[end] if r.clip else bound for r in self._table]) for end, bound in _BOUNDS)
            result = scaled + shift
            shift = torch.where((result < low) | (result > high), result.clamp(low, high) - scaled, shift)
        return scale, shift

    def _metrics(self, of_group: NDArray[np.int64]) -> dict[str, float]:
        share = np.bincount(of_group, minlength=len(self._table)) / max(1, len(of_group))
        metrics = {f"share/{name}": float(share[place]) for name, place in self._place.items()}
        metrics[f"share/{DEFAULT}"] = float(share[-1])
        metrics["default_prompts_total"] = float((of_group == len(self._table) - 1).sum())
        if self.classify is not None:
            metrics["classified_prompts"] = float(self.classify.asked)
        return metrics

    def _warn(self, unknown: Sequence[str]) -> None:
        new = sorted(set(unknown) - self._unknown)
        self._unknown.update(new)
        if new:
            text = "no route for %s: those prompts take the default; routes are %s"
            _log.warning(text, ", ".join(map(repr, new)), ", ".join(map(repr, self.routes)))


_BOUNDS = ((0, -float("inf")), (1, float("inf")))


def _first_rows(group: NDArray[np.int64], n_groups: int) -> NDArray[np.int64]:
    """A row of each group, (n_groups,)."""
    first = np.empty(n_groups, dtype=np.int64)
    first[group[::-1]] = np.arange(len(group))[::-1]
    return first
