"""Presets of this package: ``+dataflex=kl_guard``."""
