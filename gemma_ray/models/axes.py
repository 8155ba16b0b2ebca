"""Names of the mesh's axes. Imports nothing: a recipe is checked before JAX is."""

AXES = ("data", "fsdp", "tp")
"""Of every mesh: `data` has a slice in each place, and only gradients are summed over it."""
ROWS_OVER = ("data", "fsdp")
"""What a batch's rows are cut by."""
