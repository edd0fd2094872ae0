"""Packages of plugins to begin with: what ``dataflex new`` writes."""
