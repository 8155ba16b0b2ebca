"""Which slices a cluster has, and whether one is free: said within seconds, before any worker starts.

    missing   no host of the accelerator, only slices of another topology, or a slice that lacks hosts
    busy      the hosts are there, and some of their chips belong to another job or placement group
    free      every chip of every host, on nodes that are not being drained

Ray itself waits in silence for a busy slice, and picks a half-free one because it looks at worker 0 only. So the hosts are chosen here,
by node, and the workers are pinned to them.
"""

from __future__ import annotations

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from raycluster.errors import ClusterError
from raycluster.slices import Slice, count_chips

POLL_S = 1.0
# How long a node has to answer a task, or to give up a slice's head resource: seconds where it is alive and free.
ANSWER_S = 20.0

NODE = "ray.io/node-id"
NAME, WORKER = "ray.io/tpu-slice-name", "ray.io/tpu-worker-id"
TOPOLOGY, POD_TYPE = "ray.io/tpu-topology", "ray.io/tpu-pod-type"

Nodes = list[dict[str, Any]]
Amounts = Mapping[str, Mapping[str, float]]


@dataclass(frozen=True)
class Survey:
    """What a cluster has for a slice.

    `hosts` are the node ids to use in the order of the ranks, slice by slice and in a slice by worker id, and `names` those of the slices.
    It is None when the slice cannot start now, for which `problem` is the reason, and empty on `cpu`, where any node does. `missing` says
    that waiting for other jobs to end would not help.
    """

    hosts: tuple[str, ...] | None
    missing: bool = False
    problem: str = ""
    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Group:
    """The living hosts of one TPU slice, ordered by worker id, or one GPU host."""

    name: str
    nodes: Nodes
    expected: int
    free: bool
    suits: bool
    shown: str

    @property
    def whole(self) -> bool:
        return self.suits and len(self.nodes) == self.expected


def survey(slice: Slice, nodes: Nodes, available: Amounts, leaving: frozenset[str] = frozenset()) -> Survey:
    """What `nodes` (of `ray.nodes()`) have for the slice; `available` is what is free by node id, `leaving` are nodes being drained.

    A node that `available` does not name has just joined, and is free.
    """
    alive = [node for node in nodes if node["Alive"]]
    if slice.resource == "CPU":
        return _survey_cpus(slice, alive, available)
    of_type = [node for node in alive if f"accelerator_type:{slice.accelerator_type}" in node["Resources"]]
    groups = _tpu_slices(slice, of_type, available, leaving) if slice.topology else _gpu_hosts(slice, of_type, available, leaving)
    wanted = slice.slices if slice.topology else slice.hosts
    free = [group for group in groups if group.whole and group.free]
    if len(free) >= wanted:
        hosts = tuple(node["NodeID"] for group in free[:wanted] for node in group.nodes)
        return Survey(hosts, names=tuple(group.name for group in free[:wanted]))
    whole = sum(group.whole for group in groups)
    others = [node for node in alive if node not in of_type]
    has = "; ".join([*(group.shown for group in groups), *([describe_nodes(others)] if others or not groups else [])])
    if whole >= wanted:
        return Survey(
            None, False, f"{slice.describe()} is busy: {len(free)} of the {wanted} that it takes are free. The cluster has: {has}"
        )
    return Survey(None, True, f"the Ray cluster does not have {slice.describe()}: {_lack(slice, groups, whole, wanted)}. It has: {has}")


def _lack(slice: Slice, groups: list[_Group], whole: int, wanted: int) -> str:
    unit = "slice" if slice.topology else "host"
    if not groups:
        return f"no living node of type {slice.accelerator_type}"
    if broken := [group for group in groups if group.suits and not group.whole]:
        return f"{unit} {broken[0].name} is incomplete, {len(broken[0].nodes)} of its {broken[0].expected} hosts live"
    if whole:
        return f"{whole} of the {wanted} {unit}s"
    return f"no {unit} of {slice.accelerator_type} has " + (
        f"topology {slice.topology}" if slice.topology else f"{slice.devices_per_host} GPUs"
    )


def _survey_cpus(slice: Slice, alive: Nodes, available: Amounts) -> Survey:
    total = sum(node["Resources"].get("CPU", 0) for node in alive)
    free = sum(_free(node, available, "CPU") for node in alive)
    if free >= slice.hosts:
        return Survey(())
    has = f"{free:g} of {total:g} CPUs are free on {describe_nodes(alive)}"
    if total >= slice.hosts:
        return Survey(None, False, f"{slice.describe()} is busy: it takes a CPU for each of {slice.hosts} processes, and {has}")
    return Survey(None, True, f"the Ray cluster does not have {slice.describe()}: it takes {slice.hosts} CPUs, and {has}")


def _gpu_hosts(slice: Slice, nodes: Nodes, available: Amounts, leaving: frozenset[str]) -> list[_Group]:
    groups = []
    for node in nodes:
        total, free, stays = node["Resources"].get("GPU", 0), _free(node, available, "GPU"), node["NodeID"] not in leaving
        name = node.get("NodeManagerAddress", node["NodeID"])
        shown = f"host {name}: {slice.accelerator_type}, {free:g} of {total:g} GPUs free{'' if stays else ', being drained'}"
        groups.append(_Group(name, [node], 1, stays and free >= slice.devices_per_host, total >= slice.devices_per_host, shown))
    return groups


def _tpu_slices(slice: Slice, nodes: Nodes, available: Amounts, leaving: frozenset[str]) -> list[_Group]:
    named: dict[str, Nodes] = defaultdict(list)
    for node in nodes:
        named[node["Labels"].get(NAME) or node["NodeID"]].append(node)
    return [_tpu_slice(slice, name, members, available, leaving) for name, members in sorted(named.items())]


def _tpu_slice(slice: Slice, name: str, nodes: Nodes, available: Amounts, leaving: frozenset[str]) -> _Group:
    nodes = sorted(nodes, key=lambda node: int(node["Labels"].get(WORKER) or 0))
    labels, chips = nodes[0]["Labels"], nodes[0]["Resources"].get("TPU", 0)
    suits = labels.get(POD_TYPE) == slice.pod_type and labels.get(TOPOLOGY, slice.topology) == slice.topology
    suits = suits and all(node["Resources"].get("TPU", 0) == slice.devices_per_host for node in nodes)
    topology = labels.get(TOPOLOGY) or (slice.topology if suits else None)
    expected = max(1, round(count_chips(topology) / chips)) if topology and chips else len(nodes)
    total = sum(node["Resources"].get("TPU", 0) for node in nodes)
    free = sum(_free(node, available, "TPU") for node in nodes)
    notes = [
        *([] if suits else ["of another topology" if topology != slice.topology else "cut into other hosts"]),
        *(["incomplete"] if len(nodes) < expected else []),
        *(["being drained"] if any(node["NodeID"] in leaving for node in nodes) else []),
        *(["no CPU free for a worker"] if any(_free(node, available, "CPU") < 1 for node in nodes) else []),
        *(["reserved"] if any(_free(node, available, head) < 1 for node in nodes for head in [_head(node)] if head) else []),
    ]
    shown = f"slice {name}: {slice.accelerator_type} {topology or labels.get(POD_TYPE)}, {len(nodes)} of {expected} hosts alive, "
    shown += f"{free:g} of {total:g} chips free" + (f" ({', '.join(notes)})" if notes else "")
    return _Group(name, nodes, expected, free == total and not set(notes) - {"incomplete"}, suits, shown)


def _head(node: dict[str, Any]) -> str | None:
    """The resource that stands for a whole slice on its worker 0, as Ray's own reservations know it."""
    return next((name for name in node["Resources"] if name.startswith("TPU-") and name.endswith("-head")), None)


def _free(node: dict[str, Any], available: Amounts, resource: str) -> float:
    total = node["Resources"].get(resource, 0)
    return available[node["NodeID"]].get(resource, 0) if node["NodeID"] in available else total


def describe_nodes(nodes: Nodes) -> str:
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
    pods = [value for value in [node["Labels"].get(POD_TYPE)] if value]
    return ", ".join([*amounts, *types, *pods]) or "nothing"


def look(slice: Slice) -> Survey:
    """What the connected cluster has for the slice now."""
    import ray
    from ray._private.client_mode_hook import client_mode_wrap
    from ray._private.state import available_resources_per_node

    leaving = draining_nodes()  # before the nodes: one that is gone by now is not among those alive
    return survey(slice, ray.nodes(), client_mode_wrap(available_resources_per_node)(), leaving)


_leaving: set[str] = set()
"""Nodes that this process has seen being drained. No node comes back from that, and Ray calls one alive for a moment after it has ended."""


def draining_nodes() -> frozenset[str]:
    """Nodes that Ray has been told are to go, by an autoscaler or `ray drain-node`."""
    from ray._private.client_mode_hook import client_mode_wrap

    _leaving.update(client_mode_wrap(_draining)())
    return frozenset(_leaving)


def _draining() -> list[str]:
    from ray._private.state import state

    return list(state.get_draining_nodes())


def wait_for_slice(slice: Slice, timeout_s: float = 0.0, *, free: bool = False) -> Survey:
    """Return when the connected cluster has the slice, and with `free` when nobody else uses it.

    While hosts are missing, an autoscaler is asked for them. Raises ClusterError when `timeout_s` are over, with what the cluster has: of
    each slice its topology, its living hosts and its free chips.
    """
    from ray.autoscaler.sdk import request_resources

    deadline, asked = time.monotonic() + timeout_s, False
    try:
        while not _will_do(found := look(slice), free):
            if time.monotonic() >= deadline:
                break
            if found.missing and not asked:
                asked = True
                request_resources(bundles=[dict(slice.worker_resources) for _ in range(slice.hosts)])
            time.sleep(min(POLL_S, max(0.0, deadline - time.monotonic())))
    finally:
        if asked:
            request_resources(bundles=[])
    if _will_do(found, free):
        return found
    waited = f" Waited {timeout_s:.0f} s." if timeout_s >= 1 else ""
    remedy = "Add the hosts, or choose what is there" if found.missing else "End what uses it, wait for it, or add another"
    raise ClusterError(f"{found.problem}.{waited} {remedy}")


def _will_do(found: Survey, free: bool) -> bool:
    return found.hosts is not None or not (free or found.missing)


def first_free(choices: Sequence[Slice], wait_s: float) -> tuple[Slice, Survey]:
    """The first of `choices` that is free; only the first is waited for. Raises ClusterError with what the cluster has for that one."""
    try:
        return choices[0], wait_for_slice(choices[0], wait_s, free=True)
    except ClusterError:
        for smaller in choices[1:]:
            if (found := look(smaller)).hosts is not None:
                return smaller, found
        raise


@contextlib.contextmanager
def reserved(slice: Slice, found: Survey) -> Iterator[None]:
    """For the block, hold the head resource of each TPU slice found, so that no other job's reservation picks it.

    Raises ClusterError when a head is not given in time: another job was faster, or the node has died and Ray does not know yet.
    """
    import ray
    from ray.util.placement_group import placement_group, remove_placement_group

    head = f"TPU-{slice.pod_type}-head"
    have = {node["NodeID"] for node in ray.nodes() if head in node["Resources"]}
    first_hosts = (found.hosts or ())[:: slice.hosts_per_slice]
    groups = [placement_group([{head: 1}], bundle_label_selector=[{NODE: node}]) for node in first_hosts if node in have]
    try:
        deadline = time.monotonic() + ANSWER_S
        if not all(group.wait(max(0.1, deadline - time.monotonic())) for group in groups):
            raise ClusterError(f"{slice.describe()}: another job took a slice of it, or a host does not answer. {look(slice).problem}")
        yield
    finally:
        for group in groups:
            remove_placement_group(group)
