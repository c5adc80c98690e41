"""How a single-device model is laid over a mesh of devices: the mesh, plans, layouts and the collectives they make."""
