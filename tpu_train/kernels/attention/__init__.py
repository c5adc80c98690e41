"""Causal attention within packed documents: one definition, and implementations that never hold an S x S array."""
