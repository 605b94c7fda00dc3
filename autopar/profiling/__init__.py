"""Hardware measured here: what kernels and collectives take on the ranks that run, written as a cluster file."""
