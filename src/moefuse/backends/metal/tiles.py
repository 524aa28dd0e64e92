"""Sizes that choose between kernels, in one table. None is measured: no Apple GPU was at hand (docs/metal.md)."""

from __future__ import annotations

#: rows and columns of a product tile, as tiles.metal has them
TILE_M, TILE_N = 32, 64

#: at or under this many tokens each assignment is a matrix-vector product of its own
DECODE_TOKENS = 8

#: a router of at most this many elements is read by one threadgroup, in the same launch that routes
WHOLE_ROUTER = 2**18

#: above this many tokens the router is a product in tiles
GATE_DECODE_TOKENS = 32
