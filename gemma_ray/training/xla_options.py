"""Options of XLA that the training step is compiled with, by kind of device, on the chip and in a plan alike."""

from __future__ import annotations

_V5P: dict[str, bool | int | str] = {
    # Let a fusion use 64 MiB of vector memory instead of 16: matrix products get larger tiles (docs/planning.md).
    # Not on v6e, whose own limit is larger: there it made E4B's step no faster, and its compilation half as long again.
    "xla_tpu_scoped_vmem_limit_kib": 65536,
}

OPTIONS = {"TPU v5": _V5P, "TPU v5p": _V5P}
"""By JAX's `device_kind`; v5p goes by both names."""


def xla_options(device_kind: str) -> dict[str, bool | int | str]:
    """Compiler options for a kind of device; none where none are needed."""
    return OPTIONS.get(device_kind, {})
