import asyncio

import numpy as np
import pytest

from gemma_ray.benchmarking.endpoint import Endpoint
from gemma_ray.benchmarking.load import RequestRecord, completion_body, poisson_arrivals, run_load


def load(server, requests=1, tokens=4, arrivals=None, timeout_s=30.0) -> list[RequestRecord]:
    async def go():
        endpoint = Endpoint.parse(server.url, "tiny")
        bodies = [completion_body("tiny", [i, i + 1, i + 2], tokens) for i in range(requests)]
        async with endpoint.client() as client:
            return await run_load(client, endpoint.completions, bodies, arrivals or [0.0] * requests, timeout_s)

    return asyncio.run(go())


def test_a_request_asks_for_exactly_its_tokens_as_a_stream(server):
    load(server, tokens=7)
    [body] = server.bodies
    assert body["prompt"] == [0, 1, 2]
    assert body["max_tokens"] == 7
    assert body["ignore_eos"] is True
    assert body["stream"] is True
    assert body["stream_options"] == {"include_usage": True}


def test_times_are_ordered_and_not_shorter_than_the_server_took(server):
    server.first_s, server.gap_s = 0.05, 0.02
    [record] = load(server, tokens=5)
    assert record.ok
    assert len(record.chunk_s) == 5 and list(record.chunk_s) == sorted(record.chunk_s)
    assert record.arrival_s <= record.sent_s < record.chunk_s[0]
    assert record.ttft_s >= 0.05
    assert record.e2e_s >= 0.05 + 4 * 0.02
    assert record.tpot_s is not None and record.ttft_s + record.tpot_s * 4 == pytest.approx(record.e2e_s)
    assert sum(record.itl_s) == pytest.approx(record.e2e_s - record.ttft_s)


def test_token_counts_are_the_servers_and_chunks_only_without_usage(server):
    [with_usage] = load(server, tokens=3)
    server.send_usage = False
    [without] = load(server, tokens=3)
    assert (with_usage.input_tokens, with_usage.output_tokens) == (3, 3)
    assert without.ok and without.output_tokens == len(without.chunk_s) == 3


@pytest.mark.parametrize("gap_s", [0.0, 0.02])
def test_a_slow_server_does_not_slow_arrivals(server, gap_s):
    server.first_s = 1.0
    records = load(server, requests=10, tokens=1, arrivals=[gap_s * i for i in range(10)])
    assert all(r.ok for r in records)
    assert server.most_in_flight == 10  # a closed loop would have had one
    assert all(r.sent_s >= r.arrival_s for r in records)
    assert max(r.sent_s for r in records) < min(r.chunk_s[-1] for r in records)


@pytest.mark.parametrize(
    ("fail", "message"),
    [("http500", "HTTP 500: engine is dead"), ("error_event", "out of memory"), ("cut", "Error"), ("silent", "without a single token")],
)
def test_a_failure_is_a_record_with_its_reason(server, fail, message):
    server.fail = fail
    [record] = load(server, tokens=4)
    assert not record.ok
    assert record.error is not None and message in record.error and "\n" not in record.error


@pytest.mark.parametrize(
    "usage", ["many", [3], {"prompt_tokens": "3"}, {"completion_tokens": -1}, {"prompt_tokens": 1e400}, {"prompt_tokens": 10**400}]
)
def test_a_count_of_tokens_that_is_none_is_a_failure(server, usage):
    server.usage = usage
    [record] = load(server)
    assert record.error is not None and "not an OpenAI stream" in record.error and record.output_tokens == len(record.chunk_s)


@pytest.mark.parametrize(
    "event",
    [b"[" * 200_000, b"9" * 5000, b"\xff", b"7", b"null", b'{"choices": ["text"]}', b'{"choices": "text"}', b'{"choices": {"a": 1}}'],
)
def test_a_stream_of_something_else_is_a_failure(server, event):
    server.event = event
    [record] = load(server)
    assert record.error is not None and record.error.startswith("not an OpenAI stream") and "\n" not in record.error


def test_a_request_that_takes_too_long_names_the_key(server):
    server.first_s = 2.0
    [record] = load(server, timeout_s=0.2)
    assert record.error == "no whole answer in 0.2 s (bench.timeout_s)"


def test_nobody_listening_is_a_record():
    class Nowhere:
        url = "http://127.0.0.1:9"

    [record] = load(Nowhere())
    assert record.error is not None and "Cannot connect" in record.error and record.status is None


def test_arrivals_have_the_rate_asked_and_the_gaps_of_a_poisson_process():
    times = poisson_arrivals(5001, 4.0, np.random.default_rng(0))
    gaps = np.diff(times)
    assert times[0] == 0 and times[-1] == pytest.approx(5000 / 4)
    assert gaps.min() >= 0
    # Exponential: the standard deviation equals the mean, and exp(-1) of the gaps exceed it.
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)
    assert (gaps > gaps.mean()).mean() == pytest.approx(np.exp(-1), abs=0.02)


def test_an_unlimited_rate_sends_everything_at_once():
    assert poisson_arrivals(3, float("inf"), np.random.default_rng(0)) == [0.0, 0.0, 0.0]


def test_arrivals_repeat_with_their_seed():
    first, again, other = (poisson_arrivals(20, 2.0, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert first == again != other
