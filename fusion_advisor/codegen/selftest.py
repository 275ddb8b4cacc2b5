"""The part of an emitted file that lets it run by itself, as text: `python FILE --check --bench`.

This part needs torch and Triton alone, and nothing above it needs it: all from `HEAD` on can be cut
off.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from fusion_advisor.codegen.kernel_file import KernelFile
from fusion_advisor.codegen.test_inputs import at_graph_size
from fusion_advisor.fusion.library_match import Spelling
from fusion_advisor.ir.kernel import Case
from fusion_advisor.rulebook.schema import Rulebook

HEAD = "# -- python FILE --check --bench "
"""Start of the line below which nothing is needed to call the kernel."""

_TORCHS = {"fast_dividef": "div", "rint": "round"}
"""Functions of the math library that torch calls by another name."""


def alone(
    file: KernelFile,
    small: Case,
    needed: str,
    framework: Spelling | None,
    rulebook: Rulebook,
) -> str:
    """The end of a file: its inputs, its check, its timing and its command line.

    `small` is the case that an interpreter affords, `needed` the text above; `framework` is
    PyTorch's own op for the same where there is one.
    """
    functions = sorted(set(re.findall(r"libdevice\.(\w+)\(", needed)))
    torchs = ", ".join(f'"{name}": torch.{_TORCHS.get(name, name)}' for name in functions)
    texts = [
        "# Of each input: shape, strides, dtype, and from where to where integers go.\n"
        f"SMALL = {_inputs(small)}\nFULL = {_inputs(at_graph_size(file))}",
        _DRAWN,
        _EXACTLY.format(softmax=_HALF_SOFTMAX if "_softmax" in needed else ""),
        _check(file, small, rulebook),
        _bench(file, framework),
        *([_LIBDEVICE.format(functions=torchs)] if functions else []),
        _MAIN.format(name=file.name, prepared=_prepared(file, bool(functions))),
    ]
    return "\n\n\n".join([f"{HEAD:-<100}", *(text.strip("\n") for text in texts)])


def _inputs(case: Case) -> str:
    """The inputs of a case, one tuple each."""
    ranges = case.ranges or (None,) * len(case.inputs)
    texts = [
        ", ".join(map(str, (tensor.shape, tensor.stride, f"torch.{tensor.dtype}", *range_)))
        for tensor, bounds in zip(case.inputs, ranges, strict=True)
        for range_ in (() if "float" in tensor.dtype else bounds or _any_of(tensor.dtype),)
    ]
    return f"[{', '.join(f'({text})' for text in texts)}]"


def _any_of(dtype: str) -> tuple[int, int]:
    """Range of integers on which no condition is placed."""
    return (0, 2) if dtype == "bool" else (0, 8)


_DRAWN = """
def drawn(inputs, device, seed=0):
    \"""Random tensors, the same each time.\"""
    torch.manual_seed(seed)
    for shape, stride, dtype, *bounds in inputs:
        size = (1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)),)
        made = torch.randint(*bounds, size, device=device) if bounds else None
        made = torch.randn(size, device=device) if made is None else made
        yield made.to(dtype).as_strided(shape, stride)
"""

_EXACTLY = """
class InFloat64(TorchDispatchMode):
    \"""Runs every operation in float64, whatever dtype it names.\"""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
{softmax}        args, kwargs = tree_map(widened, (args, kwargs or {{}}))
        return tree_map(widened, function(*args, **kwargs))


def widened(value):
    \"""A tensor or a dtype in float64, anything else as it is.\"""
    if isinstance(value, torch.dtype):
        return torch.float64 if value.is_floating_point else value
    floating = isinstance(value, torch.Tensor) and value.is_floating_point()
    return value.double() if floating else value
"""
_HALF_SOFTMAX = """\
        if "_softmax" in str(function):
            args = (*args[:2], False)  # float64 is wide enough as it is
"""


def _check(file: KernelFile, small: Case, rulebook: Rulebook) -> str:
    """The criterion of `verify.tolerance`; eager's own result excuses a step that it shows, too."""
    rules = rulebook.verify.criterion
    long = small.summed > rules.long_sum.count
    return _CHECK.format(
        name=file.name, factor=rules.factor.value, least=rules.eager_elements.count,
        narrow=rules.ulps.value, wide=rules.float64_ulps.value,
        single=(rules.summed_ulps if long else rules.ulps).value,
    )  # fmt: skip


_CHECK = """
def results(function, tensors):
    found = function(*tensors)
    return found if isinstance(found, tuple) else (found,)


def truth(number, inputs, device, seed):
    \"""A result of the reference as it is and in float64.\"""
    tensors = [*drawn(inputs, device, seed)]
    eager = results(reference, tensors)[number]
    with InFloat64():
        return eager, results(reference, [*map(widened, tensors)])[number]


def apart(found, exact):
    \"""The largest error, among what is finite.\"""
    error = (found.double() - exact.double()).abs()
    return torch.where(error.isfinite(), error, 0.0).max().item()


def rounded(dtype, exact):
    \"""What roundings to the dtype may make of the largest result.\"""
    ulps = {{torch.float32: {single}, torch.float64: {wide}}}.get(dtype, {narrow})
    top = apart(exact, torch.zeros_like(exact)) or torch.finfo(dtype).tiny
    return ulps * torch.finfo(dtype).eps * 2.0 ** math.floor(math.log2(top))


def check(inputs, device):
    \"""Print our errors beside eager's, both against float64; does each of ours hold?\"""
    holds = True
    for number, ours in enumerate(results({name}, [*drawn(inputs, device)])):
        eager, exact = truth(number, inputs, device, 0)
        error, own, seen = apart(ours, exact), apart(eager, exact), eager.numel()
        if ours.dtype.is_floating_point:
            wrong = ~ours.double().isfinite() & exact.isfinite() & eager.double().isfinite()
            slack = rounded(ours.dtype, exact)
        else:
            wrong, slack = (ours != exact) & (ours != eager), math.inf
        while error > {factor} * own + slack and seen < {least}:  # eager alone is drawn again
            own, seen = max(own, apart(*truth(number, inputs, device, seen))), seen + eager.numel()
        allowed = {factor} * own + slack
        near = error <= allowed and not wrong.any()
        print(f"{{[*ours.shape]}} {{ours.dtype}}: error {{error:.3g}},", end=" ")
        print(f"eager's {{own:.3g}}, allowed {{allowed:.3g}}:", end=" ")
        print("near enough" if near else "TOO FAR")
        holds = holds and near
    return holds
"""


def _bench(file: KernelFile, framework: Spelling | None) -> str:
    eager = "eager, on the kernel's random bits" if file.random else "eager"
    own_op = ""
    if framework:
        given = ", ".join(file.input_names)
        own_op = f'\n        "framework": lambda {given}: {_called(framework, file.input_names)},'
    return _BENCH.format(name=file.name, eager=eager, framework=own_op)


def _called(spelling: Spelling, given: Sequence[str]) -> str:
    """PyTorch's line with the names of the file."""
    names = {name: given[number] for name, number in spelling.names}

    def named(found: re.Match[str]) -> str:
        return names.get(found[0], found[0])

    return re.sub(r"(?<![.\w])[a-z]+\b(?!\s*=)", named, spelling.framework)


_BENCH = """
def bench():
    \"""Print how long a call of each keeps the GPU busy at the graph's sizes, with a cold L2.\"""
    tensors = [*drawn(FULL, "cuda")]
    ways = {{
        "{name}": {name},
        "{eager}": reference,{framework}
        "torch.compile": torch.compile(reference, dynamic=False),
    }}
    cold = torch.empty(2**28, dtype=torch.int8, device="cuda")
    for name, way in ways.items():
        way(*tensors)
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(33)]
        torch.cuda._sleep(2**27)  # cycles, in which all runs are queued
        for start, end in pairs:
            cold.zero_()
            start.record()
            way(*tensors)
            end.record()
        torch.cuda.synchronize()
        middle = sorted(start.elapsed_time(end) for start, end in pairs)[16]
        print(f"{{name}}: {{1e3 * middle:.2f}} us")
"""

_LIBDEVICE = """
def interpret_libdevice():
    \"""Give Triton's interpreter, which has no math library, torch's functions in float64.\"""
    from triton.runtime.interpreter import TensorHandle

    def taken(function):
        def call(*args):
            blocks = [arg for arg in args if isinstance(arg, tl.tensor)]
            kind, dtype = blocks[0].dtype.scalar, blocks[0].handle.data.dtype
            arrays = [arg.handle.data if isinstance(arg, tl.tensor) else arg for arg in args]
            made = function(*(torch.as_tensor(each).double() for each in arrays)).numpy()
            whole = any(block.type.is_block() for block in blocks)
            handle = TensorHandle(made.astype(dtype), kind)
            return tl.tensor(handle, tl.block_type(kind, list(made.shape)) if whole else kind)

        return call

    for name, function in {{{functions}}}.items():
        setattr(libdevice, name, taken(function))
"""


def _prepared(file: KernelFile, library: bool) -> str:
    """Setup of the interpreter, or the reason that it cannot be used."""
    outputs = (output.tensor for output in file.region.outputs)
    if any("float8" in tensor.dtype for tensor in (*file.region.inputs, *outputs)):
        return f"""
    if interpreted:
        sys.exit("{file.name}: Triton's interpreter rounds 8-bit floats wrongly: check on a GPU")"""
    return _INTERPRETED if library else ""


_INTERPRETED = """
    if interpreted:
        interpret_libdevice()"""

_MAIN = """
def main():
    \"""The command line. Without a GPU the check runs through Triton's interpreter.\"""
    parser = argparse.ArgumentParser(description="{name} beside eager")
    parser.add_argument("--check", action="store_true", help="errors against float64 (default)")
    parser.add_argument("--bench", action="store_true", help="times on a GPU")
    asked = parser.parse_args()
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not interpreted and not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it is imported
        os.execv(sys.executable, [sys.executable, *sys.argv])
    os.environ["FUSION_ADVISOR_STRICT"] = "1"  # the kernel's own answer, or none{prepared}
    near = True
    with torch.no_grad():
        if asked.check or not asked.bench:
            near = check(SMALL, "cpu" if interpreted else "cuda")
            near = near and (interpreted or check(FULL, "cuda"))
        if asked.bench and interpreted:
            sys.exit("{name}: --bench times on a GPU, and there is none here")
        if asked.bench:
            bench()
    sys.exit(not near)


if __name__ == "__main__":
    main()
"""
