"""Supervised warm start: gives the model the skills and, on purpose, bad habits for reinforcement learning to undo.

The first half of the steps teaches right answers only. In the second half the teacher slips: it gives a right answer
with the domain's ``right_share`` and otherwise one of the task's slips. Sampled at temperature 1, the model then answers
well in some rollouts of a prompt and badly in others, which is what group-relative advantages learn from.
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
    sequences, starts = [], []
    for question, answer in pairs:
        user, assistant = {"role": "user", "content": question}, {"role": "assistant", "content": answer}
        prompt = tokenizer.apply_chat_template([user], tokenize=False, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template([user, assistant], tokenize=False)
        starts.append(len(tokenizer(prompt, add_special_tokens=False)["input_ids"]))
        sequences.append(tokenizer(whole, add_special_tokens=False)["input_ids"])
    longest = max(map(len, sequences))
    input_ids = torch.full((len(pairs), longest), tokenizer.pad_token_id)
    labels = torch.full((len(pairs), longest), IGNORED)
    for row, (sequence, start) in enumerate(zip(sequences, starts, strict=True)):
        input_ids[row, : len(sequence)] = torch.tensor(sequence)
        labels[row, start : len(sequence)] = torch.tensor(sequence[start:])
    return input_ids, labels


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
    domains = [name for name in DOMAINS if any(task.domain == name for task in tasks)]
    # Rows of one task are neighbours: the right answer, then its slips.
    pairs = [(task.question, answer) for task in tasks for answer in (task.answer, *task.slips)]
    first_row = torch.tensor([0, *(1 + len(task.slips) for task in tasks)]).cumsum(0)[:-1]
    slips = torch.tensor([len(task.slips) for task in tasks])
    members = [torch.tensor([i for i, task in enumerate(tasks) if task.domain == name]) for name in domains]
    weights = dict(settings.weights)
    total = sum(weights.get(name, 1.0) for name in domains)
    counts = [round(settings.batch_size * weights.get(name, 1.0) / total) for name in domains]
    right_share = torch.cat([torch.full((n,), DOMAINS[d].right_share) for d, n in zip(domains, counts, strict=True)])

    input_ids, labels = encode(tokenizer, pairs)
    rate = settings.learning_rate
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.99), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=settings.steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(seed)
    loss = torch.zeros(())
    model.train()
    with _one_thread():
        for step in range(settings.steps):
            drawn = torch.cat(
                [ids[torch.randint(len(ids), (n,), generator=generator)] for ids, n in zip(members, counts, strict=True)]
            )
            which = 1 + (torch.rand(len(drawn), generator=generator) * slips[drawn]).long()
            wrong = torch.rand(len(drawn), generator=generator) >= right_share
            if step < settings.slip_from * settings.steps:
                wrong = torch.zeros_like(wrong)
            rows = first_row[drawn] + torch.where(wrong, which, 0)
            logits = model(input_ids=input_ids[rows], use_cache=False).logits
            targets = labels[rows, 1:].flatten()
            loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1), targets, ignore_index=IGNORED)
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
