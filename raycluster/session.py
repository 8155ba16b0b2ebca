"""Connecting a program to the cluster that has its slice.

emulate                     a cluster of its own on this machine, for the time of the block
address                     that cluster (`auto`, host:port or ray://host:port)
neither, inside a Ray job   the job's cluster (`RAY_ADDRESS`, which Ray sets)
neither, accelerator cpu    a cluster of its own on this machine
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from raycluster.console import quiet_ray
from raycluster.emulation import emulated_cluster
from raycluster.errors import ClusterError
from raycluster.slices import Slice

POLL_S = 2.0
ANSWER_S = 10.0
"""How long a cluster has to take up a connection; `ray.init` itself waits for minutes where nothing answers."""

_ADDRESS = re.compile(r"(ray://)?(\[[0-9a-fA-F:.%]+\]|[^\s:/\[\]]+):(\d{1,5})", re.ASCII)


@contextlib.contextmanager
def connect(slice: Slice, address: str | None = None, *, wait_for_slice_s: float = 0.0, log_to_driver: bool = False) -> Iterator[None]:
    """Connect this process to a Ray cluster that has the slice; disconnect at the end, and end a cluster that was started here.

    A process that is connected already keeps its connection. `wait_for_slice_s` asks an autoscaler for the hosts and waits that long.

    Raises ClusterError when there is no cluster to connect to, or it does not have the slice (the message lists what it has).
    """
    import ray

    if ray.is_initialized():
        wait_for_slice(slice, wait_for_slice_s)
        yield
        return
    here = os.environ.get("RAY_ADDRESS") or None if address is None else address
    if slice.emulate or (here is None and slice.resource == "CPU"):
        if slice.emulate and address is not None:
            raise ClusterError(f"address '{address}' and emulate exclude each other: an emulated slice is a cluster of its own. Remove one")
        with emulated_cluster(slice, log_to_driver=log_to_driver):
            yield
        return
    if here is None:
        raise ClusterError(
            f"no Ray cluster for {slice.describe()}: give an address, submit this as a Ray job, or set emulate to run it on this CPU"
        )
    with quiet_ray():
        try:
            check_answers(here)
            ray.init(address=here, log_to_driver=log_to_driver, logging_level=logging.WARNING)
        except (ConnectionError, ValueError, RuntimeError) as e:
            cause = (str(e).splitlines() or [type(e).__name__])[0]
            raise ClusterError(f"no Ray cluster answers at '{here}' ({cause}). Start one there, or give another address") from e
        try:
            wait_for_slice(slice, wait_for_slice_s)
            yield
        finally:
            ray.shutdown()


def check_answers(address: str, timeout_s: float = ANSWER_S) -> None:
    """Raise ClusterError for an address of no known form, ConnectionError when no cluster takes up a connection there in `timeout_s`."""
    import grpc
    from ray._private.grpc_utils import init_grpc_channel
    from ray._private.ray_constants import GLOBAL_GRPC_OPTIONS
    from ray._private.services import canonicalize_bootstrap_address_or_die

    found = _ADDRESS.fullmatch(canonicalize_bootstrap_address_or_die("auto") if address == "auto" else address)
    if found is None or not 0 < int(found[3]) < 65536:
        raise ClusterError(f"'{address}' is no address of a Ray cluster: write auto, host:port (10.0.0.1:6379) or ray://host:port")
    host, port = found[2], int(found[3])
    try:
        socket.create_connection((host.strip("[]"), port), timeout_s).close()
    except (OSError, UnicodeError) as e:  # UnicodeError: a label of more than 63 characters
        raise ConnectionError(getattr(e, "strerror", None) or str(e)) from e
    channel: Any = init_grpc_channel(f"{host}:{port}", options=GLOBAL_GRPC_OPTIONS)
    try:
        grpc.channel_ready_future(channel).result(timeout=timeout_s)
    except grpc.FutureTimeoutError as e:
        raise ConnectionError("what listens there is not Ray") from e
    finally:
        channel.close()


def wait_for_slice(slice: Slice, timeout_s: float = 0.0) -> None:
    """Return when the connected cluster has the slice. Raises ClusterError listing what it has when `timeout_s` are over."""
    import ray
    from ray.autoscaler.sdk import request_resources

    if has_slice(slice, ray.nodes()):
        return
    deadline = time.monotonic() + timeout_s
    if timeout_s > 0:
        request_resources(bundles=[dict(slice.worker_resources) for _ in range(slice.hosts)])
    try:
        while time.monotonic() < deadline:
            time.sleep(min(POLL_S, max(0.0, deadline - time.monotonic())))
            if has_slice(slice, ray.nodes()):
                return
    finally:
        if timeout_s > 0:
            request_resources(bundles=[])
    waited = f" after {timeout_s:.0f} s" if timeout_s > 0 else ""
    has = describe_nodes(ray.nodes())
    raise ClusterError(f"the Ray cluster does not have {slice.describe()}{waited}. It has: {has}. Add the hosts, or choose what is there")


def has_slice(slice: Slice, nodes: list[dict[str, Any]]) -> bool:
    """Whether `nodes` (as `ray.nodes()` gives them) hold the slice, busy or not: whole TPU slices only count as one."""
    alive = [node for node in nodes if node["Alive"]]
    if slice.resource == "CPU":
        return sum(node["Resources"].get("CPU", 0) for node in alive) >= slice.hosts
    of_type = [node for node in alive if f"accelerator_type:{slice.accelerator_type}" in node["Resources"]]
    fitting = [node for node in of_type if node["Resources"].get(slice.resource, 0) >= slice.devices_per_host]
    if slice.resource == "GPU":
        return len(fitting) >= slice.hosts
    hosts_of: dict[str, int] = defaultdict(int)
    for node in fitting:
        if node["Labels"].get("ray.io/tpu-pod-type") == slice.pod_type:
            hosts_of[node["Labels"].get("ray.io/tpu-slice-name", node["NodeID"])] += 1
    return any(count >= slice.hosts for count in hosts_of.values())


def describe_nodes(nodes: list[dict[str, Any]]) -> str:
    """The living nodes in words: `2 x (4 TPU, TPU-V5P, v5p-16), 1 x (8 CPU)`."""
    kinds: dict[str, int] = defaultdict(int)
    for node in nodes:
        if node["Alive"]:
            kinds[_describe_node(node)] += 1
    return ", ".join(f"{count} x ({kind})" for kind, count in sorted(kinds.items())) or "no living node"


def _describe_node(node: dict[str, Any]) -> str:
    resources = node["Resources"]
    amounts = [f"{resources[name]:g} {name}" for name in ("TPU", "GPU", "CPU") if resources.get(name)]
    types = [name.removeprefix("accelerator_type:") for name in resources if name.startswith("accelerator_type:")]
    pods = [value for value in [node["Labels"].get("ray.io/tpu-pod-type")] if value]
    return ", ".join([*amounts, *types, *pods]) or "nothing"
