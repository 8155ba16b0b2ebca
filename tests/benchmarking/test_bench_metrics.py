import json
import math

import numpy as np
import pytest

from gemma_ray.benchmarking.load import RequestRecord
from gemma_ray.benchmarking.metrics import Cell, cell_name, measure, summarize
from gemma_ray.benchmarking.sweep import table


def record(arrival, sent, chunks, output=None, error=None):
    return RequestRecord(arrival, sent, tuple(chunks), input_tokens=8, output_tokens=output or len(chunks), error=error)


def hand_worked() -> Cell:
    return measure(
        8,
        2.0,
        "http://host",
        "tiny",
        3,
        [
            record(0.0, 0.0, [0.1, 0.3, 0.5]),  # TTFT 100, E2E 500, TPOT 200, ITL 200 200
            record(0.5, 0.6, [0.9, 1.0, 2.0]),  # TTFT 300, E2E 1400, TPOT 550, ITL 100 1000; sent 100 ms late
            record(1.0, 1.0, [], error="HTTP 500: x"),
        ],
    )


def test_a_cell_worked_by_hand():
    cell = hand_worked()
    assert (cell.requests, cell.completed, cell.failed) == (3, 2, 1)
    assert cell.duration_s == pytest.approx(2.0)
    assert (cell.input_tokens, cell.output_tokens) == (16, 6)
    assert cell.output_tokens_per_s == pytest.approx(3.0)
    assert cell.total_tokens_per_s == pytest.approx(11.0)
    assert cell.achieved_qps == pytest.approx(1.0)
    assert cell.ttft_ms.mean == pytest.approx(200) and cell.ttft_ms.p50 == pytest.approx(200)
    assert cell.ttft_ms.p90 == pytest.approx(100 + 0.9 * 200) and cell.ttft_ms.p99 == pytest.approx(100 + 0.99 * 200)
    assert cell.e2e_ms.mean == pytest.approx(950)
    assert cell.tpot_ms.mean == pytest.approx((200 + 550) / 2)
    assert cell.itl_ms.samples == 4 and cell.itl_ms.mean == pytest.approx((200 + 200 + 100 + 1000) / 4)
    assert cell.max_send_lag_ms == pytest.approx(100)
    assert cell.errors == {"HTTP 500: x": 1}


def test_tpot_counts_tokens_and_itl_counts_chunks():
    # Two tokens a chunk: 9 tokens in 3 chunks over 0.8 s after the first.
    cell = measure(8, 1.0, "u", "m", 9, [record(0, 0, [0.2, 0.6, 1.0], output=9)])
    assert cell.tpot_ms.mean == pytest.approx(100)
    assert cell.itl_ms.mean == pytest.approx(400)


def test_percentiles_are_numpys():
    values = np.random.default_rng(3).lognormal(size=257)
    summary = summarize(values.tolist())
    assert summary.mean == pytest.approx(values.mean() * 1e3)
    for name, q in (("p50", 50), ("p90", 90), ("p99", 99)):
        assert getattr(summary, name) == pytest.approx(np.percentile(values, q) * 1e3)


@pytest.mark.parametrize(("samples", "too_few"), [(1, ("p50", "p90", "p99")), (10, ("p99",)), (99, ("p99",)), (100, ())])
def test_percentiles_without_enough_samples_are_named(samples, too_few):
    assert summarize([0.1] * samples).too_few == too_few


def test_one_output_token_has_no_tpot_and_no_itl():
    cell = measure(8, 1.0, "u", "m", 1, [record(0, 0, [0.2])])
    assert cell.tpot_ms.mean is None and cell.itl_ms.p99 is None and cell.tpot_ms.samples == 0
    assert cell.ttft_ms.mean == pytest.approx(200) == cell.e2e_ms.mean


def test_answers_that_stopped_early_are_counted():
    assert hand_worked().short_outputs == 0
    assert measure(8, 1.0, "u", "m", 4, [record(0, 0, [0.2, 0.3])]).short_outputs == 1


def test_a_cell_where_everything_failed_divides_by_nothing():
    cell = measure(8, math.inf, "u", "m", 4, [record(0, 0, [], error="no"), record(0, 0, [], error="no")])
    assert (cell.completed, cell.failed, cell.output_tokens_per_s, cell.ttft_ms.mean) == (0, 2, 0.0, None)


@pytest.mark.parametrize("qps", [0.5, 1.0, 32.0, math.inf])
def test_a_cell_is_strict_json_and_reads_back(qps):
    cell = measure(8, qps, "u", "m", 3, [record(0, 0, [0.1, 0.2, 0.4])])

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    assert Cell.from_json(json.loads(json.dumps(cell.to_json()), parse_constant=refuse)) == cell


def test_file_names_carry_the_rate_as_people_write_it():
    assert [cell_name(128, q) for q in (1.0, 0.5, math.inf, 12.5)] == ["128_1", "128_0.5", "128_inf", "128_12.5"]


def test_the_table_marks_percentiles_with_too_few_samples():
    head, row, note = table([hand_worked()]).splitlines()
    assert head.split()[:2] == ["context", "requests/s"]
    assert row.split() == ["8", "2", "2/3", "3.0", "200.0", "280.0*", "298.0*", "375.0", "515.0*", "546.5*", "950.0"]
    assert "p99 wants 100" in note


@pytest.mark.slow
def test_metrics_are_those_of_vllm_bench_serve():
    serve = pytest.importorskip("vllm.benchmarks.serve")
    from vllm.benchmarks.lib.endpoint_request_func import RequestFuncOutput

    rng = np.random.default_rng(5)
    records, theirs = [], []
    for i in range(40):
        sent, tokens = float(rng.uniform(0, 3)), int(rng.integers(1, 30))
        chunks = sent + np.cumsum(rng.exponential(0.05, tokens))
        records.append(record(sent, sent, chunks.tolist()))
        output = RequestFuncOutput(success=True, latency=chunks[-1] - sent, output_tokens=tokens, ttft=chunks[0] - sent, prompt_len=8)
        output.itl, output.start_time = np.diff(chunks).tolist(), sent
        theirs.append(output)
        if i % 10 == 0:
            records.append(record(sent, sent, [], error="HTTP 500"))
            theirs.append(RequestFuncOutput(success=False, error="HTTP 500"))
    cell = measure(8, 1.0, "u", "m", 1, records)
    metrics, _ = serve.calculate_metrics([], theirs, cell.duration_s, None, [50, 90, 99], {})
    assert (metrics.completed, metrics.failed, metrics.total_output) == (cell.completed, cell.failed, cell.output_tokens)
    assert metrics.output_throughput == pytest.approx(cell.output_tokens_per_s)
    for ours, name in ((cell.ttft_ms, "ttft"), (cell.tpot_ms, "tpot"), (cell.itl_ms, "itl"), (cell.e2e_ms, "e2el")):
        assert ours.mean == pytest.approx(getattr(metrics, f"mean_{name}_ms"))
        assert [ours.p50, ours.p90, ours.p99] == pytest.approx([value for _, value in getattr(metrics, f"percentiles_{name}_ms")])
