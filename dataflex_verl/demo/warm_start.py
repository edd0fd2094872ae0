"""Supervised warm start: gives the model the skills and, on purpose, bad habits for reinforcement learning to undo.

The first half of the steps teaches right answers only. In the second half the teacher slips: it gives a right answer
with the domain's ``right_share`` and otherwise one of the task's slips. Sampled at temperature 1, the model then
answers well in some rollouts of a prompt and badly in others, which is what group-relative advantages learn from.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM, PreTrainedTokenizerBase

from dataflex_verl.demo.tasks import DOMAINS, Task

IGNORED = -100


@dataclass(frozen=True)
class WarmStart:
    """Settings of the warm start.

    Attributes:
        steps: optimizer steps, a one-cycle learning-rate schedule over all of them.
        batch_size: examples a step, shared by the domains in proportion to ``weights``.
        learning_rate: peak of the schedule.
        slip_from: share of the steps after which the teacher slips.
        weights: domain -> relative number of examples; domains not named have 1.
    """

    steps: int = 350
    batch_size: int = 96
    learning_rate: float = 5e-3
    slip_from: float = 0.5
    weights: tuple[tuple[str, float], ...] = (("add", 1.6),)


def encode(tokenizer: PreTrainedTokenizerBase, pairs: Sequence[tuple[str, str]]) -> tuple[Tensor, Tensor]:
    """Tokens and labels of (question, answer) pairs, right padded.

    Returns:
        ``input_ids`` and ``labels``, both ``(len(pairs), longest)`` int64. Labels are ``IGNORED`` but on the answer and
        the end token that follows it.
    """
    user = [[{"role": "user", "content": question}] for question, _ in pairs]
    both = [[*turn, {"role": "assistant", "content": answer}] for turn, (_, answer) in zip(user, pairs, strict=True)]
    prompts = tokenizer.apply_chat_template(user, tokenize=False, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(both, tokenize=False)
    starts = [len(ids) for ids in tokenizer(prompts, add_special_tokens=False)["input_ids"]]
    sequences = tokenizer(whole, add_special_tokens=False)["input_ids"]
    longest = max(map(len, sequences))
    input_ids = torch.full((len(pairs), longest), tokenizer.pad_token_id)
    labels = torch.full((len(pairs), longest), IGNORED)
    for row, (sequence, start) in enumerate(zip(sequences, starts, strict=True)):
        input_ids[row, : len(sequence)] = torch.tensor(sequence)
        labels[row, start : len(sequence)] = torch.tensor(sequence[start:])
    return input_ids, labels


class _Teacher:
    """Draws batches of examples: every domain's share of the batch, with right answers or with slips among them."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, tasks: Sequence[Task], seed: int, settings: WarmStart
    ) -> None:
        # Rows of one task are neighbours: the right answer, then its slips.
        pairs = [(task.question, answer) for task in tasks for answer in (task.answer, *task.slips)]
        self.input_ids, self.labels = encode(tokenizer, pairs)
        self.slips = torch.tensor([len(task.slips) for task in tasks])
        self.first_row = (1 + self.slips).cumsum(0) - (1 + self.slips)

        names = [name for name in DOMAINS if any(task.domain == name for task in tasks)]
        self.members = [torch.tensor([i for i, task in enumerate(tasks) if task.domain == name]) for name in names]
        weights = torch.tensor([dict(settings.weights).get(name, 1.0) for name in names])
        self.counts: list[int] = (settings.batch_size * weights / weights.sum()).round().int().tolist()
        self.right_share = torch.tensor([DOMAINS[name].right_share for name in names])
        self.right_share = self.right_share.repeat_interleave(torch.tensor(self.counts))
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, may_slip: bool) -> tuple[Tensor, Tensor]:
        """Tokens and labels of one batch, both ``(about batch_size, longest)``."""
        drawn = torch.cat(
            [
                ids[torch.randint(len(ids), (count,), generator=self.generator)]
                for ids, count in zip(self.members, self.counts, strict=True)
            ]
        )
        rows = self.first_row[drawn]
        if may_slip:
            wrong = torch.rand(len(drawn), generator=self.generator) >= self.right_share
            which = 1 + (torch.rand(len(drawn), generator=self.generator) * self.slips[drawn]).long()
            rows = rows + torch.where(wrong, which, 0)
        return self.input_ids[rows], self.labels[rows]


def warm_start(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerBase,
    tasks: Sequence[Task],
    seed: int,
    settings: WarmStart,
) -> float:
    """Train ``model`` in place on ``tasks`` and return the last step's loss (nats a token).

    Bit for bit the same for one seed on one machine: it runs on one thread and draws from its own generator.
    """
    teacher = _Teacher(tokenizer, tasks, seed, settings)
    rate = settings.learning_rate
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=settings.steps, pct_start=0.1)
    loss = torch.zeros(())
    model.train()
    with _one_thread():
        for step in range(settings.steps):
            input_ids, labels = teacher.draw(may_slip=step >= settings.slip_from * settings.steps)
            logits = model(input_ids=input_ids, use_cache=False).logits
            loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    model.eval()
    return loss.item()


@contextmanager
def _one_thread() -> Iterator[None]:
    """Run torch on one thread: sums depend on the number of threads, and matrices this small gain nothing from more."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
