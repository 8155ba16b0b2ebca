"""One small module a stage, joining `gemma_ray` and `raycluster`. Run one with `python -m workloads.<stage> RECIPE`."""
