"""What is said of a cluster's slices, from nodes as `ray.nodes()` lists them."""

from raycluster.availability import describe_nodes, survey
from raycluster.emulation import host_node
from raycluster.slices import resolve

V5P = resolve("v5p", "2x2x2")
TWO = resolve("v5p", "2x2x2", slices=2)
H100 = resolve("h100", hosts=2, devices_per_host=2)


def nodes_of(slice, first=0, alive=True):
    """Nodes for the hosts of a slice; a TPU's are named from number `first`."""
    listed = []
    for host in range(first * slice.hosts_per_slice, first * slice.hosts_per_slice + slice.hosts):
        node = host_node(slice, host)
        resources = {"CPU": 4.0, **node["resources"]}
        if "num_gpus" in node:
            resources["GPU"] = node["num_gpus"]
        identity = f"{slice.accelerator.name}-{first}-{host}"
        listed.append({"Alive": alive, "NodeID": identity, "Resources": resources, "Labels": node["labels"]})
    return listed


def taken(nodes, index, **amounts):
    """What is free when one node has only these amounts left."""
    return {node["NodeID"]: {**node["Resources"], **(amounts if number == index else {})} for number, node in enumerate(nodes)}


def test_a_slice_is_there_only_when_all_its_hosts_are_alive():
    assert survey(V5P, nodes_of(V5P), {}).hosts == ("v5p-0-0", "v5p-0-1")
    one_lost = survey(V5P, nodes_of(V5P)[:1], {})
    assert one_lost.missing
    assert "slice emulated-slice is incomplete, 1 of its 2 hosts live" in one_lost.problem
    assert "no living node of type TPU-V5P" in survey(V5P, nodes_of(V5P, alive=False), {}).problem


def test_halves_of_two_slices_are_no_slice():
    assert survey(V5P, [nodes_of(V5P)[0], nodes_of(V5P, 1)[1]], {}).missing


def test_another_generation_or_topology_does_not_do():
    assert "no slice of TPU-V5P has topology 2x2x2" in survey(V5P, nodes_of(resolve("v5p", "2x2x4")), {}).problem
    assert survey(V5P, nodes_of(resolve("v4", "2x2x2")), {}).missing


def test_a_host_of_a_larger_slice_is_not_taken_for_a_slice_of_its_own():
    assert survey(resolve("v5p", "2x2x1"), nodes_of(V5P), {}).missing


def test_hosts_come_slice_by_slice_and_by_worker_id_whatever_the_order_of_the_nodes():
    found = survey(TWO, nodes_of(TWO)[::-1], {})
    assert found.hosts == ("v5p-0-0", "v5p-0-1", "v5p-0-2", "v5p-0-3")
    assert found.names == ("emulated-slice", "emulated-slice-1")


def test_a_slice_with_a_chip_in_use_is_busy_and_another_is_taken_instead():
    nodes = nodes_of(TWO)
    free = taken(nodes, 1, TPU=3)
    busy = survey(TWO, nodes, free)
    assert (busy.hosts, busy.missing) == (None, False)
    assert "is busy: 1 of the 2 that it takes are free" in busy.problem
    assert "slice emulated-slice: TPU-V5P 2x2x2, 2 of 2 hosts alive, 7 of 8 chips free; slice emulated-slice-1: " in busy.problem
    assert survey(V5P, nodes, free).names == ("emulated-slice-1",)


def test_a_reserved_head_no_free_cpu_or_a_drain_make_a_slice_busy_too():
    nodes = nodes_of(V5P)
    assert "8 of 8 chips free (reserved)" in survey(V5P, nodes, taken(nodes, 0, **{"TPU-v5p-16-head": 0})).problem
    assert "(no CPU free for a worker)" in survey(V5P, nodes, taken(nodes, 1, CPU=0)).problem
    assert "(being drained)" in survey(V5P, nodes, {}, frozenset(["v5p-0-1"])).problem


def test_gpu_hosts_need_as_many_devices_as_asked():
    assert survey(resolve("h100", devices_per_host=2), nodes_of(resolve("h100")), {}).hosts == ("h100-0-0",)
    assert survey(resolve("h100", devices_per_host=4), nodes_of(H100), {}).missing
    assert survey(resolve("a100", devices_per_host=2), nodes_of(H100), {}).missing


def test_a_gpu_host_in_use_is_busy():
    nodes = nodes_of(H100)
    found = survey(H100, nodes, taken(nodes, 0, GPU=1))
    assert not found.missing
    assert "1 of the 2 that it takes are free. The cluster has: host h100-0-0: H100, 1 of 2 GPUs free;" in found.problem


def test_cpu_processes_need_a_cpu_each():
    nodes = [{"Alive": True, "NodeID": "a", "Resources": {"CPU": 2.0}, "Labels": {}}]
    assert survey(resolve("cpu", hosts=2), nodes, {}).hosts == ()
    assert not survey(resolve("cpu", hosts=2), nodes, {"a": {"CPU": 1}}).missing
    assert survey(resolve("cpu", hosts=3), nodes, {}).missing


def test_the_description_counts_equal_hosts():
    assert describe_nodes(nodes_of(V5P)) == "2 x (4 TPU, 4 CPU, TPU-V5P, v5p-16)"
    assert describe_nodes([]) == "no living node"
