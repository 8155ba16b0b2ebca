"""One JAX program on every host of a slice: gang-scheduled, connected, restarted when a worker dies.

    driver: run_spmd(fn, config, slice)
        -> Ray Train controller -> reserves the slice -> one worker process a host -> jax.distributed -> fn(config) in each
        <- what fn returned in process 0, or WorkerError with the worker's own message

On TPU and GPU, real or emulated, this is Ray's JaxTrainer; an emulated host differs only in its environment, which gives JAX CPU devices
in place of chips. On `cpu` it is Ray's data-parallel trainer with `cpu_backend`.

Restarts are decided here and not by Ray's FailureConfig, which would also run a program again that has just said what is wrong with its
input. A restarted program begins from the start: it resumes by itself from its own checkpoints.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from raycluster.emulation import environment
from raycluster.errors import RemoteError, WorkerError
from raycluster.reports import Outlet, delivery, send_report, set_outlet
from raycluster.slices import Slice

__all__ = ["run_spmd", "send_report"]

log = logging.getLogger(__name__)
Program = Callable[[dict[str, Any]], Any]

# Read by Ray Train in the driver. Its default is to change into a folder of its own, which breaks every relative path of a program.
TRAIN_ENVIRONMENT = {"RAY_CHDIR_TO_TRIAL_DIR": "0", "RAY_TRAIN_METRICS_ENABLED": "0"}
# On one machine nobody preempts a node, and a poll costs nothing: a run ends, and a dead worker is seen, up to 2 s sooner.
LOCAL_ENVIRONMENT = {"RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0", "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2"}
STARVED = (
    "twice at the same point: it was killed, probably for lack of memory. "
    "Lower the batch, the row length or the adapter's rank, or use hosts with more memory"
)
# How long Ctrl-C waits for the workers to stop in good order.
ABORT_S = 10.0


def run_spmd(
    worker_fn: Program,
    config: dict[str, Any],
    slice: Slice,
    *,
    name: str,
    storage: str | Path,
    max_failures: int = 0,
    on_report: Callable[[dict[str, Any]], None] | None = None,
) -> Any:
    """Run `worker_fn(config)` in one JAX process on each host of the slice, and return what process 0's call returned.

    `jax.distributed` is initialised before the call: `jax.process_count()` is `slice.hosts` and `jax.device_count()` is `slice.devices`.
    `worker_fn` and `config` must pickle, and so must the result. `storage` is a folder that the driver and all hosts see; Ray Train
    keeps its own records in `storage/name`. `send_report` called by a worker reaches `on_report` here, in another thread, while it runs.

    A worker that dies, or raises something that has no `exit_code`, is restarted with all others up to `max_failures` times; only once when
    Ray kills it for want of memory, or it dies before its first report, for it would do so again.

    Raises WorkerError with the worker's message and exit code, and KeyboardInterrupt on Ctrl-C after stopping the workers. Needs a
    connection to a cluster that has the slice: `raycluster.session.connect`.
    """
    reports = 0

    def counted(report: dict[str, Any]) -> None:
        nonlocal reports
        reports += 1
        assert on_report is not None
        on_report(report)

    with delivery(counted if on_report else None) as outlet:
        starved = 0
        for attempt in range(max_failures + 1):
            before = reports
            trainer = _trainer(worker_fn, config, slice, name, storage, outlet)
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


def _starved(failure: RemoteError, silent: bool) -> bool:
    """Whether a death looks like one for want of memory: Ray says so, or it came before a report and the node lives on (no preemption)."""
    return failure.died and "its node has died" not in failure.traceback and (silent or "low on memory" in failure.traceback)


def worker_environment(slice: Slice) -> dict[str, str]:
    """Environment variables of the worker processes: none on real accelerators, CPU devices in their place otherwise."""
    if not slice.forces_host_devices:
        return {}
    return {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={slice.devices_per_host}",
        "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "gloo",
    }


def _trainer(program: Program, config: dict[str, Any], slice: Slice, name: str, storage: str | Path, outlet: Outlet | None) -> Any:
    from ray.train import FailureConfig, RunConfig, ScalingConfig
    from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
    from ray.train.v2.jax import JaxTrainer

    from raycluster.cpu_backend import CpuJaxConfig

    run = RunConfig(
        name=name,
        storage_path=str(storage if "://" in str(storage) else Path(storage).expanduser().absolute()),
        worker_runtime_env={"env_vars": worker_environment(slice)},
        # Without a limit Ray tries for ever to start workers that cannot start.
        failure_config=FailureConfig(max_failures=0, controller_failure_limit=2),
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
    )
    arguments: dict[str, Any] = {"train_loop_config": call, "scaling_config": scaling, "run_config": run}
    if slice.resource == "CPU":
        kind = type("CpuTrainer", (_Interruptible, DataParallelTrainer), {})
        return kind(_worker, backend_config=CpuJaxConfig(), **arguments)
    return type("SliceTrainer", (_Interruptible, JaxTrainer), {})(_worker, **arguments)


def _worker(call: dict[str, Any]) -> Any:
    outlet = call["outlet"]
    set_outlet(outlet)
    if call["one_emulated_host"]:
        _collectives_in_process()
    try:
        return call["program"](call["config"])
    except (Exception, SystemExit) as e:
        raise RemoteError.of(e) from None
    finally:
        if outlet is not None:
            outlet.flush()


def _collectives_in_process() -> None:
    """Let the CPU devices of a lone process exchange data in memory: over gloo a tiny step took 0.86 s, so 0.31 s.

    Ray has initialised jax.distributed by now, but JAX creates its devices later, at the first use.
    """
    import jax

    jax.config.update("jax_cpu_collectives_implementation", None)


def _fit(trainer: Any) -> Any:
    """Run a Ray trainer; its errors come out as RemoteError."""
    from ray.exceptions import RayError
    from ray.train import TrainingFailedError, WorkerGroupError

    try:
        return trainer.fit().return_value
    except KeyboardInterrupt:
        trainer.stop()
        raise
    except WorkerGroupError as e:
        raise _first_cause(e.worker_failures) from None
    except (TrainingFailedError, RayError) as e:
        # The controller has tried as often as it may: its last line is the cause, and an exit code ends it here.
        cause = str(e).strip().rpartition("\n")[2].strip()
        raise RemoteError(type(e).__name__, f"the workers did not start: {cause}", 1, str(e)) from None


def _first_cause(failures: dict[int, Exception]) -> RemoteError:
    """The failure that explains the others: one raised on purpose, else a death, else what the program raised first by rank.

    When a worker stops, the others fail in the collective that they were in.
    """
    raised = [error for _, error in sorted(failures.items()) if isinstance(error, RemoteError)]
    deliberate = [failure for failure in raised if failure.deliberate]
    deaths = [
        RemoteError.death(f"process {rank}", str(error)) for rank, error in sorted(failures.items()) if not isinstance(error, RemoteError)
    ]
    return [*deliberate, *deaths, *raised][0]


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
