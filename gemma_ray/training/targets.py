"""Which layers each LoRA target reaches: targets × layers, from what the model is and from the adapter that was made.

    q_proj → q_einsum layers 0-59 (60)
    k_proj → kv_einsum layers 0-4, 6-10, …, 54-58 (50); k_einsum layers 5, 11, …, 59 (10)
    v_proj → kv_einsum layers 0-4, 6-10, …, 54-58 (50); none in layers 5, 11, …, 59 (10): V is K, adapted as k_proj

A pattern of module names that matches `kv_einsum` and not `k_einsum` leaves K out of every global layer of 31B, and nothing fails: training
is only a little worse (arXiv 2605.25645 trained so). `TargetTable.check` makes that an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any, Literal

from gemma_ray.errors import ModelError
from gemma_ray.models.gemma4 import kv_origins
from gemma_ray.training.config import LoraConfig
from gemma_ray.training.lora import MODULES, modules_of

State = Literal["adapted", "absent", "missing"]

K_IS_V = "V is K, adapted as k_proj"
SHARED = "keys and values are an earlier layer's"
EXPERTS = "not adapted (experts): Qwix has no adapter for ragged products; gate_proj, up_proj and down_proj are the dense MLP's"


@dataclass(frozen=True)
class Cell:
    """A target in one layer: the Tunix module that holds it there, or why there is none."""

    module: str | None
    state: State
    why: str = ""


@dataclass(frozen=True)
class TargetRow:
    """One Hugging Face projection in every layer."""

    target: str
    cells: tuple[Cell, ...]

    def layers(self, state: State) -> list[int]:
        """The layers where it is so."""
        return [i for i, cell in enumerate(self.cells) if cell.state == state]

    def describe(self) -> str:
        """One line, layers in ranges."""
        groups: dict[Cell, list[int]] = {}
        for i, cell in enumerate(self.cells):
            groups.setdefault(cell, []).append(i)
        order: list[State] = ["adapted", "missing", "absent"]
        return f"{self.target} → " + "; ".join(_phrase(c, n) for c, n in sorted(groups.items(), key=lambda x: order.index(x[0].state)))


@dataclass(frozen=True)
class TargetTable:
    """Targets × layers. `named` are the targets as the recipe names them, `strangers` adapter parameters that no target asked for."""

    named: tuple[str, ...]
    rows: tuple[TargetRow, ...]
    has_experts: bool
    strangers: tuple[str, ...]

    def describe(self) -> str:
        """A line a target, and one on experts where there are any."""
        return "\n".join([row.describe() for row in self.rows] + ([f"experts → {EXPERTS}"] if self.has_experts else []))

    def check(self) -> None:
        """Raise ModelError unless every target reaches all layers that have it, and no other parameter is adapted."""
        for row in self.rows:
            missing = row.layers("missing")
            if missing:
                modules = sorted({str(row.cells[i].module) for i in missing})
                unnamed = [module for module in modules if module not in modules_of(self.named)]
                remedy = f"name {' and '.join(unnamed)} as well, or {row.target} instead" if unnamed else "no adapter was made for them"
                reached = f"of the {len(row.layers('adapted') + missing)} layers that have it {len(missing)} are left out"
                raise ModelError(
                    f"lora.targets = {', '.join(self.named)}: {row.target} reaches only a part: {reached}, {_ranges(missing)}, "
                    f"where it is {' or '.join(modules)}; {remedy}"
                )
            if not row.layers("adapted"):
                raise ModelError(f"lora.targets: {row.target} is in no layer of this model; leave it out")
        if self.strangers:
            raise ModelError(f"lora.targets = {', '.join(self.named)}: adapted without being named: {', '.join(self.strangers[:3])}")


def target_table(text: Mapping[str, Any], lora: LoraConfig, adapter_leaves: Iterable[str]) -> TargetTable:
    """Where the adapter's parameters (`AbstractModel.adapter_leaves`, paths in Tunix's model) lie among the targets of `lora`.

    `text` is config.json's text part. Targets may have Hugging Face's names or Tunix's. Raises ModelError for a name that is neither.
    """
    wanted = set(modules_of(lora.targets))
    leaves = set(adapter_leaves)
    adapted = {path.rsplit(".", 1)[0] for path in leaves if path.endswith("_lora_a") and f"{path[:-1]}b" in leaves}
    rows = tuple(
        TargetRow(target, tuple(_cell(module, why, i, adapted) for i, (module, why) in enumerate(_holders(text, target))))
        for target, modules in MODULES.items()
        if wanted & set(modules)
    )
    known = {_path(i, cell.module) for row in rows for i, cell in enumerate(row.cells) if cell.module}
    strangers = sorted(path for path in leaves if path.rsplit(".", 1)[0] not in known)
    return TargetTable(tuple(lora.targets), rows, bool(text.get("enable_moe_block")), tuple(strangers))


def _holders(text: Mapping[str, Any], target: str) -> Iterator[tuple[str | None, str]]:
    """For each layer, the module that holds a target; or None and why none does."""
    kinds = text["layer_types"]
    origins = kv_origins(kinds, text.get("num_kv_shared_layers") or 0)
    for i, kind in enumerate(kinds):
        if target not in ("k_proj", "v_proj"):
            yield MODULES[target][0], ""
        elif origins[i] != i:
            yield None, SHARED
        elif kind == "full_attention" and text["attention_k_eq_v"]:
            yield ("k_einsum", "") if target == "k_proj" else (None, K_IS_V)
        else:
            yield "kv_einsum", ""


def _cell(module: str | None, why: str, layer: int, adapted: set[str]) -> Cell:
    if module is None:
        return Cell(None, "absent", why)
    return Cell(module, "adapted" if _path(layer, module) in adapted else "missing")


def _path(layer: int, module: str) -> str:
    return f"layers.{layer}.{'attn' if module.endswith('_einsum') else 'mlp'}.{module}"


def _phrase(cell: Cell, layers: list[int]) -> str:
    where = f"layers {_ranges(layers)} ({len(layers)})" if len(layers) > 1 else f"layer {layers[0]}"
    if cell.state == "absent":
        return f"none in {where}: {cell.why}"
    return f"{cell.module} {where}" + (": MISSING" if cell.state == "missing" else "")


def _ranges(layers: list[int]) -> str:
    """`0-4, 6-10, …, 54-58`: runs, those in the middle left out when there are more than four."""
    runs = [[layer for _, layer in run] for _, run in groupby(enumerate(layers), key=lambda x: x[1] - x[0])]
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs]
    steps = {b[0] - a[0] for a, b in pairwise(runs)}
    return ", ".join(texts if len(texts) <= 4 or len(steps) > 1 else [*texts[:2], "…", texts[-1]])
