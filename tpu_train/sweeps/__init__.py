"""Sweeps: Hydra's multirun, with each job a process and a folder of its own."""
