import itertools

import pytest
from ray._private.accelerators.tpu import VALID_TPU_TOPOLOGY, get_chips_per_host, infer_tpu_pod_type_from_topology
from ray.util.accelerators import accelerators as ray_accelerators
from ray.util.tpu import get_tpu_worker_resources

from raycluster.errors import ClusterError
from raycluster.slices import ACCELERATORS, check_mesh, resolve

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
