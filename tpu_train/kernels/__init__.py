"""Kernels: JAX functions as PyTorch ops, one folder an op, and the rewriting of models that puts them in."""
