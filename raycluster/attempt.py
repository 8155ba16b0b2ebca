"""One attempt of `run_spmd` under Ray Train: the trainer it makes, and what became of it.

On TPU and GPU, real or emulated, this is Ray's JaxTrainer; an emulated host differs only in its environment, which gives JAX CPU devices
in place of chips. On `cpu` it is Ray's data-parallel trainer with `cpu_backend`.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ray.train.v2._internal.execution.callback import WorkerGroupCallback

from raycluster.availability import NAME, NODE, Survey
from raycluster.emulation import environment
from raycluster.errors import RemoteError
from raycluster.reports import Outlet
from raycluster.slices import Slice
from raycluster.watch import Watch
from raycluster.worker import run_program

Program = Callable[[dict[str, Any]], Any]
Build = Callable[[Program, dict[str, Any], Slice, Survey, Outlet, str, "str | Path"], Any]
"""Makes the Ray trainer of an attempt from program, config, slice, hosts found, outlet, name and storage: a `controlled` one that runs
`raycluster.worker.run_program`."""

# Read by Ray Train in the driver. Its default is to change into a folder of its own, which breaks every relative path of a program. Its
# watcher of preemptions waits out a grace period after the workers have saved; `raycluster.watch` looks at the same notices. The hosts are
# known to be free when it starts its workers, so it need not wait long for them.
TRAIN_ENVIRONMENT = {
    "RAY_CHDIR_TO_TRIAL_DIR": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "30",
}
# On one machine a poll costs nothing: a run ends, and a dead worker is seen, up to 2 s sooner.
LOCAL_ENVIRONMENT = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2"}
# How long Ctrl-C waits for the workers to stop in good order.
ABORT_S = 10.0


def run_attempt(trainer: Any, slice: Slice, watch: Watch) -> Any:
    """Run what `Build` made, under the watch; returns what process 0's call returned.

    Raises RemoteError, and KeyboardInterrupt on Ctrl-C after stopping the workers.
    """
    with environment(TRAIN_ENVIRONMENT | (LOCAL_ENVIRONMENT if slice.forces_host_devices else {})), watch.over(trainer.stop):
        return _fit(trainer)


def worker_environment(slice: Slice) -> dict[str, str]:
    """Environment variables of the worker processes: none on real accelerators, CPU devices in their place otherwise."""
    if not slice.forces_host_devices:
        return {}
    return {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={slice.devices_per_host}",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
    }


def jax_trainer(
    program: Program, config: dict[str, Any], slice: Slice, found: Survey, outlet: Outlet, name: str, storage: str | Path
) -> Any:
    """JaxTrainer, or its equal for `cpu`."""
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
    from ray.train.v2.jax import JaxTrainer

    from raycluster.cpu_backend import CpuJaxConfig

    pinned: Any = [_Pinned(slice, found)] if slice.topology else None  # Ray takes its internal kind here too, and declares the public one
    run = RunConfig(
        name=name,
        storage_path=str(storage if "://" in str(storage) else Path(storage).expanduser().absolute()),
        worker_runtime_env={"env_vars": worker_environment(slice)},
        # Without limits Ray tries for ever to start workers that cannot start, and to replace hosts that were taken away.
        failure_config=FailureConfig(max_failures=0, controller_failure_limit=1, max_preemption_failures=0),
        callbacks=pinned,
    )
    one_emulated_host = slice.forces_host_devices and slice.hosts == 1
    call = {"program": program, "config": config, "outlet": outlet, "one_emulated_host": one_emulated_host}
    scaling = ScalingConfig(
        num_workers=slice.hosts,
        resources_per_worker=slice.worker_resources,
        placement_strategy="SPREAD",
        use_tpu=slice.resource == "TPU",
        use_gpu=slice.resource == "GPU",
        topology=slice.topology,
        accelerator_type=slice.accelerator_type,
        label_selector=[{NODE: node} for node in found.hosts or ()] if slice.resource == "GPU" else None,
    )
    arguments: dict[str, Any] = {"train_loop_config": call, "scaling_config": scaling, "run_config": run}
    if slice.resource == "CPU":
        return controlled(DataParallelTrainer)(run_program, backend_config=CpuJaxConfig(), **arguments)
    return controlled(JaxTrainer)(run_program, **arguments)


def _fit(trainer: Any) -> Any:
    """Run a Ray trainer; its errors come out as RemoteError."""
    from ray.exceptions import RayActorError, RayError
    from ray.train import TrainingFailedError, WorkerGroupError
    from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError, WorkerGroupStartupTimeoutError

    try:
        return trainer.fit().return_value
    except KeyboardInterrupt:
        trainer.stop()
        raise
    except WorkerGroupError as e:
        raise _first_cause(e.worker_failures) from None
    except RayActorError as e:  # Ray's controller was on a host that was lost
        trainer.stop()
        raise RemoteError.death("Ray Train's controller", str(e)) from None
    except (TrainingFailedError, RayError) as e:
        # The controller has tried as often as it may: its last line is the cause, and an exit code ends it here unless a host was lost.
        cause = str(e).strip().rpartition("\n")[2].strip()
        lost = isinstance(getattr(e, "controller_failure", None), WorkerGroupStartupFailedError | WorkerGroupStartupTimeoutError)
        raise RemoteError(type(e).__name__, f"the workers did not start: {cause}", None if lost else 1, str(e)) from None


def _first_cause(failures: dict[int, Exception]) -> RemoteError:
    """The failure that explains the others: that all was saved, one raised on purpose, a death, or what the program raised first by rank.

    When a worker stops, the others fail in the collective that they were in.
    """
    raised = [error for _, error in sorted(failures.items()) if isinstance(error, RemoteError)]
    preempted = [failure for failure in raised if failure.preempted]
    deliberate = [failure for failure in raised if failure.deliberate]
    deaths = [
        RemoteError.death(f"process {rank}", str(error)) for rank, error in sorted(failures.items()) if not isinstance(error, RemoteError)
    ]
    return [*preempted, *deliberate, *deaths, *raised][0]


class _Pinned(WorkerGroupCallback):
    """Keeps Ray Train's workers on the hosts that were found free, in their order.

    Ray's own reservation takes any slice whose worker 0 is free, though others of its hosts may be busy, and for a slice of one host any
    node with as many chips. It runs in Ray's controller, and gives the reservation the label selectors that it has a parameter for, and
    that ScalingConfig (Ray 2.60) does not pass on.
    """

    def __init__(self, slice: Slice, found: Survey) -> None:
        several_hosts = slice.hosts_per_slice > 1
        names = [name for name in found.names for _ in range(slice.hosts_per_slice)]
        self.selectors = [
            {NODE: node, **({NAME: name} if several_hosts else {})} for node, name in zip(found.hosts or (), names, strict=True)
        ]

    @contextlib.contextmanager
    def on_worker_group_start(self) -> Iterator[None]:
        module: Any = importlib.import_module("ray.train.v2._internal.execution.worker_group.worker_group")
        original = module.SlicePlacementGroup
        module.SlicePlacementGroup = functools.partial(original, bundle_label_selector=self.selectors)
        try:
            yield
        finally:
            module.SlicePlacementGroup = original


def controlled(kind: type) -> Any:
    """A kind of Ray trainer that Ctrl-C and the watch can stop."""
    return type(f"Controlled{kind.__name__}", (_Interruptible, kind), {})


class _Interruptible:
    """Mixin for Ray's trainers: Ctrl-C raises KeyboardInterrupt here, as everywhere in Python, and `stop` ends the workers.

    Ray Train's own handler leaves with exit status 1 and no exception, and stays installed after the run.
    """

    controller: Any = None

    def _register_sigint_handler(self, controller: Any) -> None:
        self.controller = controller

    def stop(self) -> None:
        import ray
        from ray.exceptions import RayError

        if self.controller is None:
            return
        with contextlib.suppress(RayError):  # an aborted controller ends itself, which its caller sees as an error
            ray.get(self.controller.abort.remote(), timeout=ABORT_S)
        with contextlib.suppress(RayError):
            ray.kill(self.controller)
