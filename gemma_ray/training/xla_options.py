"""Options of XLA that the training step is compiled with, by platform, on the chip and in a plan alike."""

from __future__ import annotations

OPTIONS: dict[str, dict[str, bool | int | str]] = {
    "tpu": {
        # Let a fusion use 64 MiB of vector memory instead of 16: matrix products get larger tiles (docs/planning.md).
        "xla_tpu_scoped_vmem_limit_kib": 65536,
    },
}


def xla_options(platform: str) -> dict[str, bool | int | str]:
    """Compiler options for a JAX platform (`tpu`, `gpu`, `cpu`); none where none are needed."""
    return OPTIONS.get(platform, {})
