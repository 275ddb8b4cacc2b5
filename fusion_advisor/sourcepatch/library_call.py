"""A PyTorch op in place of a kernel, checked as the kernel would be.

An emitted file has the eager reference; with the op's call as its entry it is held to float64 over
the same shapes and distributions, within eager's own error.
"""

from __future__ import annotations

from dataclasses import replace

from fusion_advisor.fusion.library_match import Spelling
from fusion_advisor.ir.graph import Tensor
from fusion_advisor.ir.kernel import Case, Kernel

_ENTRY = "operator"
_DTYPES = ("float32", "bfloat16", "float16", "float64")


def operator(kernel: Kernel, spelling: Spelling) -> Kernel:
    """A kernel's file with the op's call as what is checked: nothing of Triton runs."""
    names = ", ".join(name for name, _ in spelling.names)
    given = ", ".join(f"inputs[{number}]" for _, number in spelling.names)
    lines = [
        f"def {_ENTRY}(*inputs):",
        f"    {names} = {given}",
        f"    return {spelling.framework}",
    ]
    return replace(
        kernel,
        entry=_ENTRY,
        text=kernel.text + "\n\n" + "\n".join(lines) + "\n",
        cases=tuple(
            replace(c, loaded_bytes=None, stored_bytes=None, loads=None, stores=None)
            for c in kernel.cases
        ),
        launches=(),
    )


def in_dtypes(kernel: Kernel) -> list[Kernel]:
    """The same check in each dtype that a model may be moved to."""
    return [_in_dtype(kernel, dtype) for dtype in _DTYPES]


def _in_dtype(kernel: Kernel, dtype: str) -> Kernel:
    """With all of its floats in one dtype."""

    def named(given: str) -> str:
        return dtype if given in _DTYPES else given

    def changed(tensor: Tensor) -> Tensor:
        return replace(tensor, dtype=named(tensor.dtype))

    def case(given: Case) -> Case:
        return replace(given, inputs=tuple(map(changed, given.inputs)))

    outputs = tuple(map(named, kernel.outputs))
    return replace(kernel, cases=tuple(map(case, kernel.cases)), outputs=outputs)
