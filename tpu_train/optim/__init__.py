"""Functional optimizers and schedules: plain torch operations that are captured with the training step."""
