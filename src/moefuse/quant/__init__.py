"""What the bytes of quantised weights mean: formats, blocks, tensors, files. Knows no backend."""
