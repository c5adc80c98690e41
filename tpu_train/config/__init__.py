"""The configuration: a schema of frozen dataclasses, Hydra's composition, and the strict step from one to the other."""
