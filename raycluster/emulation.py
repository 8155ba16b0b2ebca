"""A slice of any accelerator on this machine: a Ray cluster of its own whose nodes look like the slice's hosts.

    head            CPUs for the controller, Serve replicas and Data tasks
    host 0 .. n-1   one Ray node each, with the resources, labels and environment that a real host of its slice would have
    spares          further slices of the same kind, or hosts, that a run moves to when it loses one

Ray's scheduler, its slice reservation and JaxTrainer take the same path as on hardware; only the chips are XLA CPU devices. The
environment matters as much as the labels: Ray reads the slice's name on a host from `TPU_NAME`, not from the node's label, and refuses the
reservation without it.

Nothing outlives the block. What an exit leaves, or an interrupted start, is found by a folder's name that no other process has, in its
environment or among its open files. When this process is killed, Ray's daemons die by the kernel's parent-death signal, and a guard, a
process of its own, ends the rest: a daemon's agents would go on for a minute. The folder of a killed run is removed by the next one.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from raycluster.console import quiet_ray
from raycluster.daemon_groups import daemons_in_own_groups
from raycluster.errors import ClusterError
from raycluster.memory import available_memory_bytes
from raycluster.slices import Slice

FOLDER_PREFIX = "raycluster-"
# Ray's temporary folder holds Unix sockets, whose paths end at 107 characters: it cannot be in a run's folder.
FOLDER_PARENT = Path("/tmp")
SLICE_NAME = "emulated-slice"
# A Ray node is a raylet and two agents in Python: 0.25 GiB resident, measured with Ray 2.60 (head 0.6 GiB with the GCS and dashboard).
NODE_BYTES = 256 << 20
HEAD_BYTES = 640 << 20
HOST_OBJECT_STORE_BYTES = 96 << 20
# How long what is killed has to be gone.
END_S = 10.0
REAP_S = 0.5
BUSY = "Ray gives each node 30 s: where the machine is busy, end other work and run again"


@contextlib.contextmanager
def emulated_cluster(
    slice: Slice,
    *,
    spares: int = 0,
    head_cpus: int = 8,
    host_cpus: int = 2,
    object_store_bytes: int = 384 << 20,
    dashboard: bool = False,
    log_to_driver: bool = False,
) -> Iterator[str]:
    """Bring the slice up on this machine, connect this process to it, and yield the cluster's address; take it all down at the end.

    CPUs are what Ray may schedule, not what the machine has. A slice of accelerator `cpu` gets no node but the head, and there one CPU
    more for each of its processes and spares. `object_store_bytes` is the head's object store. `log_to_driver` shows what workers print.

    Call it in the main thread: the kernel ties Ray's daemons to the thread that starts them.

    Raises ClusterError when Ray is already connected, the thread is another one, memory is short, or Ray does not come up.
    """
    import ray

    if threading.current_thread() is not threading.main_thread():
        raise ClusterError("an emulated cluster starts in the main thread only")
    if ray.is_initialized():
        raise ClusterError("this process is already connected to a Ray cluster. Leave it (ray.shutdown()) before emulating another")
    hosts = slice.hosts + spares * (slice.hosts_per_slice if slice.topology else 1)
    nodes = 0 if slice.resource == "CPU" else hosts
    _check_memory(HEAD_BYTES + object_store_bytes + nodes * (NODE_BYTES + HOST_OBJECT_STORE_BYTES))
    _remove_abandoned()
    with _locked_folder() as folder, quiet_ray(), _sigterm_kept() as keep_sigterm:
        cluster = guard = None
        over = threading.Event()
        try:
            with _ray_folder(folder), daemons_in_own_groups():
                guard = _guard(folder)
                cluster = _start_head(head_cpus + hosts - nodes, object_store_bytes, dashboard, log_to_driver)
                _add_hosts(cluster, slice, nodes, host_cpus)
                threading.Thread(target=_reap, args=(cluster, over), name="reap", daemon=True).start()
                ray.init(address=cluster.address, log_to_driver=log_to_driver, logging_level=logging.WARNING)
            keep_sigterm()
            yield cluster.address
        finally:
            over.set()
            with _hold_interrupts():
                ray.shutdown()
                if cluster is not None:
                    with _ray_folder(folder), contextlib.suppress(AssertionError):  # "zombie processes": the sweep below ends those
                        cluster.shutdown()
                _end_processes_of(folder)  # the guard too
                if guard is not None:
                    guard.communicate()


def host_node(slice: Slice, host: int) -> dict[str, Any]:
    """What makes a Ray node look like host number `host`, counted over all slices: arguments of `ray.cluster_utils.Cluster.add_node`."""
    resources: dict[str, float] = {f"accelerator_type:{slice.accelerator_type}": 1}
    labels = {"ray.io/accelerator-type": str(slice.accelerator_type)}
    if slice.resource == "GPU":
        return {"num_gpus": slice.devices_per_host, "resources": resources, "labels": labels}
    number, worker = divmod(host, slice.hosts_per_slice)
    name = f"{SLICE_NAME}-{number}" if number else SLICE_NAME
    resources["TPU"] = slice.devices_per_host
    if worker == 0:
        resources[f"TPU-{slice.pod_type}-head"] = 1
    labels |= {
        "ray.io/tpu-slice-name": name,
        "ray.io/tpu-worker-id": str(worker),
        "ray.io/tpu-topology": str(slice.topology),
        "ray.io/tpu-pod-type": str(slice.pod_type),
    }
    environment = {
        "TPU_NAME": name,
        "TPU_WORKER_ID": str(worker),
        "TPU_ACCELERATOR_TYPE": str(slice.pod_type),
        "TPU_TOPOLOGY": str(slice.topology),
        "TPU_WORKER_HOSTNAMES": ",".join(["127.0.0.1"] * slice.hosts_per_slice),
    }
    return {"resources": resources, "labels": labels, "env_vars": environment}


def _start_head(cpus: int, object_store_bytes: int, dashboard: bool, log_to_driver: bool) -> Any:
    from ray.cluster_utils import Cluster

    arguments = {
        "num_cpus": cpus,
        "object_store_memory": object_store_bytes,
        "include_dashboard": dashboard,
        "include_log_monitor": log_to_driver,  # it only forwards workers' output to the driver
        "no_monitor": True,  # nothing to scale
    }
    try:
        return Cluster(initialize_head=True, head_node_args=arguments)
    except Exception as e:
        raise ClusterError(f"Ray did not start on this machine: {str(e).rstrip('.')}. {BUSY}") from e


def _add_hosts(cluster: Any, slice: Slice, nodes: int, cpus: int) -> None:
    try:
        for host in range(nodes):
            cluster.add_node(wait=False, **host_node(slice, host), num_cpus=cpus, object_store_memory=HOST_OBJECT_STORE_BYTES)
        cluster.wait_for_nodes()
    except Exception as e:
        raise ClusterError(
            f"host {len(cluster.worker_nodes)} of {nodes} did not start on this machine: {str(e).rstrip('.')}. {BUSY}"
        ) from e


def _reap(cluster: Any, over: threading.Event) -> None:
    """Collect daemons that were killed until `over`: a worker ends when its raylet is no process any more, and a zombie is one."""
    while not over.wait(REAP_S):
        for node in cluster.list_all_nodes():
            node.live_processes()


def _check_memory(needed: int) -> None:
    available = available_memory_bytes()
    if available < needed:
        raise ClusterError(
            f"the emulated cluster needs {needed / 2**30:.1f} GiB of memory before any work, and {available / 2**30:.1f} GiB are free. "
            "Free some, or use fewer hosts"
        )


def _remove_abandoned() -> None:
    """Remove the folders of runs that were killed: those whose lock nobody holds."""
    for folder in FOLDER_PARENT.glob(f"{FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError), (folder / "lock").open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _end_processes_of(folder)
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _ray_folder(folder: Path) -> Iterator[None]:
    """Keep Ray's files, among them the address that `address='auto'` reads, in `folder`; every process started here inherits its name.

    They also inherit where this program imports from: what it can import, a worker can.
    """
    imports = os.pathsep.join(entry for entry in sys.path if entry)
    with environment({"RAY_TMPDIR": str(folder), "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": imports}):
        yield


@contextlib.contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Set environment variables for the block."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _guard(folder: Path) -> subprocess.Popen[bytes]:
    """Start a process that ends those of `folder` when this one dies: the kernel then closes the pipe that it reads."""
    program = "import sys, pathlib, raycluster.emulation as e; sys.stdin.read(); e._end_processes_of(pathlib.Path(sys.argv[1]))"
    return subprocess.Popen([sys.executable, "-c", program, str(folder)], stdin=subprocess.PIPE, start_new_session=True)


def _end_processes_of(folder: Path) -> None:
    """End what still runs with our folder's name: after an interrupted start, or a worker that outlived its raylet."""
    import psutil

    def mine(process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error, OSError):
            # Ray's agents write their title over their environment, and keep their logs open.
            return process.pid != os.getpid() and (
                process.environ().get("RAY_TMPDIR") == str(folder)
                or any(file.path.startswith(f"{folder}/") for file in process.open_files())
            )
        return False

    deadline = time.monotonic() + END_S
    while (left := [process for process in psutil.process_iter() if mine(process)]) and time.monotonic() < deadline:
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, timeout=END_S)  # and look again: one of them may have started another in the meantime


@contextlib.contextmanager
def _locked_folder() -> Iterator[Path]:
    """A new temporary folder whose lock this process holds for the block, so that `_remove_abandoned` elsewhere leaves it alone."""
    draft = Path(tempfile.mkdtemp(prefix=f".{FOLDER_PREFIX}", dir=FOLDER_PARENT))
    with (draft / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        folder = draft.rename(FOLDER_PARENT / draft.name.removeprefix("."))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _exit_on_sigterm(signum: int, frame: object) -> None:
    sys.exit(128 + signum)


@contextlib.contextmanager
def _sigterm_kept() -> Iterator[Callable[[], object]]:
    """Yield a function that puts SIGTERM's handler back; each Ray node installs one that takes down that node only.

    Where the program had none, SIGTERM becomes SystemExit, so that the stack unwinds and the whole cluster goes down. Status 143, or 1 when
    it comes in the middle of `ray.get`, which makes 1 of every exit.
    """
    before = signal.getsignal(signal.SIGTERM)
    wanted = before if callable(before) else _exit_on_sigterm
    try:
        yield lambda: signal.signal(signal.SIGTERM, wanted)
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _hold_interrupts() -> Iterator[None]:
    """Make Ctrl-C and SIGTERM wait until the block is done."""
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
