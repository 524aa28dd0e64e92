"""Modules. Parameters live here and only here."""

from moefuse.nn.moe import MoE

__all__ = ["MoE"]
