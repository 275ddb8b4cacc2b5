"""`explain`, `devices`, `rules`, `ops`, `doctor`: what is known, what this machine can run."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from fusion_advisor.cli.commands.options import Debug, Rules, rulebook_of
from fusion_advisor.support.errors import UsageError

if TYPE_CHECKING:
    from fusion_advisor.rulebook.schema import AdviceKind, Gate


def explain(
    name: Annotated[str | None, typer.Argument(metavar="CODE|NAME")] = None,
    all: Annotated[bool, typer.Option("--all", help="all that can be explained")] = False,
    format: Annotated[str, typer.Option(help="text, or md for --all: a page of Markdown")] = "text",
    rules: Rules = None,
    debug: Debug = False,
) -> None:
    """Say what a gate, idiom or the criterion asks, or an advice or rewrite means: why, limits,
    sources."""
    from fusion_advisor.rulebook.explain import entry, explanation, page
    from fusion_advisor.rulebook.explain import rules as every

    rulebook = rulebook_of(rules)
    if format not in ("text", "md") or (format == "md" and not all):
        raise UsageError(f"--format {format!r}: expected text, or md together with --all")
    if format == "md":
        sys.stdout.write(page(rulebook))
        return
    if all:
        chosen = every(rulebook)
    elif name:
        chosen = [entry(rulebook, name)]
    else:
        raise UsageError("explain what? Give a code or name (FA401, softmax), or --all")
    print("\n\n".join(explanation(rulebook, rule) for rule in chosen))


def devices(rules: Rules = None, debug: Debug = False) -> None:
    """List the GPUs that can be judged for."""
    for name, device in rulebook_of(rules).devices.items():
        print(
            f"{name:10} {device.title:32} sm_{device.capability:<4}"
            f"{device.datasheet_bandwidth / 1e9:6.0f} GB/s"
            f"{device.peak_flops('tensor', 'bfloat16') / 1e12:8.1f} TFLOP/s bf16"
            f"{device.sm_count:5} SMs"
        )


def rules(rules: Rules = None, debug: Debug = False) -> None:
    """List gates, idioms, advice, rewrites and tuned numbers, with the rules' version and hash."""
    rulebook = rulebook_of(rules)
    print(f"rules {rulebook.version} {rulebook.hash}")
    for gate in rulebook.gates.values():
        print(f"{gate.code} {gate.name:20} {gate.comparison:2} {_limits(gate) or gate.limit}")
    for pattern in rulebook.patterns.values():
        print(f"      {pattern.name:20} {pattern.what}")
    for kind in (*rulebook.advice.values(), *rulebook.rewrites.values()):
        print(f"      {kind.name:20} {_limits(kind) or kind.what}")
    for field, number in rulebook.tuned():
        print(f"      {field:36} {number!s:16} {number.source}")


def _limits(rule: Gate | AdviceKind) -> str:
    return ", ".join(f"{name} {number}" for name, number in rule.limits.items())


def ops(debug: Debug = False) -> None:
    """List the ops that are modelled, and whether they have a meaning that can be fused."""
    from fusion_advisor.ops import REGISTRY

    for name, op in sorted(REGISTRY.items()):
        print(f"{name:56} {op.pattern:12} {'fusible' if op.meaning else 'counted'}")


def doctor(debug: Debug = False) -> None:
    """Say what this machine can run and what it cannot."""
    from fusion_advisor.rulebook.local_gpu import (
        DEFAULT_DEVICE,
        LEAST_CAPABILITY,
        choose_device,
        gpu_capabilities,
        gpu_names,
        has_triton,
        ptxas,
        torch_fault,
        version,
        without_triton,
    )
    from fusion_advisor.support.kept import cache_folder

    gpus, assembler, triton = gpu_names(), ptxas(), has_triton()
    named = [f"{gpu} (sm_{of})" for gpu, of in zip(gpus, gpu_capabilities(), strict=False)] or gpus
    run = "here" if any(of >= LEAST_CAPABILITY for of in gpu_capabilities()) else "not here"
    here, chosen = choose_device(None, rulebook_of(None), gpus)
    hint = f"; {here.name} is the GPU here" if "the GPU here" in chosen else ""
    rows = {
        "python": sys.version.split()[0],
        "fusion-advisor": version("fusion-advisor") or "not installed",
        "torch": torch_fault(version("torch")) or version("torch"),
        "triton": version("triton") if triton else f"kernels are not checked: {without_triton()}",
        "transformers": version("transformers") or "missing: hf: models need it",
        "GPU": ", ".join(named) or "none, and none is needed to analyse, check and compile",
        "kernels": f"run on NVIDIA GPUs of sm_{LEAST_CAPABILITY} and later: {run}",
        "device": f"{DEFAULT_DEVICE}, unless --device says otherwise{hint}",
        "interpreter": "yes" if triton else "no: needs triton",
        "ptxas": assembler or "missing: kernels are not compiled",
        "cache": cache_folder(),
    }
    for name, value in rows.items():
        print(f"{name:15} {value}")
