"""The experts' matmuls of a mixture-of-experts layer: rows sorted by expert, each multiplied by its expert's weight."""
