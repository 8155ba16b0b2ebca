"""A seeded generator of requests in words and the Verilog that answers them, every answer simulated before it is written."""

from gemma_ray.data.verilog.corpus import raw_verilog
from gemma_ray.data.verilog.dataset import DatasetSummary, training_texts, write_dataset
from gemma_ray.data.verilog.families import FAMILIES

__all__ = ["FAMILIES", "DatasetSummary", "raw_verilog", "training_texts", "write_dataset"]
