import socket
import time

import pytest

from raycluster import session
from raycluster.emulation import host_node
from raycluster.errors import ClusterError
from raycluster.session import connect, describe_nodes, has_slice
from raycluster.slices import resolve


def nodes_of(slice, name="slice-a", alive=True):
    """Nodes as `ray.nodes()` would list them for the hosts of a slice."""
    listed = []
    for host in range(slice.hosts):
        node = host_node(slice, host)
        resources = {"CPU": 4.0, **node["resources"]}
        if "num_gpus" in node:
            resources["GPU"] = node["num_gpus"]
        labels = node["labels"] | ({"ray.io/tpu-slice-name": name} if slice.topology else {})
        listed.append({"Alive": alive, "NodeID": f"{name}-{host}", "Resources": resources, "Labels": labels})
    return listed


def test_a_slice_is_there_only_when_all_its_hosts_are_alive():
    slice = resolve("v5p", "2x2x2")
    assert has_slice(slice, nodes_of(slice))
    assert not has_slice(slice, nodes_of(slice)[:1])
    assert not has_slice(slice, nodes_of(slice, alive=False))


def test_halves_of_two_slices_are_no_slice():
    slice = resolve("v5p", "2x2x2")
    assert not has_slice(slice, [nodes_of(slice, "a")[0], nodes_of(slice, "b")[1]])


def test_another_generation_or_topology_does_not_do():
    wanted = resolve("v5p", "2x2x2")
    assert not has_slice(wanted, nodes_of(resolve("v5p", "2x2x4")))
    assert not has_slice(wanted, nodes_of(resolve("v4", "2x2x2")))


def test_gpu_hosts_need_as_many_devices_as_asked():
    two = resolve("h100", hosts=1, devices_per_host=2)
    assert has_slice(two, nodes_of(resolve("h100", hosts=1)))
    assert not has_slice(resolve("h100", hosts=1, devices_per_host=4), nodes_of(two))
    assert not has_slice(resolve("a100", hosts=1, devices_per_host=2), nodes_of(two))


def test_the_description_counts_equal_hosts():
    assert describe_nodes(nodes_of(resolve("v5p", "2x2x2"))) == "2 x (4 TPU, 4 CPU, TPU-V5P, v5p-16)"
    assert describe_nodes([]) == "no living node"


def test_hardware_without_a_cluster_is_refused(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(ClusterError, match="give an address, submit this as a Ray job, or set emulate"), connect(resolve("v5p", "2x2x1")):
        pass


def test_an_address_and_emulation_exclude_each_other():
    with (
        pytest.raises(ClusterError, match="exclude each other"),
        connect(resolve("v5p", "2x2x1", emulate=True), "10.0.0.1:6379"),
    ):
        pass


NOWHERE = resolve("v5p", "2x2x1")


def refusal(address):
    started = time.monotonic()
    with pytest.raises(ClusterError) as error, connect(NOWHERE, address):
        pass
    assert time.monotonic() - started < 15
    assert f"'{address}'" in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_an_address_where_nothing_listens_is_refused_at_once(scheme):
    assert "no Ray cluster answers" in refusal(f"{scheme}127.0.0.1:1")


def test_a_listener_that_is_not_ray_is_refused(monkeypatch):
    monkeypatch.setattr(session.check_answers, "__defaults__", (1.0,))
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert "not Ray" in refusal(f"127.0.0.1:{server.getsockname()[1]}")


def test_auto_with_no_cluster_or_one_that_has_gone_is_refused(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", set)
    monkeypatch.setattr("ray._private.services.find_bootstrap_address", lambda folder: None)
    assert "no Ray cluster answers" in refusal("auto")
    monkeypatch.setattr("ray._private.services.find_bootstrap_address", lambda folder: "127.0.0.1:1")
    assert "no Ray cluster answers" in refusal("auto")


@pytest.mark.parametrize(
    "address",
    ["", "local", "here", "127.0.0.1", "127.0.0.1:99999", "127.0.0.1:0", "127.0.0.1:http", "http://127.0.0.1:8265", "ray://head", ":6379"],
)
def test_an_address_of_no_known_form_says_how_to_write_one(address):
    assert "host:port" in refusal(address)
