"""The plugin ``sft_mix``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from dataflex_hooks import AddedRow, ParameterChecks, RewardDecision, RolloutBatch, StepContext, hookimpl
from dataflex_sft_mix.amount import Share, whole
from dataflex_sft_mix.files import Columns, read
from dataflex_sft_mix.order import ShuffledOrder
from dataflex_sft_mix.tokens import Tokenizer, tokenize


class SftMix:
    """Every ``every`` steps, trains on demonstrations beside the rollouts of the step.

    Args:
        data: a Parquet or JSONL file, or several.
        prompt_key, response_key: columns. A prompt is text (taken as it stands), chat messages (through the
            tokenizer's template, as verl's rollouts are) or token ids; a response text or token ids.
        domain_key: column with the row's domain; may be absent unless ``domains`` is given. None: rows have none.
        domains: take only rows of these domains; None takes all.
        share: demonstrations per rollout of the step, 0 to 1, or a schedule ``{step: share}``. Rounded down, the rest
            carried to the next time.
        every: mixes in steps that are a multiple of it.
        decay, decay_steps, min_share: how the share falls, see :class:`~dataflex_sft_mix.amount.Share`.
        advantage: of every demonstration token, above 0; the weight of demonstrations in the policy gradient.
        too_long: ``error`` refuses rows longer than the run allows at start, ``skip`` leaves them out.
        seed: of the order; None takes the run's.
        end: whether the tokenizer's end of sequence follows a response given as text.
        tokenizer: where it lies; None takes the policy's own.
        trust_remote_code: whether code that comes with the tokenizer may run.
        chat_template_kwargs: for its chat template, as ``data.apply_chat_template_kwargs``.
        prompt_length, response_length, tokenizer_path: facts of the run, from the host.

    Raises:
        ConfigError: everything wrong with the parameters; else everything wrong with the files, by line.
    """

    provides = frozenset({"add"})
    host_keywords = frozenset({"prompt_length", "response_length", "tokenizer_path"})

    def __init__(
        self,
        data: str | Sequence[str],
        prompt_key: str = "prompt",
        response_key: str = "response",
        domain_key: str | None = "domain",
        domains: Sequence[str] | None = None,
        share: float | Mapping[int, float] = 0.125,
        every: int = 1,
        decay: str = "none",
        decay_steps: int | None = None,
        min_share: float = 0.0,
        advantage: float = 1.0,
        too_long: str = "error",
        seed: int | None = None,
        end: bool = True,
        tokenizer: str | None = None,
        trust_remote_code: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        prompt_length: int | None = None,
        response_length: int | None = None,
        tokenizer_path: str | None = None,
    ) -> None:
        checks = ParameterChecks()
        paths = [data] if isinstance(data, str) else data
        if not isinstance(paths, (list, tuple)) or not paths or not all(isinstance(path, str) for path in paths):
            checks.refuse("data", data, "the name of a Parquet or JSONL file, or a list of such names")
        names = None if domains is None else tuple(domains) if isinstance(domains, (list, tuple)) else ()
        if names is not None and not (names and all(isinstance(name, str) for name in names)):
            checks.refuse("domains", domains, "null, or a list of domain names")
        if names and domain_key is None:
            checks.refuse("domain_key", domain_key, "the column of the domains that are asked for")
        self.share = Share(share, decay, decay_steps, min_share, checks)
        self.every = checks.integer("every", every, at_least=1)
        self.advantage = checks.number("advantage", advantage, above=0)
        self.seed = None if seed is None else checks.integer("seed", seed, at_least=0)
        skip_long = checks.choice("too_long", too_long, ("error", "skip")) == "skip"
        checks.flag("end", end)
        checks.flag("trust_remote_code", trust_remote_code)
        if chat_template_kwargs is not None and not isinstance(chat_template_kwargs, Mapping):
            checks.refuse("chat_template_kwargs", chat_template_kwargs, "null, or a mapping")
        checks.finish()
        rows = read(paths, Columns(prompt_key, response_key, domain_key, names))
        how = Tokenizer(tokenizer or tokenizer_path, trust_remote_code, end, chat_template_kwargs or {})
        self.demonstrations = tokenize(rows, how, prompt_length, response_length, skip_long)
        self._order = ShuffledOrder(len(self.demonstrations))
        self._carried = Fraction(0)

    @hookimpl
    def post_reward(self, batch: RolloutBatch, ctx: StepContext) -> RewardDecision | None:
        """Return the demonstrations that are due at this step; None in a step that does not mix."""
        if ctx.step % self.every:
            return None
        share = self.share.at(ctx.step)
        due, self._carried = whole(share, batch.n_sessions, self._carried)
        seed = abs(ctx.seed) if self.seed is None else self.seed
        add = [self._added(row) for row in self._order.take(due, seed)]
        metrics = {
            "share": float(share),
            "epoch": float(self._order.epoch),
            "demonstrations_total": float(due),
            "left_out": float(self.demonstrations.left_out),
        }
        return RewardDecision(add=add, metrics=metrics)

    def _added(self, row: int) -> AddedRow:
        data = self.demonstrations
        return AddedRow(data.prompts.row(row), data.responses.row(row), self.advantage, domain=data.domains[row])

    def state_dict(self) -> dict[str, Any]:
        """Return where in the demonstrations the run is, and what fraction of one is owed."""
        return {
            "data": self.demonstrations.fingerprint(),
            "epoch": self._order.epoch,
            "position": self._order.position,
            "carried": str(self._carried),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there.

        Raises:
            ValueError: the state is that of other demonstrations.
        """
        here = self.demonstrations.fingerprint()
        if state["data"] != here:
            raise ValueError(
                f"it is of other demonstrations (fingerprint {state['data']}, these have {here}): give the same files, "
                "filters and tokenizer, or begin anew with +dataflex.resume=fresh"
            )
        self._order.epoch, self._order.position = state["epoch"], state["position"]
        self._carried = Fraction(state["carried"])
