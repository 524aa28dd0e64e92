"""transformers' decode path: each assignment's weights gathered, then a batched product."""

from moefuse.bench.peers._transformers import TransformersPeer

PEER = TransformersPeer("hf-batched", "batched_mm", gathers_weights=True)
