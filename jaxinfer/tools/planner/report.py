"""The planner's text and JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jaxinfer.tools.compile_gate.matrix import ChipTarget
from jaxinfer.tools.compile_gate.report import table
from jaxinfer.tools.compile_gate.steps import StepProgram
from jaxinfer.tools.compile_gate.target import Chip
from jaxinfer.tools.planner.models import NamedModel
from jaxinfer.tools.planner.options import format_mesh
from jaxinfer.tools.planner.plans import ModelPlan, StepFigures, gigabytes
from jaxinfer.tools.planner.roofline import flop_rate
from jaxinfer.tools.planner.search import Candidate, largest_mesh


def as_json(program: StepProgram, context: int, plan: ModelPlan) -> dict[str, Any]:
    """All findings; bytes and seconds are those of one device, rows and pages those of a
    replica."""
    found = {
        "model": program.named.name,
        "target": program.chip.target.name,
        "mesh": program.config.mesh.sizes,
        "devices": program.config.mesh.num_devices,
        "replicas": program.config.mesh.data,
        "quantize": program.config.quantize,
        "context": context,
        "layers": program.num_layers,
        **dataclasses.asdict(plan),
    }
    for name in ("decode", "prefill"):
        step: StepFigures | None = getattr(plan, name)
        if step is not None:
            found[name]["bound"] |= {"seconds": step.bound.seconds, "limit": step.bound.limit}
    return found


def as_text(program: StepProgram, context: int, plan: ModelPlan) -> str:
    """The plan as a table for people."""
    config, target = program.config, program.chip.target
    replicas, num_devices = config.mesh.data, target.num_devices
    of_all = f" of its {num_devices}" if config.mesh.num_devices < num_devices else ""
    lines = [
        f"{program.named.name} on {target.name}: {format_mesh(config.mesh.sizes)}{of_all}, "
        f"{config.quantize or config.dtype}, context {context:,}"
    ]
    stored = program.named.stored
    if stored is not None and not stored.refusal and config.quantize is not None:
        lines.append(f"  its {stored.method} weights are planned as {config.quantize}")
    if plan.memory:
        lines += _memory(program, plan)
    if not plan.fits:
        return "\n".join([*lines, f"does not fit: {plan.reason}", f"  {suggest_fix(program)}"])
    of_each = f" in each of {replicas} replicas" if replicas > 1 else ""
    lines += [
        f"  cache        {plan.tokens_cached:,} tokens in {plan.num_pages:,} pages of "
        f"{config.cache.page_size}{of_each}: {plan.pages_from}",
        f"  rows         {plan.rows} at once{of_each}, of {context:,} tokens (slots for "
        f"{config.scheduler.max_num_seqs})",
    ]
    stages = program.model.num_stages
    of_stage = f", one of {stages} micro-batches" if stages > 1 else ""
    assert plan.decode is not None and plan.prefill is not None
    decode, chunk = plan.decode.load, plan.prefill.load
    lines += ["", f"decode step: {decode.rows} rows at {decode.context:,} tokens{of_stage}"]
    lines += _step(plan.decode, target, replicas)
    lines += ["", f"prefill chunk: the last {chunk.new:,} tokens of {chunk.context:,}{of_stage}"]
    lines += _step(plan.prefill, target, replicas)
    return "\n".join(lines)


def suggest_fix(program: StepProgram) -> str:
    """Suggest options for a plan that does not fit."""
    config, num_devices = program.config, program.chip.target.num_devices
    ways = []
    if config.mesh.num_devices < num_devices and (mesh := largest_mesh(program)) is not None:
        ways.append(f"--mesh={format_mesh(mesh.sizes)}")
    if config.quantize is None:
        ways.append("--quant=int8 or int4")
    if num_devices > 1:
        ways.append("--search for what fits these devices")
    if program.weight_bytes <= program.chip.target.limit_bytes:
        ways.append("a shorter --context")
    return f"try {', '.join([*ways, 'a larger --target'])}"


def _memory(program: StepProgram, plan: ModelPlan) -> list[str]:
    memory = plan.memory
    rest = memory["other_state"] + memory["results"] + memory["code"]
    of_layers = f"{plan.layers_compiled} of {program.num_layers} layers compiled"
    if plan.layers_compiled == program.num_layers:
        of_layers = f"all {program.num_layers} layers compiled"
    parts = {
        "weights": memory["weights"],
        "pages": memory["pages"],
        "temporaries": memory["temporaries"],
        "other": rest,
    }
    lines = [f"  {name:12} {gigabytes(amount):>9} a device" for name, amount in parts.items()]
    total = f"{gigabytes(memory['total']):>9} of {gigabytes(memory['limit']).strip()}"
    return [*lines, f"  {'in all':12} {total} ({of_layers})"]


def _step(step: StepFigures, target: ChipTarget, replicas: int) -> list[str]:
    work, least = step.work, step.bound
    rate = f"{target.memory_rate / 1e9:,.0f} GB/s"
    kinds = [(kind, n) for kind, n in work.flops.items() if n]
    lines = [
        _term("weights read", gigabytes(work.weight_bytes), rate, least.weights),
        _term("cache read", gigabytes(work.cache_bytes), rate, least.cache),
    ]
    for kind, flops in kinds:
        speed = flop_rate(target, kind)
        amount, peak = f"{flops / 1e9:,.2f} GFLOP", f"{speed / 1e12:,.1f} TFLOP/s"
        lines.append(_term(f"{kind} products", amount, peak, flops / speed))
    sent = sum(totals["link_bytes"] for totals in step.traffic.by_kind.values())
    lines.append(_term("links", f"{sent / 1e6:,.2f} MB", "best links", least.links))
    lines += [
        f"    {totals['count']:,.0f} {kind}: {totals['bytes'] / 1e6:,.2f} MB of results, "
        f"{totals['link_bytes'] / 1e6:,.2f} MB sent"
        for kind, totals in step.traffic.by_kind.items()
    ]
    least_ms, links_ms = (least.seconds - least.links) * 1e3, least.links * 1e3
    and_links = f", and about {links_ms:,.3f} ms of links" if least.links else ""
    at_most = "about" if least.links else "at most"  # links count branches that do not run
    speed = f"{at_most} {step.tokens_per_second:,.0f} tokens/s"
    if replicas > 1:
        speed += f" of {replicas} replicas together ({step.tokens_per_second_a_replica:,.0f} each)"
    total = f"at least {least_ms:,.3f} ms = max(weights + cache, products){and_links}"
    return [*lines, f"  {total}; most of it {least.limit}; {speed}"]


def _term(name: str, amount: str, rate: str, seconds: float) -> str:
    return f"  {name:18} {amount:>14} at {rate:>14}  {seconds * 1e3:10.3f} ms"


def search_json(found: Sequence[Candidate]) -> list[dict[str, Any]]:
    """Every candidate, cheapest first. `tokens_per_second` is that of all replicas; other figures
    are those of one."""
    return [
        {
            "mesh": candidate.config.mesh.sizes,
            "quantize": candidate.config.quantize,
            **{
                field.name: getattr(candidate, field.name)
                for field in dataclasses.fields(candidate)
                if field.name not in ("config", "decode", "plan")
            },
            "decode": dataclasses.asdict(candidate.decode),
            "plan": None if candidate.plan is None else dataclasses.asdict(candidate.plan),
        }
        for candidate in found
    ]


SEARCH_HEAD = [
    "devices", "replicas", "mesh", "weights", "GB a device", "tokens cached", "rows", "tokens/s",
    "verdict",
]  # fmt: skip


def search_text(chip: Chip, model: NamedModel, context: int, found: Sequence[Candidate]) -> str:
    """A line for each candidate. Figures are those of one replica, except tokens/s, the bound of
    the decode step of all replicas on every device of the target."""
    head = f"{model.name} on {chip.target.name}, context {context:,}: "
    if not found:
        return head + "no mesh of these devices holds it, by arithmetic"
    lines = []
    for candidate in found:
        config, plan = candidate.config, candidate.plan
        tokens, rows, rate = (
            candidate.tokens_cached, candidate.rows, candidate.tokens_per_second
        )  # fmt: skip
        if plan is not None and plan.fits and plan.decode is not None:
            tokens, rows = plan.tokens_cached, plan.rows
            rate = plan.decode.tokens_per_second
        verdict = "by arithmetic"
        if plan is not None:
            verdict = "compiled" if plan.fits else f"does not fit: {plan.reason}"
        lines.append(
            [
                str(candidate.num_devices),
                str(candidate.replicas),
                format_mesh({**config.mesh.sizes, "data": 1}),
                config.quantize or config.dtype,
                f"{candidate.weight_bytes / 1e9:,.2f}",
                f"{tokens:,}",
                str(rows),
                f"{rate:,.0f}",
                verdict,
            ]
        )
    what = "cheapest first; tokens/s are of all replicas together, all else of one\n"
    return head + what + table(SEARCH_HEAD, lines)
