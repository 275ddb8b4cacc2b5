"""The emitted files: what their launchers take, what they refuse, and how they read."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fusion_advisor.codegen.emit import emit
from fusion_advisor.cost.dataflow import dataflow
from fusion_advisor.ir.graph import Graph
from fusion_advisor.ir.kernel import Kernel
from fusion_advisor.rulebook.schema import Rulebook
from fusion_advisor.shipped.files import DEVICE, RUNTIME
from fusion_advisor.support.codec import from_json, to_json
from fusion_advisor.support.worker import Worker
from fusion_advisor.verify.driver import compiler, submit_check

from .checks import compiled
from .generated import FUNCTIONS, kernel
from .regions import (
    LOADED,
    RULES,
    SHARING,
    Tape,
    decided,
    flow_of,
    interpreted,
    kernel_of,
    why_not,
)

Tensors = tuple[torch.Tensor, ...]
IMPORTS = {"torch", "triton"}
BESIDE = {"", RUNTIME, DEVICE}
WIDTH = 100


# -- how a file reads ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FUNCTIONS)
def test_file_needs_torch_triton_and_what_stands_beside_it(name: str) -> None:
    tree = ast.parse(kernel(name).text)
    imports = [node for node in tree.body if isinstance(node, ast.Import)]
    imports_from = [node for node in tree.body if isinstance(node, ast.ImportFrom)]
    modules = [each.name for node in imports for each in node.names]
    modules += [node.module or "" for node in imports_from if not node.level]
    assert {module.split(".")[0] for module in modules} == IMPORTS
    assert {node.module or "" for node in imports_from if node.level} <= BESIDE
    assert ast.get_docstring(tree)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_reviewer_reads_little_beside_the_kernels(name: str) -> None:
    text = kernel(name).text
    assert len(text.splitlines()) < 120 or name != "softmax"
    functions = [n for n in ast.parse(text).body if isinstance(n, ast.FunctionDef)]
    jits = sum((n.end_lineno or 0) - n.lineno for n in functions if n.decorator_list)
    assert len(text.splitlines()) - jits < 165


@pytest.mark.parametrize("name", FUNCTIONS)
def test_file_is_formatted(name: str, tmp_path: Path) -> None:
    assert_formatted(kernel(name).text, tmp_path / f"{name}.py")


def assert_formatted(text: str, file: Path) -> None:
    file.write_text(text)
    assert [line for line in text.splitlines() if len(line) > WIDTH] == []
    for command in (["format", "--check"], ["check", "--select", "E,F,W,I,B,UP"]):
        options = ["--isolated", "--line-length", str(WIDTH), "--target-version", "py311"]
        run = [sys.executable, "-m", "ruff", *command, *options, str(file)]
        done = subprocess.run(run, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def softmax_of_sums(a: torch.Tensor) -> torch.Tensor:
    return torch.softmax(a.exp().sum(1), 0)


@pytest.mark.deep
def test_programs_that_wait_stand_beside_others(worker: Worker, tmp_path: Path) -> None:
    """One kernel of a file leaves sums for another, whose programs share a row."""
    made = kernel_of(softmax_of_sums, x(330, 520), name="sums", rules=SHARING)
    assert [launch.jit_name for launch in made.launches] == [
        "sums_rows_kernel",
        "sums_parts_kernel",
    ]
    assert_formatted(made.text, tmp_path / "sums.py")
    assert submit_check(worker, made)().failure is None


@pytest.mark.sampled(3)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_moments_are_combined_as_finely_as_results_show(dtype: torch.dtype, worker: Worker) -> None:
    def normal(a: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.layer_norm(a, a.shape[-1:])

    made = kernel_of(normal, x(40, 700, dtype=dtype), rules=SHARING)
    assert "published(" in made.text
    assert ("tl.float64" in made.text) == (dtype == torch.float32)
    assert submit_check(worker, made)().failure is None


def test_a_long_name_breaks_no_string() -> None:
    """Lines that are too long are broken at commas, but not at those of a message."""
    made = kernel_of(softmax_of_sums, x(33, 520), name="sums_of_" + "exponentials_" * 4)
    compile(made.text, "emitted", "exec")


# -- guards ----------------------------------------------------------------------------------------

_CHILD = (
    LOADED
    + """
import warnings
results = {}

def call(name, make, strict=False, grad=False):
    tensors = make()
    os.environ["FUSION_ADVISOR_STRICT"] = "1" if strict else "0"
    before = sum(module.host.fallbacks.values())
    with warnings.catch_warnings(record=True) as seen, torch.set_grad_enabled(grad):
        warnings.simplefilter("always")
        try:
            result = module.softmax(*tensors)
            right = torch.allclose(result, torch.softmax(tensors[0], -1), equal_nan=True)
            shape = list(result.shape)
        except (RuntimeError, IndexError) as error:
            right, shape = str(error), []
    said = [str(w.message) for w in seen]
    results[name] = [right, shape, sum(module.host.fallbacks.values()) - before, said]

x = torch.randn(9, 300)
call("right", lambda: [x], strict=True)
call("other size", lambda: [torch.randn(5, 77)], strict=True)
call("no rows", lambda: [torch.randn(0, 300)], strict=True)
call("no columns", lambda: [torch.randn(9, 0)], strict=True)
call("one row, odd strides", lambda: [torch.randn(300, 2)[:, :1].t()[:, ::2].contiguous()],
     strict=True)
call("one row of a wide tensor", lambda: [torch.randn(4, 600)[1:2, :300]], strict=True)
call("grad off", lambda: [x.clone().requires_grad_()], strict=True)
call("dtype", lambda: [x.double()])
call("dtype again", lambda: [x.double()])
call("strides", lambda: [torch.randn(300, 9).t()])
call("gap", lambda: [torch.randn(9, 600)[:, :300]])
call("fewer dimensions", lambda: [torch.randn(300)])
call("more dimensions", lambda: [torch.randn(2, 9, 300)])
call("grad", lambda: [x.clone().requires_grad_()], grad=True)
call("strict dtype", lambda: [x.double()], strict=True)
call("strict strides", lambda: [torch.randn(300, 9).t()], strict=True)
call("strict dimensions", lambda: [torch.randn(2, 9, 300)], strict=True)
call("strict grad", lambda: [x.clone().requires_grad_()], strict=True, grad=True)
print(json.dumps(results))
"""
)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What the softmax launcher does with each input, in a process under the interpreter."""
    return interpreted(kernel("softmax"), _CHILD, tmp_path_factory.mktemp("guards"))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "name",
    ["right", "other size", "no rows", "one row, odd strides", "one row of a wide tensor",
     "grad off"],
)  # fmt: skip
def test_taken(guarded: dict[str, list[Any]], name: str) -> None:
    right, _, fallbacks, said = guarded[name]
    assert (right, fallbacks, said) == (True, 0, [])


def test_empty_inputs_do_as_eager(guarded: dict[str, list[Any]]) -> None:
    assert guarded["no rows"][1] == [0, 300]
    assert guarded["no columns"][0].startswith("max(): Expected reduction dim 1 to have non-zero")


@pytest.mark.parametrize(
    "name",
    ["dtype", "dtype again", "strides", "gap", "fewer dimensions", "more dimensions", "grad"],
)
def test_falls_back_and_counts(guarded: dict[str, list[Any]], name: str) -> None:
    right, _, fallbacks, said = guarded[name]
    assert (right, fallbacks) == (True, 1)
    assert len(said) == (1 if name == "dtype" else 0)  # warned once in all
    if said:
        assert said[0] == (
            "softmax: args_0 has dtype torch.float64, not torch.float32; running eager instead"
        )


def test_strict_raises(guarded: dict[str, list[Any]]) -> None:
    said = {
        name: guarded[f"strict {name}"][0] for name in ("dtype", "strides", "dimensions", "grad")
    }
    assert said == {
        "dtype": "softmax: args_0 has dtype torch.float64, not torch.float32",
        "strides": "softmax: args_0 has strides (1, 9), not (300, 1)",
        "dimensions": "softmax: args_0 has 3 dimensions, not 2",
        "grad": "softmax: args_0 requires a gradient",
    }


# -- layouts ---------------------------------------------------------------------------------------


def x(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def nhwc(*shape: int) -> torch.Tensor:
    return x(*shape).to(memory_format=torch.channels_last)


def spread(a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    e = a.exp()
    return e, e.sum(-1), (e * 2).amax(-1, keepdim=True)


LAYOUTS: dict[str, tuple[Callable[..., object], Tensors]] = {
    "channels last": (lambda a: (a * 2).relu() + 1, (nhwc(2, 6, 5, 7),)),
    "channels last and per channel": (
        lambda a, w: (a * w[:, None, None]).tanh(), (nhwc(2, 6, 5, 7), x(6)),
    ),
    "channels last and contiguous": (lambda a, b: (a + b).exp(), (nhwc(2, 6, 5, 7), x(2, 6, 5, 7))),
    "channels last, softmax over channels": (
        lambda a: (a * 2).softmax(1), (nhwc(2, 6, 5, 7),),
    ),
    "channels last, mean over pixels": (lambda a: a.relu().mean((2, 3)), (nhwc(2, 6, 5, 7),)),
    "transposed": (lambda a, b: (a.t() + b).exp(), (x(20, 30), x(30, 20))),
    "transposed, rows reduced": (lambda a: (a.t() * 2).softmax(-1), (x(20, 30),)),
    "transposed result": (lambda a, b: (a + b).t(), (x(20, 30), x(20, 30))),
    "expanded": (lambda a, b: a * b + 1, (x(20, 1).expand(20, 30), x(20, 30))),
    "expanded in the middle": (
        lambda a, b: (a * b).sum(-1), (x(6, 1, 30).expand(6, 5, 30), x(6, 5, 30)),
    ),
    "expanded alone": (lambda a: (a + 1).relu(), (x(20, 1).expand(20, 30),)),
    "columns of a wider one": (lambda a: (a[:, 3:20] * 2).exp(), (x(20, 30),)),
    "every second row": (lambda a: a[::2].softmax(-1) + 1, (x(21, 30),)),
    "every third column": (lambda a: a[:, ::3].exp().sum(-1), (x(20, 30),)),
    "overlapping windows": (lambda a, w: (a.unfold(0, 5, 2) * w).sum(-1), (x(41), x(5))),
    "results of three shapes": (spread, (x(6, 5, 30),)),
    "reduced over the outer ones": (
        lambda a: (a * a).sum((0, 2, 3), keepdim=True), (x(3, 6, 5, 7),),
    ),
    "reduced over the first": (lambda a: a.exp().sum(0), (x(30, 20),)),
    "reduced to a scalar": (lambda a: (a * a).mean(), (x(20, 30),)),
    "middle one of five": (lambda a: (a + 1).softmax(2), (x(2, 3, 5, 4, 2),)),
    "two of five, apart": (lambda a: (a + 1).sum((1, 3)), (x(2, 3, 5, 4, 2),)),
    "scalars": (lambda a, b: (a + b).exp(), (x(), x())),
    "one tensor twice": (lambda a: (a * a + a).exp(), (x(20, 30),)),
    "a tensor and its row": (lambda a: (a + a[:1]).exp(), (x(20, 30),)),
    "two halves": (lambda a: a[:, :15] * a[:, 15:] + 1, (x(20, 30),)),
    "sizes of one": (lambda a, b: (a + b).relu(), (x(1, 20, 1), x(1, 1, 30))),
    "heads split and merged": (
        lambda a: (a.view(4, 5, 3, 10).transpose(1, 2) * 2).exp(), (x(4, 5, 30),),
    ),
    "groups within a dimension": (
        lambda a: (a.view(4, 3, 40) - a.view(4, 3, 40).mean(-1, keepdim=True)).view(4, 120),
        (x(4, 120),),
    ),
    "expanded from one element": (lambda a: (a + 1).relu(), (x(1, 1).expand(1, 30),)),
    "expanded beside a size of one": (lambda a: (-a).relu(), (x(1, 1, 30).expand(1, 20, 30),)),
    "mean over a size of one": (
        lambda a: a.mean(0) + 1, (x(1, 20, 1, dtype=torch.float64),),
    ),
    "mean over a size of one, alone": (
        lambda a: a.mean(0, keepdim=True) + 1, (x(1, dtype=torch.float64),),
    ),
    "only the shape of an input": (lambda a, b: torch.zeros_like(a) * b, (x(20, 1), x(20, 30))),
    "only the layout of an input": (
        lambda a, b: (torch.ones_like(a) * b).exp(), (x(30, 20).t(), x(20, 30)),
    ),
    "half precision, odd row": (lambda a: (a * 2).softmax(-1), (x(20, 33, dtype=torch.half),)),
}  # fmt: skip

BOTH_WAYS: dict[str, tuple[Callable[..., object], Tensors]] = {
    "x and its transpose": (lambda a: (a + a.t()).exp(), (x(20, 20),)),
    "a computed x and its transpose": (lambda a: a.exp() + a.exp().t(), (x(20, 20),)),
    "x and its transpose, reduced": (lambda a: (a + a.t()).sum(-1), (x(20, 20),)),
    "a Gram-like outer sum": (lambda a: (a[:, None] + a[None, :]).exp(), (x(20),)),
    "one vector both ways": (lambda a, m: m * a[:, None] + a, (x(20), x(20, 20))),
    "rows and columns of one": (
        lambda a: a / a.sum(0, keepdim=True) + a.sum(1, keepdim=True), (x(20, 20),),
    ),
}  # fmt: skip


def checked(
    function: Callable[..., object],
    inputs: Tensors,
    worker: Worker,
    rules: Rulebook = RULES,
    plan: int = 0,
) -> str | None:
    """Why there is no kernel, or what is wrong with that of one of the plans; None when it is
    right."""
    flow = flow_of(function, *inputs)
    decision = decided(flow, rules)
    planned = decision.subject.planned
    if planned is None or not planned.plans:
        return f"refused: {why_not(decision)}"
    chosen = replace(planned, plans=planned.plans[plan:])
    decision = replace(decision, subject=replace(decision.subject, planned=chosen))
    made = emit(flow, decision, "laid_out", rules)
    return submit_check(worker, made)().failure


def test_launches_that_nothing_needs(worker: Worker) -> None:
    """Their inputs keep the graph's sizes, and the reference leaves them out."""
    aten, tape = torch.ops.aten, Tape()
    a, b, c = (tape.input(tensor) for tensor in (x(2, 40), x(40), x(1).expand(40)))
    positive = tape.call(aten.gt.Scalar, a, 0)
    tape.call(aten.where.self, positive, a, b)
    tape.call(aten.add.Tensor, c, b)
    flow = tape.flow(tape.call(aten.amax.default, b, [0], False))
    decision = decided(flow)
    assert decision.subject.plan is not None, why_not(decision)
    made = emit(flow, decision, "partly_dead", RULES)
    assert submit_check(worker, made)().failure is None
    assert "aten.where" not in made.text.split("def reference")[1]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", LAYOUTS)
def test_layout(name: str, worker: Worker) -> None:
    assert checked(*LAYOUTS[name], worker) is None


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_right_or_refused(name: str, worker: Worker) -> None:
    failure = checked(*BOTH_WAYS[name], worker)
    assert failure is None or failure.startswith("refused: ")


# -- 8-bit floats ----------------------------------------------------------------------------------

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
FLOAT8_KERNELS: dict[str, Callable[[torch.Tensor, torch.dtype], torch.Tensor]] = {
    "stored": lambda x, to: (x * 50).to(to),
    "rounded inside": lambda x, to: x.to(to).to(torch.bfloat16) * 3,
    "after a reduction": lambda x, to: (x.softmax(-1) * 448).to(to),
    "of a scalar": lambda x, to: (x.amax() * 448).to(to),
}


@pytest.mark.parametrize("to", FLOAT8, ids=str)
@pytest.mark.parametrize("name", FLOAT8_KERNELS)
def test_float8_results_are_torchs(name: str, to: torch.dtype, worker: Worker) -> None:
    """The draws overflow, and hold NaN and infinities: e5m2 has infinities, e4m3fn saturates."""
    x = torch.empty(60, 50, dtype=torch.bfloat16)
    made = kernel_of(lambda x: FLOAT8_KERNELS[name](x, to), x)
    assert submit_check(worker, made, seeds=5)().failure is None


@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_float8_inputs(dtype: torch.dtype, worker: Worker) -> None:
    x = torch.empty(60, 50, dtype=dtype)
    for function in (lambda x: x.to(torch.float32) * 2, lambda x: x.t().contiguous()):
        made = kernel_of(function, x)
        assert submit_check(worker, made, seeds=5)().failure is None


# -- what the fuzzer found -------------------------------------------------------------------------

aten = torch.ops.aten


def _flipped(tape: Tape) -> torch.Tensor:
    """One element, read by every lane, whose place is turned round."""
    x = tape.input(torch.empty(1, dtype=torch.bfloat16).expand(17))
    y = tape.call(aten.flip.default, x, [0])
    return tape.call(aten.mul.Tensor, y, y)


def _gathered_rows(tape: Tape) -> torch.Tensor:
    """A reduction of what gathered reductions give: along other axes than they."""
    x = tape.input(torch.empty(8, 3, dtype=torch.bfloat16))
    index = tape.input(torch.empty(3, dtype=torch.int64))
    top = tape.call(aten.constant_pad_nd.default, tape.call(aten.amax.default, x, [0]), [0, 2], 1)
    return tape.call(
        aten._log_softmax.default, tape.call(aten.gather.default, top, 0, index), 0, False
    )


def _gathered_from_one(tape: Tape) -> torch.Tensor:
    """An index that no element depends on, over a run-time size."""
    x = tape.input(torch.empty(8, 3, dtype=torch.bfloat16).expand(1, 8, 3))
    y = tape.call(aten.gather.default, x, 0, tape.input(torch.empty(3, 8, 3, dtype=torch.int64)))
    return tape.call(aten.amax.default, y, [0, 1], True)


def _padded_window(tape: Tape) -> torch.Tensor:
    """A guard that is one number at each place of a lane's walk."""
    x = tape.input(torch.empty(4, 3, 3, 3))
    y = tape.call(aten.constant_pad_nd.default, x, [2, 0], 1)
    return tape.call(aten.silu.default, tape.call(aten.amin.default, y, [1, 3], False))


def _one_random_number(tape: Tape) -> torch.Tensor:
    x = tape.input(torch.empty(1))
    return tape.call(aten.mul.Tensor, x, tape.call(aten.rand_like.default, x))


def _gathered_draws(tape: Tape) -> torch.Tensor:
    """The number of a random element over a size that is a run-time argument elsewhere."""
    x = tape.input(torch.empty(1, 4, 2))
    index = tape.input(torch.empty(1, 1, 2, dtype=torch.int64))
    drawn = tape.call(aten.bernoulli.p, x, 0.3)
    return tape.call(aten.gather.default, tape.call(aten.mul.Tensor, x, drawn), 1, index)


def _twice_the_sum(tape: Tape) -> torch.Tensor:
    """A number of repetitions that stands in the kernel, as an integer."""
    x = tape.input(torch.empty(12, dtype=torch.int64))
    repeated = tape.call(aten.repeat.default, x, [2])
    total = tape.call(aten.sum.dim_IntList, repeated, [0], False)
    return tape.call(aten.minimum.default, total, repeated)


def _read_in_two_ways(tape: Tape) -> tuple[torch.Tensor, ...]:
    """One kernel takes any strides of what the next needs in one piece."""
    x = tape.input(torch.empty_strided((4, 3, 3), (1, 12, 4)))
    top = tape.call(aten.amax.default, x, [1], False)
    return tape.call(aten.constant_pad_nd.default, top, [2, 0], 1), tape.call(aten.relu.default, x)


def _drawn_in_one_part(tape: Tape) -> torch.Tensor:
    """Seed and offset are one element for all lanes, whichever part they are in."""
    x = tape.input(torch.empty(5, 400))
    drawn = tape.call(aten.mul.Tensor, x, tape.call(aten.rand_like.default, x))
    return tape.call(aten.cat.default, [drawn, x], 0)


def _picked_in_one_part(tape: Tape) -> torch.Tensor:
    """Data says which element all lanes of one part have."""
    x, table = tape.input(torch.empty(1, 1, 1)), tape.input(torch.empty(1, 3, 1))
    places = tape.input(torch.empty(1, 1, 1, dtype=torch.int64))
    picked = tape.call(aten.gather.default, table, 1, places)
    indices = tape.input(torch.empty(3, dtype=torch.int64))
    return tape.call(
        aten.cat.default, [x, tape.call(aten.index_select.default, picked, 1, indices)], 1
    )


def _picked_for_each_row(tape: Tape) -> torch.Tensor:
    """As before, where a program has a row."""
    x, y = tape.input(torch.empty(40, 700)), tape.input(torch.empty(40, 1))
    both = tape.call(aten.cat.default, [x, tape.call(aten.expand.default, y, [40, 700])], 1)
    return tape.call(aten._softmax.default, both, 1, False)


def _rows_of_one_element(tape: Tape) -> tuple[torch.Tensor, ...]:
    """What is reduced is the same in all rows, and is used once more beside it."""
    x = tape.input(torch.empty_strided((3, 17), (0, 0), dtype=torch.bfloat16))
    squares = tape.call(aten.mul.Tensor, x, x)
    logs = tape.call(aten._log_softmax.default, squares, 1, False)
    return tape.call(aten.mul.Tensor, squares, logs), logs


def _minimum_along_its_row(tape: Tape) -> tuple[torch.Tensor, ...]:
    """One number for a row is stored along all of it, around its whole vectors, too."""
    x = tape.input(torch.empty(1, 3, 1, 2, dtype=torch.float16))
    least = tape.call(aten.amin.default, x, [0, 3], True)
    places = tape.input(torch.empty(1, 3, 2, 1, dtype=torch.int64))
    return tape.call(aten.gather.default, least, 2, places), least


FOUND = (
    _drawn_in_one_part, _picked_in_one_part, _picked_for_each_row, _rows_of_one_element,
    _minimum_along_its_row, _read_in_two_ways, _flipped, _gathered_from_one, _gathered_rows,
    _padded_window, _one_random_number,
)  # fmt: skip


def _emitted(region: Callable[[Tape], Any]) -> Kernel:
    tape = Tape()
    results = region(tape)
    flow = tape.flow(*(results if isinstance(results, tuple) else (results,)))
    found = decided(flow)
    assert found.subject.plan is not None, why_not(found)
    return emit(flow, found, "found", RULES)


@pytest.mark.deep
def test_what_the_fuzzer_found_compiles() -> None:
    """The interpreter takes shapes that Triton does not."""
    with compiler() as worker:
        found = compiled(worker, *map(_emitted, FOUND))
    assert [each.failure for each in found if each.failure] == []


@pytest.mark.parametrize("region", FOUND)
def test_found_by_the_fuzzer(region: Callable[[Tape], Any], worker: Worker) -> None:
    made = _emitted(region)
    assert submit_check(worker, made, seeds=5)().failure is None


def test_what_two_parts_read_is_loaded_once(worker: Worker) -> None:
    """Each part of a concatenation has a guard of its own, and the same elements behind it."""

    def turned(a: torch.Tensor) -> torch.Tensor:
        p, q = a.chunk(2, -1)
        return torch.cat((p * 0.5 - q, q * 0.5 + p), -1)

    kernel = kernel_of(turned, x(300, 64))
    assert kernel.text.count("tl.load(") == 2
    assert checked(turned, (x(300, 64),), worker) is None


def test_launches_named_as_sizes_are(worker: Worker) -> None:
    """The reference takes the sizes of its views from names of its own."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x.sum(-1, keepdim=True)).expand(-1, -1, x.shape[2]) * 2

    flow = flow_of(function, torch.randn(6, 5, 40))
    text = to_json(flow.annotated.graph)
    calls = [node.name for node in flow.nodes if node.kind == "call"]
    for number, name in enumerate(calls):
        text = text.replace(f'"{name}"', f'"n{number}"')
    renamed = dataflow(from_json(Graph, text), RULES.device("h200"))
    found = emit(renamed, decided(renamed, RULES), "k", RULES)
    assert "n2 = args_0.shape[2]" in found.text
    assert "n0 = args_0.shape[0]" not in found.text, "nothing in the reference has use for it"
    assert submit_check(worker, found)().failure is None


def test_integers_negated_under_an_extreme_are_refused() -> None:
    """Found by the fuzzer on a GPU: ptxas 12.8 drops a sign, which no interpreter shows."""

    def refused(negate: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype) -> bool:
        x = torch.zeros(5, 64, dtype=dtype)
        found = decided(flow_of(lambda x: torch.amax(negate(x), 0), x))
        return "ptxas 12.8 drops a sign" in why_not(found)

    for negate in (torch.neg, lambda x: 0 - x, lambda x: x * -1, lambda x: -x + 3):
        assert refused(negate, torch.int32)
        assert not refused(negate, torch.float32)
    assert not refused(lambda x: x - 1, torch.int32)
