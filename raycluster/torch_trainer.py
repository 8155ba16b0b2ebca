"""One PyTorch program on every GPU of a slice: what `raycluster.trainer.run_spmd` is given as `build` for it.

    driver: run_spmd(fn, config, slice, build=torch_trainer)
        -> Ray Train controller -> one worker process a GPU -> torch.distributed (nccl) -> fn(config) in each
        <- what fn returned in rank 0, or WorkerError with the worker's own message

This is Ray's TorchTrainer. On `cpu` and on emulated hosts the processes are as many and meet over gloo; emulated GPUs are scheduled as
GPUs are, and the program finds none. Nobody waits for SIGTERM in these processes: a preempted run goes on from its last checkpoint.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from raycluster.attempt import Program, controlled
from raycluster.availability import NODE, Survey
from raycluster.errors import ClusterError
from raycluster.reports import Outlet
from raycluster.slices import Slice
from raycluster.worker import run_program


def check_runs_torch(slice: Slice) -> None:
    """Raise ClusterError for a slice of real TPUs."""
    if slice.resource == "TPU" and not slice.emulate:
        raise ClusterError(f"{slice.describe()}: a PyTorch program runs on GPUs or CPUs; choose such an accelerator, or JAX's engine")


def torch_trainer(
    program: Program, config: dict[str, Any], slice: Slice, found: Survey, outlet: Outlet, name: str, storage: str | Path
) -> Any:
    """A `raycluster.attempt.Build`: `torch.distributed` has `slice.devices` ranks when the program is called.

    Raises ClusterError for TPUs, which PyTorch's programs here do not run on.
    """
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig
    from ray.train.v2.torch.torch_trainer import TorchTrainer

    check_runs_torch(slice)
    on_cpu = slice.forces_host_devices
    run = RunConfig(
        name=name,
        storage_path=str(storage if "://" in str(storage) else Path(storage).expanduser().absolute()),
        worker_runtime_env={"env_vars": {"JAX_PLATFORMS": "cpu"}},  # what shares code with JAX's engine must not take a GPU's memory
        # Without limits Ray tries for ever to start workers that cannot start, and to replace hosts that were taken away.
        failure_config=FailureConfig(max_failures=0, controller_failure_limit=1, max_preemption_failures=0),
    )
    on_hosts = [{NODE: node} for node in found.hosts or () for _ in range(slice.devices_per_host)]
    scaling = ScalingConfig(
        num_workers=slice.devices,
        resources_per_worker=worker_resources(slice),
        use_gpu=slice.resource == "GPU",
        accelerator_type=slice.accelerator_type,
        label_selector=on_hosts if slice.resource == "GPU" else None,
    )
    call = {"program": _on_cpu(program) if on_cpu else program, "config": config, "outlet": outlet, "one_emulated_host": False}
    backend = TorchConfig(backend="gloo" if on_cpu else "nccl")
    return controlled(TorchTrainer)(run_program, train_loop_config=call, torch_config=backend, scaling_config=scaling, run_config=run)


def worker_resources(slice: Slice) -> dict[str, float]:
    """Ray resources of the one process on each device. On `cpu` a host's processes share the one CPU that the slice takes there."""
    if slice.resource == "CPU":
        return {"CPU": 10_000 // slice.devices_per_host / 10_000}  # Ray counts in ten-thousandths
    return {slice.resource: 1}


def _on_cpu(program: Program) -> Program:
    """The program where accelerate sees a CPU: Ray names it the GPU that it believes an emulated host to have."""

    def run(config: dict[str, Any]) -> Any:
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"
        return program(config)

    return run
