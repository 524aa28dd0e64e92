"""What kernels are launched, replayed and tuned with."""
