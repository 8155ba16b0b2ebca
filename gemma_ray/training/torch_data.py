"""The batches of the JAX trainer as what a rank of PyTorch's processes feeds to a Transformers model.

A batch is read once, by `gemma_ray.data.source.batches`, and its rows are the same for both engines; a rank takes its share of them, in
as many parts as there are micro-batches. Two conventions differ and are bridged here:

- Transformers shifts labels inside the loss: position t is scored on label t + 1. So a label stands at the token that is predicted, and is
  IGNORED at the first token of a document, which no other document predicts.
- No mask is passed. Transformers takes a row whose positions restart for a packed one, and lets a token attend to its own document only;
  padding, all of it at position 0, is as many documents of one token.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from gemma_ray.data.source import batches
from gemma_ray.training.torch_job import TorchJob

IGNORED = -100
"""The label of a token that bears no loss."""


def labels_of(batch: dict[str, np.ndarray]) -> np.ndarray:
    """Labels [rows, length] int64 for a model that shifts them: the token where predicting it is trained, else IGNORED.

    `gemma_ray.training.loss.targets_and_weights` says the same, moved by one position.
    """
    continues = np.zeros(batch["segments"].shape, bool)
    continues[:, 1:] = batch["segments"][:, 1:] == batch["segments"][:, :-1]
    return np.where(batch["loss_mask"] & continues, batch["tokens"], IGNORED).astype(np.int64)


def model_inputs(batch: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """What the model is called with: `input_ids`, `position_ids` and `labels`, each [rows, length] int64."""
    return {
        "input_ids": torch.from_numpy(batch["tokens"].astype(np.int64)),
        "position_ids": torch.from_numpy(batch["positions"].astype(np.int64)),
        "labels": torch.from_numpy(labels_of(batch)),
    }


class RankBatches(IterableDataset[dict[str, Any]]):
    """One rank's micro-batches, endlessly: `model_inputs`, and under `tokens` how many of them are no padding."""

    def __init__(self, job: TorchJob, rank: int, ranks: int):
        share = job.train.batch_size // ranks
        self.parts = job.train.micro_batches
        rows = range(rank * share, (rank + 1) * share)
        self.source: Any = batches(job.data, batch_size=job.train.batch_size, seq_len=job.seq_len, seed=job.train.seed, rows=rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self.source:
            for rows in np.split(np.arange(len(batch["tokens"])), self.parts):
                part = {key: value[rows] for key, value in batch.items()}
                yield {**model_inputs(part), "tokens": int((part["segments"] > 0).sum())}

    def get_state(self) -> dict[str, Any]:
        """Where the data stands, the same on every rank; take it between steps."""
        return self.source.get_state()

    def set_state(self, state: dict[str, Any]) -> None:
        """Continue from there."""
        self.source.set_state(state)
