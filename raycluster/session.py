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
from collections.abc import Iterator
from typing import Any

from raycluster.availability import wait_for_slice
from raycluster.console import quiet_ray
from raycluster.emulation import emulated_cluster
from raycluster.errors import ClusterError
from raycluster.slices import Slice

ANSWER_S = 10.0
"""How long a cluster has to take up a connection; `ray.init` itself waits for minutes where nothing answers."""

_ADDRESS = re.compile(r"(ray://)?(\[[0-9a-fA-F:.%]+\]|[^\s:/\[\]]+):(\d{1,5})", re.ASCII)


@contextlib.contextmanager
def connect(
    slice: Slice, address: str | None = None, *, spares: int = 0, wait_for_slice_s: float = 0.0, log_to_driver: bool = False
) -> Iterator[None]:
    """Connect this process to a Ray cluster that has the slice; disconnect at the end, and end a cluster that was started here.

    A process that is connected already keeps its connection, unchecked: it may go on with what a lost host has left. `wait_for_slice_s`
    asks an autoscaler for the hosts and waits that long.
    `spares` are further slices, or hosts, of an emulated cluster.

    Raises ClusterError when there is no cluster to connect to, or it does not have the slice (the message lists what it has). A slice that
    others use is no error here, for not every stage needs its chips; `run_spmd` looks again.
    """
    import ray

    if ray.is_initialized():
        yield
        return
    here = os.environ.get("RAY_ADDRESS") or None if address is None else address
    if slice.emulate or (here is None and slice.resource == "CPU"):
        if slice.emulate and address is not None:
            raise ClusterError(f"address '{address}' and emulate exclude each other: an emulated slice is a cluster of its own. Remove one")
        with emulated_cluster(slice, spares=spares, log_to_driver=log_to_driver):
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
