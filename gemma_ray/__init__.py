"""LoRA fine-tuning, serving and evaluation of Gemma 4 on TPU slices, GPU nodes and emulated slices.

This package is the model's side: it knows models, data and metrics, and never schedules. `raycluster` knows hosts and slices;
`workloads` joins the two, one small module a stage.
"""
