"""Running captured programs on devices."""
