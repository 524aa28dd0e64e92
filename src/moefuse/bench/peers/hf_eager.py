"""transformers' loop over the experts that have tokens."""

from moefuse.bench.peers._transformers import TransformersPeer

PEER = TransformersPeer("hf-eager", "eager", graph_refusal="it reads the chosen experts back to the host")
