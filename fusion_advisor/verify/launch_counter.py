"""Counter of Triton kernel launches: through a kernel's function, compiled or interpreted, or
through the compiled object itself."""
# Triton is untyped, and what is counted are its own methods.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock


@contextmanager
def counted(place: Path | None = None) -> Generator[Counter[str], None, None]:
    """Count the launches of each kernel within the block, by name: kernels that are defined in a
    file, or in the files of a folder, where one is given."""
    from triton.compiler import CompiledKernel  # as it is imported, TRITON_INTERPRET has been read
    from triton.runtime.interpreter import InterpretedFunction
    from triton.runtime.jit import JITFunction

    found: Counter[str] = Counter()

    def count(function: Any) -> None:
        code = getattr(function, "__code__", None)
        if place is None or (
            code is not None and Path(code.co_filename).resolve().is_relative_to(place)
        ):
            found[function.__name__] += 1

    def of_function(run: Any) -> Any:
        def running(self: Any, *args: Any, warmup: bool = False, **kwargs: Any) -> Any:
            if not warmup:
                count(self.fn)
            return run(self, *args, warmup=warmup, **kwargs)

        return running

    runner_of: Any = CompiledKernel.__getitem__

    def of_compiled(self: Any, grid: Any) -> Any:
        run = runner_of(self, grid)

        def running(*args: Any, **kwargs: Any) -> Any:
            count(self.src.fn.fn)
            return run(*args, **kwargs)

        return running

    functions: list[Any] = [JITFunction, InterpretedFunction]
    with (
        mock.patch.object(functions[0], "run", of_function(functions[0].run)),
        mock.patch.object(functions[1], "run", of_function(functions[1].run)),
        mock.patch.object(CompiledKernel, "__getitem__", of_compiled),
    ):
        yield found
