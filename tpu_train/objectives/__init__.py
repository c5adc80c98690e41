"""What is minimized: losses as a sum and a weight, and the model FLOPs they take."""
