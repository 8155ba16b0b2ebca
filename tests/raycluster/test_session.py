import socket
import time

import pytest

from raycluster import session
from raycluster.errors import ClusterError
from raycluster.session import connect
from raycluster.slices import resolve


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
