"""Part of an emitted file by which the runtime beside it checks and times the kernel, as text:
`python FOLDER/fused_runtime.py NAME --check --bench`.

This part is data, and nothing above it needs it.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from fusion_advisor.codegen.kernel_file import KernelFile
from fusion_advisor.codegen.spelling import AS_IT_IS, WIDTH
from fusion_advisor.codegen.test_inputs import at_graph_size
from fusion_advisor.fusion.library_match import Spelling
from fusion_advisor.ir.graph import Tensor
from fusion_advisor.ir.kernel import Case
from fusion_advisor.rulebook.schema import Rulebook
from fusion_advisor.shipped.files import RUNTIME


def selftest(file: KernelFile, small: Case, framework: Spelling | None, rulebook: Rulebook) -> str:
    """End of a file: its inputs, and how near its results have to be.

    `small` is the case that an interpreter affords, `framework` PyTorch's own op for the same where
    there is one.
    """
    lines = [
        f"# For {RUNTIME}.py, by input: shape, strides (None: dense), dtype, range of integers.",
        _inputs("SMALL", small),
        _inputs("FULL", at_graph_size(file)),
        _tolerance(small, rulebook, decides=file.expressed.decides),
    ]
    if framework:
        given = ", ".join(file.given)
        called = _called(framework, file.input_names)
        lines += ["BESIDE = {", f'    "framework": lambda {given}: {called},', "}"]
    return "\n".join(lines)


def _inputs(name: str, case: Case) -> str:
    """The line that gives the inputs of a case a name, one tuple each."""
    ranges = case.ranges or (None,) * len(case.inputs)
    texts = [
        ", ".join(map(str, (tensor.shape, _steps(tensor), f"torch.{tensor.dtype}", *range_)))
        for tensor, bounds in zip(case.inputs, ranges, strict=True)
        for range_ in (() if "float" in tensor.dtype else bounds or _any_of(tensor.dtype),)
    ]
    given = [*(f"({text})" for text in texts), *map(repr, case.numbers)]
    line = f"{name} = [{', '.join(given)}]"
    return line if len(line) <= WIDTH else f"{line}{AS_IT_IS}"


def _steps(tensor: Tensor) -> tuple[int, ...] | None:
    """Strides of a tensor; None where it is dense, its last dimension first."""
    return None if tensor.contiguous else tensor.stride


def _any_of(dtype: str) -> tuple[int, int]:
    """Range of integers on which no condition is placed."""
    return (0, 2) if dtype == "bool" else (0, 8)


def _tolerance(small: Case, rulebook: Rulebook, *, decides: bool) -> str:
    """The criterion of `verify.tolerance`: errors may be `factor` times eager's, which is drawn
    anew up to so many elements, and by dtype so many units in the last place more; where the last
    bit `decides`, a share of the elements may be further off."""
    rules = rulebook.verify.criterion
    long = small.summed > rules.long_sum.count
    held = {
        "factor": rules.factor.value,
        "elements": rules.eager_elements.count,
        "float32": (rules.summed_ulps if long else rules.ulps).value,
        "float64": rules.float64_ulps.value,
        "narrow": rules.ulps.value,
        **({"decided": rules.decided.value} if decides else {}),
    }
    said = ", ".join(f'"{name}": {value}' for name, value in held.items())
    return f"TOLERANCE = {{{said}}}"


def _called(spelling: Spelling, given: Sequence[str]) -> str:
    """PyTorch's line with the names of the file."""
    names = {name: given[number] for name, number in spelling.names}

    def named(found: re.Match[str]) -> str:
        return names.get(found[0], found[0])

    return re.sub(r"(?<![.\w])[a-z]+\b(?!\s*=)", named, spelling.framework)
