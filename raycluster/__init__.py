"""The cluster's side: accelerators to hosts, slices and placement, the JAX trainer, emulation. Knows no model."""
