"""Supervised demonstrations in the batches of a verl reinforcement-learning run."""

from dataflex_sft_mix.plugin import SftMix

__all__ = ["SftMix"]
