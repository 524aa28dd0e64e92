"""Decoders of GGUF blocks."""
