"""A plan, or a sweep of plans, as text for people."""

from __future__ import annotations

from gemma_ray.planning.explain import LESS_MEMORY
from gemma_ray.planning.hardware import GIB
from gemma_ray.planning.plan import Plan
from gemma_ray.planning.replica import ReplicaPlan
from gemma_ray.planning.sweep import Sweep, fastest
from gemma_ray.planning.train import HEADROOM, TrainPlan


def page_text(found: Plan | Sweep) -> str:
    """What was found, headed as a prediction."""
    return plan_text(found) if isinstance(found, Plan) else sweep_text(found)


def plan_text(plan: Plan) -> str:
    """The plan, headed as a prediction, with what it assumes at the end."""
    hardware, a = plan.hardware, plan.arithmetic
    devices = f"({hardware.devices} device{'' if hardware.devices == 1 else 's'})"
    place = " ".join(part for part in (hardware.accelerator, hardware.topology, devices) if part)
    lines = [
        f"PREDICTION for {plan.model} on {place}, mesh fsdp={plan.mesh.fsdp} tp={plan.mesh.tp}; nothing was run",
        f"  meshes that work      {', '.join(f'{f}x{t}' for f, t in plan.meshes_that_work)} (fsdp x tp)",
        f"  parameters            {_count(a.base_parameters)} base, {_count(a.trained_parameters)} trained; with optimizer "
        f"{_size(a.state_bytes)} a device, activations on top",
        f"  FLOPs a token         forward {a.forward_flops:.3g}, training {a.train_flops.total:.3g} "
        f"(adapter {a.train_flops.adapter:.2g}, attention {a.train_flops.attention:.2g})",
        "  KV cache a sequence   " + ", ".join(f"{n} tokens {_size(size)}" for n, size in a.kv_bytes.items()) + " (a device)",
    ]
    if a.compute_floor_hours is not None:
        lines.append(f"  compute floor         {_time(a.compute_floor_hours * 3600)} for all steps at the peak of all devices")
    lines += _train_lines(plan.train) if plan.train else [f"  {plan.why_not}"]
    if plan.serve:
        lines.append(serve_text(plan.serve))
    if plan.assumptions:
        lines += ["  assumptions"] + [f"    {name}: {text}" for name, text in plan.assumptions.items()]
    return "\n".join(lines)


def _train_lines(t: TrainPlan) -> list[str]:
    b = t.device_bytes
    share = b.total / t.hbm_bytes
    verdict = "fits" if t.fits else f"DOES NOT FIT in {HEADROOM:.0%}; what would help: {LESS_MEMORY}"
    money = "no price" if t.predicted_cost_usd is None else f"{_money(t.predicted_cost_usd)} USD"
    lines = [
        f"  memory a device       {_size(b.total)} of {_size(t.hbm_bytes)} ({share:.0%}): {verdict}",
        f"    base {_size(b.base)}, adapter {_size(b.adapter)}, optimizer {_size(b.optimizer)}, "
        f"temporaries {_size(b.temporaries)}; XLA's peak {_size(b.peak)}",
        f"  work a step           {t.flops:.3g} FLOPs + {t.attention_flops:.3g} in attention, {t.bytes_moved:.3g} bytes moved",
    ]
    for c in t.collectives:
        lines.append(
            f"    {c['kind']:18} {c['count']:5} × over {c['devices']}: payload {_size(c['payload_bytes'])}, "
            f"links {_size(c['link_bytes'])}, {c['overlapped']} beside computation"
        )
    lines.append(
        f"  rooflines             compute {_time(t.compute_floor_s)}, memory {_time(t.memory_floor_s)}, "
        f"links {_time(t.interconnect_floor_s)}"
    )
    if t.xla_s is not None and t.xla_tokens_per_s is not None:
        lines.append(f"  XLA's ideal estimate  {_time(t.xla_s)} a step, {t.xla_tokens_per_s:,.0f} tokens/s (no attention, no waiting)")
    lines += [
        f"  predicted step        {_time(t.predicted_step_s)}, no less than a roofline: {_time(t.cycles_s)} by XLA's cycles + "
        f"{_time(t.attention_s)} attention + {_time(t.waiting_s)} waiting for links",
        f"  predicted             {t.predicted_tokens_per_s:,.0f} tokens/s; {t.steps} steps in {_time(t.predicted_hours * 3600)}, {money}",
        f"  compiled in {t.compile_s:.0f} s with {_size(t.compile_host_bytes)}",
    ]
    return lines


def serve_text(s: ReplicaPlan) -> str:
    """A replica's plan, headed as a prediction, with what it assumes at the end."""
    r, plan = s.replica, s.by_cache[s.cache]
    place = " ".join(part for part in (r.accelerator, r.topology) if part)
    verdict = "fits" if plan.fits else f"DOES NOT FIT: {_size(plan.missing_bytes)} a device are missing"
    lines = [
        f"SERVING, PREDICTION for one replica of {r.devices} devices ({place}), tp={r.devices}, {s.cache} cache: {verdict}",
        f"  memory a device       {_size(plan.memory_bytes)}: weights {_size(plan.weight_bytes)}, activations "
        f"{_size(plan.activation_bytes)}, left for keys and values {_size(max(plan.kv_budget_bytes, 0))}",
    ]
    if plan.token_buckets:
        lines.append(f"  steps of so many tokens are compiled at start: {', '.join(map(str, plan.token_buckets))}")
    names = list(s.by_cache)
    lines += [
        "  prompt    sequences that fit     padding   first token   a token alone   all full   ceiling of",
        f"  tokens    {names[0]:>9}{names[1]:>10}      of prefill   floor ms      floor ms        floor ms   tokens/s",
    ]
    for i, c in enumerate(plan.contexts):
        fit = "".join(f"{s.by_cache[name].contexts[i].sequences:>{width}}" for name, width in zip(names, (9, 10), strict=True))
        decode = "".join(f"{d.tpot_floor_s * 1e3:>{width}.1f}" if d else f"{'-':>{width}}" for d, width in ((c.alone, 16), (c.full, 16)))
        ceiling = f"{c.full.tokens_per_s_ceiling:>11,.0f}" if c.full else f"{'-':>11}"
        lines.append(f"  {c.context:<10}{fit}{c.padding_share:>15.1%}{c.ttft_floor_s * 1e3:>12.0f}{decode}{ceiling}")
    for p in s.compiled:
        f = p.result
        time = "" if p.cycles_s is None else f"; {_time(p.cycles_s)} by XLA's cycles, without its {f.collectives} collectives"
        lines.append(
            f"  compiled {p.phase}: {p.batch} x {p.tokens} tokens, cache for {p.context}: weights {_size(f.weight_bytes)}, "
            f"cache {_size(f.cache_bytes)}, temporaries {_size(f.temporary_bytes)} a device{time}"
        )
    if s.why_not_compiled:
        lines.append(f"  {s.why_not_compiled}")
    return "\n".join([*lines, "  assumptions of serving", *(f"    {name}: {text}" for name, text in plan.assumptions.items())])


def sweep_text(sweep: Sweep) -> str:
    """The variants of a sweep as a table, fastest first, and the overrides of the fastest that fits."""
    how = f"continued from {sweep.depths[0]} and {sweep.depths[1]} layers" if sweep.depths else "compiled whole"
    lines = [
        f"PREDICTIONS, {how}; nothing was run. * = no other that fits is as fast with less memory",
        "     fsdp  tp   remat         micro-   block     memory a       XLA's      predicted   cost",
        "                              batches            device GiB     tokens/s   tokens/s    USD",
    ]
    for t in sweep.tried:
        o = t.overrides
        block = o.get("train.splash_block") or "default"
        key = f"{o['mesh.fsdp']:>6}{o['mesh.tp']:>5}   {o['train.remat']:<13}{o['train.micro_batches']:>6}   {block:<8}"
        if t.plan is None:
            lines.append(f"   {key}  does not compile: {t.why_not}")
            continue
        xla = "-" if t.plan.xla_tokens_per_s is None else f"{t.plan.xla_tokens_per_s:,.0f}"
        cost = "-" if t.plan.predicted_cost_usd is None else _money(t.plan.predicted_cost_usd)
        memory = f"{t.plan.device_bytes.total / GIB:.1f}{'' if t.plan.fits else ' too much'}"
        lines.append(f" {'*' if t.best_for_its_memory else ' '} {key}{memory:>12}{xla:>15}{t.plan.predicted_tokens_per_s:>13,.0f}   {cost}")
    best = fastest(list(sweep.tried))
    if best is None:
        lines.append("no variant fits")
    else:
        lines.append("fastest that fits: " + " ".join(f"--set {key}={value}" for key, value in best.overrides.items()))
    if sweep.left:
        lines.append(f"{sweep.left} variants were left when plan.sweep_limit_s was over; run again to go on, what is compiled is kept")
    return "\n".join(lines)


def _scaled(amount: float, units: tuple[tuple[float, str], ...]) -> str:
    """An amount in the largest unit that it holds one of, the smallest otherwise, to three or four digits."""
    if not amount:
        return f"0 {dict(units)[1]}"
    size, unit = next(((size, unit) for size, unit in units if amount >= size), units[-1])
    return f"{amount / size:.{2 if amount / size < 10 else 1}f} {unit}"


def _size(size: float) -> str:
    return _scaled(size, ((GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B")))


def _time(seconds: float) -> str:
    return _scaled(seconds, ((3600, "h"), (60, "min"), (1, "s"), (1e-3, "ms"), (1e-6, "µs")))


def _count(count: float) -> str:
    return _scaled(count, ((1e9, "B"), (1e6, "M"), (1e3, "k"), (1, "")))


def _money(usd: float) -> str:
    return f"{usd:,.2f}" if usd >= 0.01 or usd == 0 else f"{usd:.2g}"
