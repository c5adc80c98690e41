"""What can be known of a run on a TPU slice without one."""
