import itertools

import pytest
from ray._private.accelerators.tpu import VALID_TPU_TOPOLOGY, get_chips_per_host, infer_tpu_pod_type_from_topology
from ray.util.accelerators import accelerators as ray_accelerators
from ray.util.tpu import get_tpu_worker_resources

from raycluster.errors import ClusterError
from raycluster.slices import ACCELERATORS, check_mesh, fallbacks, resolve

TPUS = [name for name, row in ACCELERATORS.items() if row.is_tpu]
SIDES = (1, 2, 3, 4, 8, 12, 16, 20, 24)


@pytest.mark.parametrize("name", TPUS)
def test_a_topology_is_valid_exactly_where_ray_says_so(name):
    row = ACCELERATORS[name]
    valid = VALID_TPU_TOPOLOGY[str(row.pod_prefix)]
    candidates = {"x".join(map(str, sides)) for sides in itertools.product(SIDES, repeat=row.dimensions)} | valid
    assert {topology for topology in candidates if row.accepts(topology)} == valid


@pytest.mark.parametrize("name", TPUS)
def test_hosts_chips_and_pod_type_are_those_that_ray_works_out(name):
    row = ACCELERATORS[name]
    for topology in VALID_TPU_TOPOLOGY[str(row.pod_prefix)]:
        slice = resolve(name, topology)
        hosts, resources = get_tpu_worker_resources(topology, str(slice.accelerator_type))
        assert (slice.hosts, slice.devices_per_host) == (hosts, resources["TPU"]), topology
        assert slice.devices_per_host == get_chips_per_host(topology, str(row.pod_prefix))
        assert slice.pod_type == infer_tpu_pod_type_from_topology(topology, str(slice.accelerator_type))


def test_accelerator_types_are_names_that_ray_knows():
    known = {value for key, value in vars(ray_accelerators).items() if key.isupper()}
    assert {row.ray_type for row in ACCELERATORS.values() if row.ray_type} <= known


@pytest.mark.parametrize(
    ("arguments", "hosts", "devices_per_host", "pod_type"),
    [
        (("v5p", "2x2x1"), 1, 4, "v5p-8"),
        (("v5p", "2x2x2"), 2, 4, "v5p-16"),
        (("v6e", "2x4"), 1, 8, "v6e-8"),
        (("v6e", "4x4"), 4, 4, "v6e-16"),
        (("v5e", "2x2"), 1, 4, "v5litepod-4"),
        (("h100", None, 2), 2, 8, None),
        (("h100", None, 1, 2), 1, 2, None),
        (("cpu",), 1, 1, None),
        (("v5p", "2x2x1", 1, 2, True), 2, 2, "v5p-8"),
    ],
)
def test_slices_that_people_ask_for(arguments, hosts, devices_per_host, pod_type):
    slice = resolve(*arguments)
    assert (slice.hosts, slice.devices_per_host, slice.pod_type) == (hosts, devices_per_host, pod_type)
    assert slice.devices == hosts * devices_per_host


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"accelerator": "v5"}, "Did you mean 'v5p'"),
        ({"accelerator": "quantum"}, "Known: v4, v5p"),
        ({"accelerator": "v5p"}, "needs a topology"),
        ({"accelerator": "v5p", "topology": "2x4"}, "3 dimensions"),
        ({"accelerator": "v6e", "topology": "2x2x1"}, "2 dimensions"),
        ({"accelerator": "v5p", "topology": "3x3x3"}, "no v5p slice"),
        ({"accelerator": "v5p", "topology": "0x4x4"}, "no v5p slice"),
        ({"accelerator": "v5p", "topology": "2 by 2"}, "not of the form 2x2x1"),
        ({"accelerator": "v5p", "topology": "2x2x1", "devices_per_host": 3, "emulate": True}, "does not divide"),
        ({"accelerator": "v5p", "topology": "2x2x1", "devices_per_host": 2}, "Only an emulated slice"),
        ({"accelerator": "v5p", "topology": "2x2x2", "hosts": 3}, "has 2"),
        ({"accelerator": "h100", "topology": "2x2"}, "h100 has none"),
        ({"accelerator": "h100", "devices_per_host": 9}, "has 8"),
        ({"accelerator": "cpu", "hosts": 0}, "at least 1"),
        ({"accelerator": "v5p", "topology": "2x2x1", "slices": 0}, "slices = 0: must be at least 1"),
        ({"accelerator": "h100", "slices": 2}, "slices = 2: h100 is not made of slices. Leave it out, and use more hosts"),
    ],
)
def test_what_does_not_exist_is_refused_with_what_does(arguments, said):
    with pytest.raises(ClusterError, match=said) as refused:
        resolve(**arguments)
    assert refused.value.exit_code == 2
    assert "\n" not in str(refused.value)


def test_jax_set_up_on_gpus_accepts_the_worker_resources():
    gpus = resolve("h100", devices_per_host=2).worker_resources["GPU"]
    assert list(range(gpus)) == [0, 1]  # what ray.train.v2.jax.config does with it


def test_a_mesh_that_fits_passes_and_one_that_does_not_names_those_that_do():
    slice = resolve("v5p", "2x2x1")
    check_mesh(slice, 1, 4)
    check_mesh(slice, 2, 2)
    with pytest.raises(ClusterError, match=r"fsdp=4 x tp=4 needs 16 devices.* has 4.*fit: 4x1, 2x2, 1x4$"):
        check_mesh(slice, 4, 4)


def test_several_slices_count_together_and_a_mesh_covers_one():
    two = resolve("v5p", "2x2x2", slices=2)
    assert (two.hosts, two.hosts_per_slice, two.devices, two.devices_per_slice) == (4, 2, 16, 8)
    assert two.pod_type == "v5p-16"
    assert two.describe() == "2 slices of v5p 2x2x2, 4 hosts x 4 TPU"
    check_mesh(two, 2, 4)
    with pytest.raises(ClusterError, match="has 8 in a slice, which is what a mesh covers"):
        check_mesh(two, 4, 4)


def test_fallbacks_lose_slices_of_a_tpu_and_hosts_of_others():
    three = resolve("v5p", "2x2x2", slices=3)
    assert [(s.slices, s.hosts, s.devices) for s in fallbacks(three, 1)] == [(2, 4, 16), (1, 2, 8)]
    assert [s.hosts for s in fallbacks(resolve("h100", hosts=4), 2)] == [3, 2]
    assert fallbacks(three, None) == fallbacks(three, 3) == []
    with pytest.raises(ClusterError, match=r"min_hosts = 5: h100 4 hosts x 8 GPU has 4 hosts. Choose from 1 to 4"):
        fallbacks(resolve("h100", hosts=4), 5)
