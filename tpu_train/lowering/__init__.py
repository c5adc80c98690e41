"""FX graphs of ATen ops to JAX functions: one table for every execution mode and every tool."""
