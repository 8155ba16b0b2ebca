"""One PyTorch program on every GPU of a slice, under the contract of `raycluster.trainer`: reports, restarts, errors, Ctrl-C.

    driver: run_torch(fn, config, slice)
        -> Ray Train controller -> one worker process a GPU -> torch.distributed (nccl) -> fn(config) in each
        <- what fn returned in rank 0, or WorkerError with the worker's own message

This is Ray's TorchTrainer. On `cpu` and on emulated hosts the processes are as many and meet over gloo; emulated GPUs are scheduled as
GPUs are, and the program finds none.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from raycluster.emulation import environment
from raycluster.errors import ClusterError, RemoteError, WorkerError
from raycluster.reports import Outlet, delivery
from raycluster.slices import Slice
from raycluster.trainer import LOCAL_ENVIRONMENT, STARVED, TRAIN_ENVIRONMENT, Program, _fit, _Interruptible, _starved, _worker

log = logging.getLogger(__name__)


def run_torch(
    worker_fn: Program,
    config: dict[str, Any],
    slice: Slice,
    *,
    name: str,
    storage: str | Path,
    max_failures: int = 0,
    on_report: Callable[[dict[str, Any]], None] | None = None,
) -> Any:
    """Run `worker_fn(config)` in one process on each device of the slice, and return what rank 0's call returned.

    `torch.distributed` is initialised before the call, with `slice.devices` ranks. The arguments, reports, restarts and errors are those
    of `raycluster.trainer.run_spmd`. Raises ClusterError for TPUs, which PyTorch's programs here do not run on.
    """
    check_runs_torch(slice)
    reports, starved = 0, 0

    def counted(report: dict[str, Any]) -> None:
        nonlocal reports
        reports += 1
        assert on_report is not None
        on_report(report)

    with delivery(counted if on_report else None) as outlet:
        for attempt in range(max_failures + 1):
            before = reports
            trainer = _torch_trainer(worker_fn, config, slice, name, storage, outlet)
            try:
                with environment(TRAIN_ENVIRONMENT | (LOCAL_ENVIRONMENT if slice.forces_host_devices else {})):
                    return _fit(trainer)
            except RemoteError as failure:
                if failure.deliberate or attempt == max_failures:
                    raise failure.to_error() from None
                starved = starved + 1 if _starved(failure, silent=on_report is not None and reports == before) else 0
                if starved == 2:
                    raise WorkerError(f"{failure.to_error()}; {STARVED}", traceback=failure.traceback) from None
                log.error("%s: %s; restart %d of %d", name, failure.to_error(), attempt + 1, max_failures)
    raise AssertionError("unreachable")


def check_runs_torch(slice: Slice) -> None:
    """Raise ClusterError for a slice of real TPUs."""
    if slice.resource == "TPU" and not slice.emulate:
        raise ClusterError(f"{slice.describe()}: a PyTorch program runs on GPUs or CPUs; choose such an accelerator, or JAX's engine")


def _torch_trainer(program: Program, config: dict[str, Any], slice: Slice, name: str, storage: str | Path, outlet: Outlet | None) -> Any:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig
    from ray.train.v2.torch.torch_trainer import TorchTrainer

    on_cpu = slice.forces_host_devices
    run = RunConfig(
        name=name,
        storage_path=str(storage if "://" in str(storage) else Path(storage).expanduser().absolute()),
        worker_runtime_env={"env_vars": {"JAX_PLATFORMS": "cpu"}},  # what shares code with JAX's engine must not take a GPU's memory
        # Without a limit Ray tries for ever to start workers that cannot start.
        failure_config=FailureConfig(max_failures=0, controller_failure_limit=2),
    )
    scaling = ScalingConfig(
        num_workers=slice.devices,
        resources_per_worker=worker_resources(slice),
        use_gpu=slice.resource == "GPU",
        accelerator_type=slice.accelerator_type,
    )
    call = {"program": _on_cpu(program) if on_cpu else program, "config": config, "outlet": outlet, "one_emulated_host": False}
    kind = type("TorchSliceTrainer", (_Interruptible, TorchTrainer), {})
    backend = TorchConfig(backend="gloo" if on_cpu else "nccl")
    return kind(_worker, train_loop_config=call, torch_config=backend, scaling_config=scaling, run_config=run)


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
