"""tpu-train: PyTorch models on TPUs from YAML, the whole training step as one XLA program."""
