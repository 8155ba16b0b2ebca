"""What is read from compiled programs, against numbers worked by hand from the programs that were compiled.

The files in `data` are what libtpu 0.0.42 wrote for a v5p 2x2x1, of four chips on one mesh axis x, without what is not read.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from gemma_ray.planning import hlo

DATA = Path(__file__).parent / "data"


def program(name: str) -> hlo.Program:
    return hlo.parse((DATA / f"{name}.hlo").read_text())


def collective(**changes: object) -> hlo.Collective:
    values = {
        "kind": "all-gather",
        "group_size": 4,
        "count": 1,
        "payload_bytes": 0,
        "link_bytes": 0,
        "overlapped": 0,
        "exposed_link_bytes": 0,
    }
    return hlo.Collective(**{**values, **changes})  # type: ignore[arg-type]


def test_a_reduce_scatter_is_told_from_an_all_reduce() -> None:
    # (a@b) of [512, 1024/4] and [1024/4, 2048], summed over x and left sharded: the whole is 512*2048 bfloat16, 3/4 of it is sent.
    whole = 512 * 2048 * 2
    expected = collective(kind="reduce-scatter", payload_bytes=whole, link_bytes=whole * 3 // 4, exposed_link_bytes=whole * 3 // 4)
    assert hlo.collectives(program("reduce_scatter")) == (expected,)


def test_an_all_reduce_sends_twice_as_much() -> None:
    text = (DATA / "reduce_scatter.hlo").read_text().replace("%all-reduce-scatter", "%fused_computation.9")
    whole = 512 * 2048 * 2
    expected = collective(kind="all-reduce", payload_bytes=whole, link_bytes=whole * 3 // 2, exposed_link_bytes=whole * 3 // 2)
    assert hlo.collectives(hlo.parse(text)) == (expected,)


def test_a_collective_in_a_loop_counts_for_every_trip() -> None:
    # scan over 5 weights [1024, 1024] bfloat16, each gathered from 4 chips before its product.
    whole = 5 * 1024 * 1024 * 2
    expected = collective(count=5, payload_bytes=whole, link_bytes=whole * 3 // 4, exposed_link_bytes=whole * 3 // 4)
    assert hlo.collectives(program("scan")) == (expected,)


def test_a_start_and_its_done_are_one_and_exposed_when_nothing_runs_between() -> None:
    # jnp.roll by one chip's rows: each sends [256, 1024] bfloat16 to the next.
    sent = 256 * 1024 * 2
    expected = collective(kind="collective-permute", group_size=2, payload_bytes=sent, link_bytes=sent, exposed_link_bytes=sent)
    assert hlo.collectives(program("permute")) == (expected,)


def test_a_start_and_its_done_are_overlapped_when_something_runs_between() -> None:
    text = (DATA / "permute.hlo").read_text()
    work = next(line for line in text.splitlines() if "copy(%collective-permute-done)" in line).replace("ROOT %copy.1", "%copy.9")
    work = work.replace("%collective-permute-done", "%param")
    done = next(line for line in text.splitlines() if "collective-permute-done(" in line)
    assert hlo.collectives(hlo.parse(text.replace(done, f"{work}\n{done}")))[0].exposed_link_bytes == 0


def test_a_gather_that_rides_on_a_product_is_one_and_overlapped() -> None:
    # Two products with weights [4096, 4096] bfloat16 on 4 chips: the first is gathered before, the second during the first product, as
    # the fusions start, carry and done, in which the all-gather stands three times on one channel.
    text, weight = (DATA / "async_gather.hlo").read_text(), 4096 * 4096 * 2
    assert text.count(" all-gather(") == 4
    expected = collective(
        count=2, payload_bytes=2 * weight, link_bytes=2 * weight * 3 // 4, overlapped=1, exposed_link_bytes=weight * 3 // 4
    )
    assert hlo.collectives(hlo.parse(text)) == (expected,)


@pytest.mark.parametrize(
    ("groups", "size"),
    [
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_0'}", 2),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_0','axis_1'}", 8),
        ("mesh['axis_0'=2,'axis_1'=4] {'axis_1':(2)2}", 2),
        ("[2,8]<=[16]", 8),
        ("[4,4]<=[4,4]T(1,0)", 4),
        ("{{0,1,2},{3,4,5}}", 3),
        ("{}", 4),
    ],
)
def test_every_way_to_write_groups(groups: str, size: int) -> None:
    text = (DATA / "scan.hlo").read_text().replace("mesh['axis_0'=4,'axis_1'=1] {'axis_0'}", groups)
    assert [c.group_size for c in hlo.collectives(hlo.parse(text))] == [size]


def test_loops_in_loops() -> None:
    outer, inner = program("nested_loops").loops
    assert (outer.trips, outer.entered, outer.op_name) == (7, 1, "jit(nested)/while")
    assert (inner.trips, inner.entered) == (3, 7)


def test_cycles_count_for_every_trip() -> None:
    # 7 times (3 times (product 7041 + copy 3773) + tanh 3773) + a copy of 3773 before.
    cycles = hlo.estimated_cycles(program("nested_loops"), slowest=2)
    assert cycles.total == 7 * (3 * (7041 + 3773) + 3773) + 3773
    assert cycles.products == 21 * 7041
    assert cycles.repeated == 20 * (7041 + 3773) + 6 * 3773
    assert cycles.slowest == (
        ("jit(nested)/while/body/closed_call/while/body/closed_call/dot_general bf16[512,512] ×21", 21 * 7041.0),
        ("copy.5 bf16[512,512] ×21", 21 * 3773.0),
    )


def test_a_carried_gather_takes_no_cycles_of_its_own() -> None:
    cycles = hlo.estimated_cycles(program("async_gather"))
    assert (cycles.total, cycles.products) == (29982 + 544925 + 631568, 544925 + 631568)


def test_absurd_estimates_are_left_out() -> None:
    text = (DATA / "reduce_scatter.hlo").read_text().replace('"estimated_cycles":"11383"', '"estimated_cycles":"9223372036854775807"')
    assert hlo.estimated_cycles(hlo.parse(text)).total == 0


def test_kernels_are_counted_by_name_though_their_attributes_break_lines() -> None:
    cycles = hlo.estimated_cycles(program("kernel"))
    assert cycles.kernels == {"splash_mha_fwd_segmented_no_residuals": 1}
    assert cycles.total == 2233 + 7837 + 3741 + 46704


def test_flops_of_repeated_trips() -> None:
    assert hlo.repeated_flops(program("nested_loops")) == 20 * 2 * 512**3
    assert hlo.repeated_flops(program("scan")) == 4 * 2 * 128 * 1024 * 1024
    assert hlo.repeated_flops(program("reduce_scatter")) == 0


def test_a_batch_of_products_is_not_counted_as_the_dilated_window_that_it_is_written_as() -> None:
    # qhd,khd->hqk with q = k = 128, h = 8, d = 256, over a scan of 6; the convolution has a window of 8 over the heads.
    text = (DATA / "batched_product.hlo").read_text()
    assert "window={size=8 stride=7 lhs_dilate=8}" in text
    assert hlo.repeated_flops(hlo.parse(text)) == 5 * 2 * 8 * 128 * 128 * 256


def test_xlas_own_trip_count_comes_first() -> None:
    text = (DATA / "scan.hlo").read_text()
    line = next(line for line in text.splitlines() if " while(" in line)
    known = text.replace(line, line + ', backend_config={"known_trip_count":{"n":"9"}}')
    assert [loop.trips for loop in hlo.parse(known).loops] == [9]


@pytest.mark.parametrize(
    ("old", "new", "trips"),
    [
        ("direction=LT", "direction=LE", 6),
        ("%constant.8.clone = s32[]{:T(128)} constant(0)", "%constant.8.clone = s32[]{:T(128)} constant(2)", 3),
        ("sunk = s32[]{:T(128)} constant(1)", "sunk = s32[]{:T(128)} constant(2)", 3),
        ("%constant.5.clone.1 = s32[]{:T(128)} constant(5)", "%constant.5.clone.1 = s32[]{:T(128)} constant({...})", None),
    ],
)
def test_a_counter_with_another_end_start_or_step(old: str, new: str, trips: int | None) -> None:
    text = (DATA / "scan.hlo").read_text()
    assert old in text
    assert [loop.trips for loop in hlo.parse(text.replace(old, new)).loops] == [trips]


def test_a_loop_of_unknown_length_counts_once() -> None:
    text = (DATA / "scan.hlo").read_text().replace("constant(5)", "constant({...})")
    assert hlo.collectives(hlo.parse(text))[0].count == 1
    assert hlo.repeated_flops(hlo.parse(text)) == 0
