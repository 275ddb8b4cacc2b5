"""How many instructions of a lane each scalar primitive of the region form is worth, on a GPU.

    python -m benchmarks.rules.instructions [--out rules/instructions.toml]

A kernel applies a primitive some times to a value in registers, another one more often; what the
difference takes, over the rate at which the device's lanes issue (128 a clock and multiprocessor,
at the clock that the driver reports), is the figure, in instructions. Arguments are of the sizes
that activations have, so that the slow paths of library functions, for huge arguments, are not
counted. `fast`, `precise` and `double` are the spellings of `fusion_advisor.region.primitives`.
"""

# torch and Triton are typed in places only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import torch

from fusion_advisor.region.peephole import WITH_ONE
from fusion_advisor.region.primitives import PRIMITIVES, Primitive
from fusion_advisor.shipped.files import DEVICE, functions
from fusion_advisor.shipped.load import load_module

FEW, MANY = 64, 256
"""Applications of the primitive in the two kernels."""
ELEMENTS = 1 << 22
BLOCK = 1024
LEAST = 0.1
"""Of what goes into another instruction: a sign, an absolute value."""
RUNS = 9
LANES = 128
"""Results a clock and multiprocessor of a plain float32 instruction."""
COMPILERS = 14

KERNEL = """
@triton.jit
def kernel(x_ptr, y_ptr, out_ptr, COUNT, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = {first}
    y = tl.load(y_ptr + at)
    total = x
    for i in range(COUNT):  # not unrolled: its code must stay in the instruction cache
        a = x + i * 0.001
        b = y + i * 0.002
        total = total + {text}
    tl.store(out_ptr + at, total)
"""
HEADER = """\
import triton
import triton.language as tl
from triton.language.extra import libdevice
"""
OF_POSITIVE = ("log", "log2", "log10", "sqrt", "rsqrt", "pow", "lgamma", "acosh")
OF_BITS = ("and", "or", "xor", "not", "floordiv", "mod")
FORMS = {"fast": torch.float32, "precise": torch.float32, "double": torch.float64}
OTHER = (
    "[instructions.other]",
    'fast = { value = 1, unit = "instructions", source = "what is one instruction: a bitwise'
    ' operation, a conversion, a step of a reduction" }',
)
Key = tuple[str, str]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    out: Path | None = parser.parse_args().out
    properties = torch.cuda.get_device_properties(0)
    rate = LANES * properties.multi_processor_count * properties.clock_rate * 1e3
    keys = [("", "fast"), ("", "double"), *((n, f) for n in PRIMITIVES for f in FORMS)]
    keys += [(name, "fast") for name in WITH_ONE.values()]
    keys = [key for key in keys if _text(*key)]
    with multiprocessing.get_context("spawn").Pool(COMPILERS) as pool:
        pool.map(_compiled, keys, chunksize=4)
    found: dict[Key, float] = {}
    for key in keys:
        try:
            found[key] = _seconds(*key) / ELEMENTS * rate / (MANY - FEW)
        except Exception as error:  # noqa: BLE001 listed, the rest goes on
            print(f"{key}: {str(error).splitlines()[0][:100]}", flush=True)
    text = "\n".join(_toml(found, properties.name)) + "\n"
    print(text)
    if out:
        out.write_text(text)
    return 0


def _text(name: str, form: str) -> str:
    """A primitive in one of its spellings, over the names `a` and `b`; the empty name is nothing at
    all, and the empty text a spelling that is none of its own."""
    if not name:
        return "a"
    if name in WITH_ONE.values():  # the same in whatever form
        return f"{name}(a)"
    primitive: Primitive = PRIMITIVES[name]
    template = primitive.text if form == "fast" else getattr(primitive, form)
    if form == "double" and not template:
        template = primitive.text if "narrow" not in primitive.text else ""
    if not template:
        return ""
    return "" if name in OF_BITS else template.format("a > b" if name == "where" else "a", "b", "a")


def _module(name: str, form: str, folder: Path) -> Any:
    text = _text(name, form)
    helpers = [helper for helper in sorted(functions(DEVICE)) if f"{helper}(" in text]
    imports = f"from .{DEVICE} import {', '.join(helpers)}" if helpers else ""
    load = "tl.load(x_ptr + at) * 0.2"
    first = f"tl.abs({load}) + 1.1" if name in OF_POSITIVE else load
    if name in PRIMITIVES and PRIMITIVES[name].result == "bool":
        text = f"tl.where({text}, a, b)"
    body = KERNEL.format(text=f"({text})", first=first)
    return load_module(f"{HEADER}{imports}\n\n\n{body}", folder)


def _compiled(key: Key) -> None:
    """Warm Triton's cache."""
    try:
        _seconds(*key, runs=1)
    except Exception as error:  # noqa: BLE001 reported where it is timed
        del error


def _seconds(name: str, form: str, runs: int = RUNS) -> float:
    """What `MANY` applications to every element take more than `FEW`, the median."""
    torch.manual_seed(0)
    x = torch.randn(ELEMENTS, device="cuda", dtype=FORMS[form])
    y = torch.randn_like(x).abs_().add_(0.5)
    out = torch.empty_like(x)
    with tempfile.TemporaryDirectory() as folder:
        kernel = _module(name, form, Path(folder)).kernel
        spent = {count: _timed(kernel, (x, y, out), count, runs) for count in (FEW, MANY)}
    return spent[MANY] - spent[FEW]


def _timed(kernel: Any, tensors: tuple[torch.Tensor, ...], count: int, runs: int) -> float:
    times: list[float] = []
    for _ in range(runs + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        kernel[(ELEMENTS // BLOCK,)](*tensors, COUNT=count, BLOCK=BLOCK)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return statistics.median(times[1:])


def _toml(found: dict[Key, float], device: str) -> list[str]:
    """The figures as the rules hold them: beyond what the loop itself takes."""
    source = f"measured: benchmarks/rules/instructions.py on an {device}, {date.today()}"
    lines = [
        "# What each scalar primitive is worth, in instructions of a lane.",
        "# benchmarks/rules/instructions.py writes this file.",
    ]
    for name in (*PRIMITIVES, *WITH_ONE.values()):
        own = {form: found[name, form] for form in FORMS if (name, form) in found}
        if not own:
            continue
        lines += ["", f"[instructions.{name}]"]
        made = PRIMITIVES.get(name, Primitive(f"{name}({{0}})"))
        for form, value in own.items():
            base = found["", "double" if form == "double" else "fast"]
            second = 1 if "{1}" in made.text else 0  # of the second operand
            figure = max(value - base - second, LEAST)
            if made.result == "bool" or name == "where":
                figure /= 2  # a comparison and a select were measured together
            lines.append(
                f'{form} = {{ value = {figure:.3g}, unit = "instructions", source = "{source}" }}'
            )
    return [*lines, "", *OTHER]


if __name__ == "__main__":
    sys.exit(main())
