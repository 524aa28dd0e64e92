"""The benchmark: ours, each peer and the floor side by side in one run."""
