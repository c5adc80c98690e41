"""Capture: a training step of PyTorch code as one FX graph, and what is done to that graph."""
