"""A plan as text for people."""

from __future__ import annotations

from gemma_ray.planning.plan import Plan
from gemma_ray.planning.train import HEADROOM, TrainPlan

GIB = 2**30


def plan_text(plan: Plan) -> str:
    """The plan, headed as a prediction, with what it assumes at the end."""
    hardware, a = plan.hardware, plan.arithmetic
    place = " ".join(part for part in (hardware.accelerator, hardware.topology, f"({hardware.devices} devices)") if part)
    lines = [
        f"PREDICTION for {plan.model} on {place}, mesh fsdp={plan.mesh.fsdp} tp={plan.mesh.tp}; nothing was run",
        f"  meshes that work      {', '.join(f'{f}x{t}' for f, t in plan.meshes_that_work)} (fsdp x tp)",
        f"  FLOPs a token         forward {a.forward_flops:.3g}, training {a.train_flops:.3g}, attention {a.attention_flops:.3g}",
        "  KV cache a sequence   " + ", ".join(f"{n} tokens {size / GIB:.2f} GiB" for n, size in a.kv_bytes.items()) + " (a device)",
    ]
    lines += _train_lines(plan.train) if plan.train else [f"  {plan.why_not}"]
    if plan.assumptions:
        lines += ["  assumptions"] + [f"    {name}: {text}" for name, text in plan.assumptions.items()]
    return "\n".join(lines)


def _train_lines(t: TrainPlan) -> list[str]:
    b = t.device_bytes
    share = b.total / t.hbm_bytes
    verdict = "fits" if t.fits else f"DOES NOT FIT in {HEADROOM:.0%}: less remat kept, fewer rows, or train.micro_batches"
    money = "no price" if t.predicted_cost_usd is None else f"{t.predicted_cost_usd:,.2f} USD"
    lines = [
        f"  memory a device       {b.total / GIB:.1f} of {t.hbm_bytes / GIB:.1f} GiB ({share:.0%}): {verdict}",
        f"    base {b.base / GIB:.1f}, adapter {b.adapter / GIB:.2f}, optimizer {b.optimizer / GIB:.2f}, "
        f"temporaries {b.temporaries / GIB:.1f}; XLA's peak {b.peak / GIB:.1f} GiB",
        f"  parameters            {t.base_parameters / 1e9:.2f} B base, {t.trained_parameters / 1e6:.1f} M trained",
        f"  work a step           {t.flops:.3g} FLOPs + {t.attention_flops:.3g} in attention, {t.bytes_moved:.3g} bytes moved",
    ]
    for c in t.collectives:
        lines.append(
            f"    {c['kind']:18} {c['count']:5} × over {c['devices']}: payload {c['payload_bytes'] / GIB:.1f} GiB, "
            f"links {c['link_bytes'] / GIB:.1f} GiB, {c['overlapped']} beside computation"
        )
    lines.append(
        f"  no step is faster than compute {t.compute_floor_s:.3f} s, memory {t.memory_floor_s:.3f} s, links {t.interconnect_floor_s:.3f} s"
    )
    if t.xla_s is not None and t.xla_tokens_per_s is not None:
        lines.append(f"  XLA's ideal estimate  {t.xla_s:.3f} s a step, {t.xla_tokens_per_s:,.0f} tokens/s (no attention, no waiting)")
    lines += [
        f"  predicted step        {t.predicted_step_s:.3f} s = {t.cycles_s:.3f} by XLA's cycles + {t.attention_s:.3f} attention "
        f"+ {t.waiting_s:.3f} waiting for links",
        f"  predicted             {t.predicted_tokens_per_s:,.0f} tokens/s; {t.steps} steps in {t.predicted_hours:.2f} h, {money}",
        f"  compiled in {t.compile_s:.0f} s with {t.compile_host_bytes / GIB:.1f} GiB",
    ]
    return lines
