"""Child process of `verify` that compiles emitted kernels for a device that need not be here.

A request is a `CompileJob`, a reply is a `Compiled`. Works with Triton 3.6 to 3.9.
"""

# Triton is partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false

from __future__ import annotations

import io
import os
import re
import warnings
from contextlib import redirect_stdout
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from fusion_advisor.ir.kernel import Compiled, CompileJob, Kernel, Launch, Resources
from fusion_advisor.shipped.load import kernels_alone, load_module, process_folder
from fusion_advisor.support.kernel_fault import KernelFault, cause
from fusion_advisor.support.worker import serve

_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_REGISTERS = re.compile(r"Used (\d+) registers")


def _attributes(launch: Launch) -> dict[tuple[int], list[list[Any]]]:
    """Attributes in Triton's spelling of "divisible by 16", by argument position."""
    names = [name for name, _ in launch.signature]
    return {(names.index(name),): [["tt.divisibility", 16]] for name in launch.divisible}


def _compile(function: Any, launch: Launch, capability: int) -> Resources:
    """Compile, and read the output of `ptxas -v` under the very flags that Triton gave it."""
    source = ASTSource(
        function,
        dict(launch.signature),
        constexprs=dict(launch.constants),
        attrs=_attributes(launch),
    )
    options = {
        "num_warps": launch.num_warps,
        "num_stages": launch.num_stages,
        "enable_fp_fusion": True,  # always given: Triton 3.10 turns the default
    }
    log = io.StringIO()
    with redirect_stdout(log):
        target = GPUTarget("cuda", capability, 32)
        compiled = triton.compile(source, target=target, options=options)
    spills, registers = _SPILLS.search(log.getvalue()), _REGISTERS.search(log.getvalue())
    if spills is None or registers is None:
        raise KernelFault("ptxas -v names no registers or no spills")
    return Resources(
        launch.jit_name,
        int(registers[1]),
        int(spills[1]) + int(spills[2]),
        compiled.metadata.shared,
        triton.__version__,
        get_ptxas(capability).version,
    )


def _one_line(error: BaseException) -> str:
    """Innermost cause of an error in one line; of Triton's listing of the source only the message
    after it."""
    while error.__cause__ is not None:
        error = error.__cause__
    message = getattr(error, "error_message", None)
    return f"{type(error).__name__}: {message}" if message else cause(error)


class Compiler:
    """Compiles each distinct (text, launch, capability) once."""

    def __init__(self) -> None:
        self._done: dict[tuple[str, Launch, int], Resources] = {}

    def compile(self, kernel: Kernel, capability: int) -> Compiled:
        """Compile every launch of a kernel. Raises KernelFault for the first launch that fails."""
        todo = [x for x in kernel.launches if (kernel.text, x, capability) not in self._done]
        try:
            module = load_module(kernels_alone(kernel.text), process_folder()) if todo else None
            for launch in todo:
                function = getattr(module, launch.jit_name)
                done = _compile(function, launch, capability)
                self._done[kernel.text, launch, capability] = done
        except Exception as error:
            raise KernelFault(_one_line(error)) from error
        resources = (self._done[kernel.text, x, capability] for x in kernel.launches)
        return Compiled(kernel.name, tuple(resources))


def main() -> None:
    """Run the child."""
    warnings.simplefilter("ignore")
    knobs.compilation.always_compile = True  # a cache hit would have no ptxas log
    knobs.nvidia.dump_ptxas_log = True
    os.environ["TRITON_CACHE_DIR"] = str(process_folder() / "cache")
    compiler = Compiler()
    serve({CompileJob: lambda job: compiler.compile(job.kernel, job.capability)})
