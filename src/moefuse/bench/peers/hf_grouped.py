"""transformers' default: tokens sorted by expert, torch's grouped product."""

from moefuse.bench.peers._transformers import TransformersPeer

PEER = TransformersPeer("hf-grouped", "grouped_mm")
