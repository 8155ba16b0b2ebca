import json

import pytest

from gemma_ray.benchmarking.config import BenchConfig
from gemma_ray.benchmarking.sweep import benchmark, read_cells, whole_benchmark
from gemma_ray.errors import InputError, StageError

IDS = range(100, 400)


def config(**changes) -> BenchConfig:
    return BenchConfig(
        **{"contexts": (16, 32), "qps": (200.0, float("inf")), "requests": 4, "output_tokens": 3, "timeout_s": 20.0, **changes}
    )


def run(server, out, cfg=None, **kw):
    return benchmark(cfg or config(), out, url=server.url, model="tiny", token_ids=IDS, **kw)


def names(folder) -> set[str]:
    return {p.name for p in folder.iterdir()}


def test_a_sweep_writes_a_file_a_cell(server, tmp_path):
    cells = run(server, tmp_path / "bench")
    assert [(c.context, c.qps) for c in cells] == [(16, 200.0), (16, float("inf")), (32, 200.0), (32, float("inf"))]
    assert names(tmp_path / "bench") == {"16_200.json", "16_inf.json", "32_200.json", "32_inf.json"}
    cell = json.loads((tmp_path / "bench" / "32_inf.json").read_text())
    assert (cell["context"], cell["qps"], cell["model"], cell["url"]) == (32, "inf", "tiny", server.url)
    assert (cell["requests"], cell["completed"], cell["failed"]) == (4, 4, 0)
    assert (cell["input_tokens"], cell["output_tokens"]) == (4 * 32, 4 * 3)
    assert cell["output_tokens_per_s"] == pytest.approx(cell["output_tokens"] / cell["duration_s"])
    for metric in ("ttft_ms", "tpot_ms", "itl_ms", "e2e_ms"):
        assert cell[metric]["p50"] <= cell[metric]["p90"] <= cell[metric]["p99"]
    assert cell["ttft_ms"]["mean"] + cell["tpot_ms"]["mean"] * 2 == pytest.approx(cell["e2e_ms"]["mean"])


def test_prompts_are_distinct_of_exact_length_and_from_the_ids(server, tmp_path):
    run(server, tmp_path)
    assert sorted(map(len, server.prompts)) == [16] * 9 + [32] * 9  # two cells of 4 and a warm-up each
    assert len({tuple(p) for p in server.prompts}) == 18
    assert set().union(*server.prompts) <= set(IDS)


def test_a_second_sweep_does_not_send_the_first_ones_prompts(server, tmp_path):
    run(server, tmp_path / "a")
    run(server, tmp_path / "b")
    assert len({tuple(p) for p in server.prompts}) == 36


def test_finished_cells_are_kept_and_a_wider_sweep_adds_to_them(server, tmp_path):
    first = run(server, tmp_path, config(qps=(200.0,)))
    sent = len(server.bodies)
    assert run(server, tmp_path, config(qps=(200.0,))) == first
    assert len(server.bodies) == sent
    assert run(server, tmp_path)[::2] == first
    assert len(server.bodies) == sent + 2 * (4 + 1)


def test_cells_of_another_configuration_or_torn_are_measured_again(server, tmp_path):
    run(server, tmp_path, config(contexts=(16,)))
    (tmp_path / "16_inf.json").write_text('{"context": 16')
    server.bodies.clear()
    run(server, tmp_path, config(contexts=(16,)))
    assert len(server.bodies) == 1 + 4
    [cell, _] = run(server, tmp_path, config(contexts=(16,), output_tokens=5))
    assert cell.output_tokens == 4 * 5


def test_load_by_time_sends_rate_times_seconds(server, tmp_path):
    cells = run(server, tmp_path, config(contexts=(16,), duration_s=0.05))
    assert [c.requests for c in cells] == [10, 4]


@pytest.mark.parametrize("ray_card", [False, True])
def test_a_context_too_long_is_refused_before_anything_is_sent(server, tmp_path, ray_card):
    server.max_model_len, server.ray_card = 34, ray_card
    with pytest.raises(InputError, match=r"bench\.contexts: 32 .* 3 .* 34"):
        run(server, tmp_path)
    assert not server.bodies and not names(tmp_path)


@pytest.mark.parametrize("in_stream", [False, True])
def test_a_refusal_by_a_server_that_does_not_tell_its_limit_names_the_key(server, tmp_path, in_stream):
    server.max_model_len, server.refuse_over, server.refuse_in_stream = None, 34, in_stream
    with pytest.raises(InputError, match=r"bench\.contexts: .* 32 tokens: .*maximum context length is 34 tokens"):
        run(server, tmp_path)
    assert len(server.bodies) == 1 and not names(tmp_path)


def test_an_unknown_model_is_refused_with_the_ones_served(server, tmp_path):
    with pytest.raises(InputError, match="does not serve 'other'; it serves tiny"):
        benchmark(config(), tmp_path, url=server.url + "/v1", model="other", token_ids=IDS)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "localhost:8000", "http://"])
def test_an_endpoint_that_cannot_be_reached_is_one_line(tmp_path, url):
    with pytest.raises(InputError) as e:
        benchmark(config(), tmp_path, url=url, model="tiny", token_ids=IDS)
    assert "\n" not in str(e.value) and "--url" in str(e.value)


def test_cells_where_everything_failed_are_written_and_the_sweep_ends_in_an_error(server, tmp_path):
    server.fail = "http500"
    with pytest.raises(StageError, match=r"4 of 4 cells.*HTTP 500: engine is dead"):
        run(server, tmp_path)
    cell = json.loads((tmp_path / "16_inf.json").read_text())
    assert (cell["completed"], cell["failed"], cell["errors"]) == (0, 4, {"HTTP 500: engine is dead": 4})


def test_failed_cells_are_measured_again_and_part_failures_do_not_stop_a_sweep(server, tmp_path):
    server.fail = "http500"
    with pytest.raises(StageError):
        run(server, tmp_path)
    server.fail_every, server.fail = 3, "error_event"
    cells = run(server, tmp_path)
    assert all(c.completed for c in cells)
    assert sum(c.failed for c in cells) > 0 and all(c.completed + c.failed == 4 for c in cells)


def test_progress_counts_the_answers_of_every_cell(server, tmp_path):
    calls: list[tuple[int, int, str]] = []
    run(server, tmp_path, progress=lambda *call: calls.append(call))
    assert [c[:2] for c in calls if c[2] == "32 tokens, all at once"] == [(1, 4), (2, 4), (3, 4), (4, 4)]
    assert sum(c[:2] == (1, 1) and "warm-up" in c[2] for c in calls) == 2
    calls.clear()
    run(server, tmp_path, progress=lambda *call: calls.append(call))
    assert len(calls) == 4 and all(c[:2] == (4, 4) and "kept" in c[2] for c in calls)


def test_new_weights_behind_the_same_url_are_measured_again(server, tmp_path):
    run(server, tmp_path, made_from=["weights", 1])
    sent = len(server.bodies)
    run(server, tmp_path, made_from=["weights", 1])
    assert len(server.bodies) == sent
    run(server, tmp_path, made_from=["weights", 2])
    assert len(server.bodies) == 2 * sent


def test_cells_of_another_sweep_are_removed_but_only_when_the_endpoint_works(server, tmp_path):
    run(server, tmp_path)
    (tmp_path / "notes.json").write_text('{"by": "hand"}')
    other = config(contexts=(64,), output_tokens=5)
    server.max_model_len = 10
    with pytest.raises(InputError):
        run(server, tmp_path, other)
    assert len(names(tmp_path)) == 5
    server.max_model_len = 4096
    run(server, tmp_path, other)
    assert names(tmp_path) == {"64_200.json", "64_inf.json", "notes.json"}


def test_cells_read_back_in_order(server, tmp_path):
    cells = run(server, tmp_path, config(contexts=(32, 16), qps=(float("inf"), 200.0)))
    assert read_cells(tmp_path) == sorted(cells, key=lambda c: (c.context, c.qps))
    (tmp_path / "16_1.json").write_text("{")
    with pytest.raises(InputError, match=r"16_1\.json is damaged"):
        read_cells(tmp_path)


def test_the_only_model_served_needs_no_name(server, tmp_path):
    cells = benchmark(config(), tmp_path, url=server.url, model=None, token_ids=IDS)
    assert {c.model for c in cells} == {"tiny"}
    server.models = ("tiny", "base")
    with pytest.raises(InputError, match="serves base, tiny: say which with --model"):
        benchmark(config(), tmp_path, url=server.url, model=None, token_ids=IDS)


def test_too_few_ids_for_distinct_prompts_are_refused(server, tmp_path):
    with pytest.raises(InputError, match=r"bench\.contexts: 1 token ids"):
        benchmark(config(), tmp_path, url=server.url, model="tiny", token_ids=[5, 5, 5])
    with pytest.raises(InputError, match="token_ids is empty"):
        benchmark(config(), tmp_path, url=server.url, model="tiny", token_ids=[])


@pytest.mark.parametrize(
    "cards",
    [
        b"[" * 200_000,
        b"9" * 5000,
        b"[]",
        b'{"data": null}',
        b'{"data": ["tiny"]}',
        b'{"data": [{"id": 7}]}',
        b'{"data": [{"id": "tiny", "max_model_len": "long"}]}',
        b'{"data": [{"id": "tiny", "metadata": "none"}]}',
    ],
)
def test_a_list_of_something_else_than_models_is_told(server, tmp_path, cards):
    server.cards = cards
    with pytest.raises(InputError, match=r"/v1/models: not an OpenAI list of models"):
        run(server, tmp_path)


DAMAGED = ["{", "{}", "[]", "null", "", "[" * 200_000, "9" * 5000]


@pytest.mark.parametrize("damaged", DAMAGED)
def test_a_damaged_cell_is_told_and_measured_again(server, tmp_path, damaged):
    cells = run(server, tmp_path)
    assert whole_benchmark(tmp_path, config()) and not whole_benchmark(tmp_path, config(contexts=(16, 64)))
    sent = len(server.bodies)
    (tmp_path / "16_inf.json").write_text(damaged)
    assert not whole_benchmark(tmp_path, config())
    with pytest.raises(InputError, match=r"16_inf\.json is damaged; remove it"):
        read_cells(tmp_path)
    assert run(server, tmp_path)[0] == cells[0] and len(server.bodies) == sent + 1 + 4
    assert whole_benchmark(tmp_path, config())


@pytest.mark.parametrize(
    "change", [{"context": None}, {"context": 8}, {"qps": 3.0}, {"ttft_ms": 1.0}, {"errors": None}, {"completed": "many"}]
)
def test_a_cell_whose_content_is_not_its_names_is_not_whole(server, tmp_path, change):
    run(server, tmp_path)
    path = tmp_path / "16_inf.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    assert not whole_benchmark(tmp_path, config())
    path.unlink()
    assert not whole_benchmark(tmp_path, config())


def test_a_rate_that_shares_its_file_name_with_the_last_sweeps_is_measured(server, tmp_path):
    run(server, tmp_path, config(qps=(200.0001,), contexts=(16,)))
    [cell] = run(server, tmp_path, config(qps=(200.0002,), contexts=(16,)))
    assert cell.qps == 200.0002


def test_contexts_that_differ_in_the_last_digit_are_two():
    assert config(contexts=(1_000_000, 1_000_001)).contexts == (1_000_000, 1_000_001)


@pytest.mark.parametrize(
    "changes",
    [
        {"contexts": ()},
        {"contexts": (99_999_999_999,)},
        {"contexts": (16, 16)},
        {"qps": (0.0,)},
        {"qps": (1.0, 1.0)},
        {"qps": (1.0000001, 1.0000002)},
        {"qps": (float("nan"),)},
        {"qps": (1e300,)},
        {"qps": (5e-324,)},
        {"requests": 0},
        {"requests": 10**12},
        {"output_tokens": 10**12},
        {"duration_s": float("inf")},
        {"duration_s": 1e12},
        {"duration_s": 86_400.0},
        {"timeout_s": float("inf")},
        {"seed": -1},
        {"seed": 2**31},
    ],
)
def test_a_sweep_that_makes_no_sense_is_not_a_configuration(changes):
    with pytest.raises(ValueError):
        config(**changes)
