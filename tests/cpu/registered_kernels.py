"""Emitted kernels in what traces them, in Triton's interpreter: run as a program, in a folder with
packages `mine`, `other` and `earlier`. Prints what each scenario saw, as JSON."""

# torch is partly untyped, emitted files are so altogether.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingImports=false

from __future__ import annotations

import importlib
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast
from unittest import mock

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, os.getcwd())

import torch
from scenarios import Facts, report
from torch import Tensor, nn
from torch.export import Dim

WAYS = (
    ("eager", False), ("eager", True), ("aot_eager", False), ("aot_eager", True),
    ("inductor", True),
)  # fmt: skip
"""Backends, and whether sizes are free."""
DYNAMIC = cast(Any, Dim).DYNAMIC


def kernel(name: str, package: str = "mine") -> Any:
    """Launcher of an emitted file."""
    return getattr(importlib.import_module(f"{package}.{name}"), name)


def fallbacks(package: str = "mine") -> dict[str, int]:
    """Calls of each launcher of a package that ran eager's statements."""
    return dict(importlib.import_module(f"{package}.fused_runtime").fallbacks)


class Scaled(nn.Module):
    """A kernel behind an operation with a parameter, or the statements that it stands for."""

    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2.0, 300))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(x * self.weight) + 1


def by_hand(x: Tensor) -> Tensor:
    return torch.softmax(x, -1)


def rows(count: int = 9) -> Tensor:
    return torch.linspace(-3.0, 3.0, 300) * torch.arange(1.0, count + 1)[:, None]


def close(one: Any, two: Any) -> bool:
    return torch.allclose(one, two, rtol=1e-5, atol=1e-6)


def operators(graph: Any) -> list[str]:
    """Operators of ours in a graph."""
    called = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    return [name for name in called if name.startswith("fusion_advisor.")]


# -- results and graphs ----------------------------------------------------------------------------


def eager() -> Facts:
    softmax = kernel("softmax")
    operator = softmax.operator
    with torch.no_grad():
        same = close(softmax(rows()), by_hand(rows()))
        softmax.operator = None
        without = close(softmax(rows()), by_hand(rows()))
    softmax.operator = operator
    return {"same": same, "operator": str(operator), "without": without}


def compiled() -> Facts:
    """Each backend, sizes fixed and free, one graph without a break: it has the operator."""
    found: Facts = {}
    for backend, dynamic in WAYS:
        torch._dynamo.reset()
        graphs: list[list[str]] = []

        def noted(module: Any, inputs: Any, backend: str = backend, graphs: Any = graphs) -> Any:
            graphs.append(operators(module.graph))
            return torch._dynamo.lookup_backend(backend)(module, inputs)

        model = Scaled(kernel("softmax"))
        call: Any = torch.compile(model, fullgraph=True, dynamic=dynamic, backend=noted)
        with torch.no_grad():
            same = [close(call(rows(n)), Scaled(by_hand)(rows(n))) for n in (3, 5, 8)]
        found[f"{backend} {dynamic}"] = {"same": all(same), "graphs": graphs}
    return {"each": found, "fallbacks": fallbacks()}


def results() -> Facts:
    """Kernels with several results, scratch, several steps, exchanges and integers."""
    wide, narrow = torch.bfloat16, torch.float32
    given: dict[str, tuple[Tensor, ...]] = {
        "residual_rms_norm": (
            torch.randn(2, 7, 1024, dtype=wide), torch.randn(2, 7, 1024, dtype=wide),
            torch.randn(1024, dtype=wide),
        ),
        "mean_loss": (torch.randn(50, 20), torch.randint(0, 20, (50,))),
        "shared_softmax": (torch.randn(5, 330, dtype=wide),),
        "carried": (torch.randn(60, 96), torch.randn(60, 96), torch.randn(96, dtype=narrow)),
    }  # fmt: skip
    found: Facts = {}
    for name, inputs in given.items():
        for dynamic in (False, True):
            torch._dynamo.reset()
            launcher = kernel(name)
            call: Any = torch.compile(
                lambda *given, launcher=launcher: launcher(*given),
                fullgraph=True, dynamic=dynamic, backend="aot_eager",
            )  # fmt: skip
            with torch.no_grad():
                ours, plain = call(*inputs), launcher(*inputs)
            pairs = (
                [(ours, plain)] if isinstance(plain, Tensor) else [*zip(ours, plain, strict=True)]
            )
            found[f"{name} {dynamic}"] = all(
                torch.equal(a, b) and a.stride() == b.stride() for a, b in pairs
            )
    return {"each": found, "fallbacks": fallbacks()}


def drawn() -> Facts:
    """Seeds are drawn in the graph, anew for each call; those that are given are taken."""
    dropout, x = kernel("dropout_gelu"), torch.randn(6, 64, dtype=torch.bfloat16)
    call: Any = torch.compile(dropout, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        return {
            "anew": not torch.equal(call(x), call(x)),
            "same": torch.equal(call(x, 3, 4), dropout(x, 3, 4)),
            "named": torch.equal(dropout(x, offset=4, seed=3), dropout(x, 3, 4)),
        }


def checked_by_torch() -> Facts:
    """What torch asks of an operator: schema, fake results, tracing with symbolic sizes."""
    one, two = kernel("softmax").operator, kernel("residual_rms_norm").operator
    wide = torch.bfloat16
    given = (torch.randn(2, 7, 1024, dtype=wide), torch.randn(2, 7, 1024, dtype=wide))
    with torch.no_grad():
        said = [
            torch.library.opcheck(one, (rows(),)),
            torch.library.opcheck(two, (*given, torch.randn(1024, dtype=wide))),
        ]
    said.append(torch.library.opcheck(one, (rows().requires_grad_(),)))
    return {"said": sorted({result for each in said for result in each.values()})}


def exported() -> Facts:
    """With and without Dynamo, sizes fixed and free; a program that is written and read again."""
    found: Facts = {}
    for strict in (False, True):
        for free in (False, True):
            sizes = ({0: DYNAMIC},) if free else None
            program: Any = torch.export.export(
                Scaled(kernel("softmax")), (rows(),), strict=strict, dynamic_shapes=sizes
            )
            with tempfile.TemporaryDirectory() as folder:
                torch.export.save(program, Path(folder, "it.pt2"))
                again: Any = torch.export.load(Path(folder, "it.pt2"))
            before = fallbacks()
            with torch.no_grad():
                wanted = [rows(), rows(4)] if free else [rows()]
                same = [close(again.module()(x), Scaled(by_hand)(x)) for x in wanted]
            found[f"{strict} {free}"] = {
                "same": all(same),
                "operators": operators(program.run_decompositions({}).graph),
                "fallen": fallbacks() != before,
                "gradient": gradient(again.module()),
            }
    return found


# -- gradients -------------------------------------------------------------------------------------


def gradient(model: Any) -> bool:
    """Whether the gradients of a model are those of the statements by hand."""
    wanted = Scaled(by_hand)
    for each in (model, wanted):
        each(rows()).square().sum().backward()
    (ours,), (plain,) = ([p.grad for p in each.parameters()] for each in (model, wanted))
    return close(ours, plain)


def gradients() -> Facts:
    found = {"eager": gradient(Scaled(kernel("softmax")))}
    for backend, dynamic in WAYS:
        torch._dynamo.reset()
        model = Scaled(kernel("softmax"))
        call = torch.compile(model, fullgraph=True, dynamic=dynamic, backend=backend)
        found[f"{backend} {dynamic}"] = gradient(call)
    return found


def ungraded() -> Facts:
    """A kernel through which no gradient passes takes what requires one, traced or not."""
    labels, before = torch.arange(9) * 37, fallbacks()
    given = rows().requires_grad_()
    found = [kernel("hits")(given, labels)]
    for backend, dynamic in (WAYS[0], WAYS[-1]):
        for one in (kernel("hits"), kernel("hits").or_none):
            torch._dynamo.reset()
            call = torch.compile(one, fullgraph=True, dynamic=dynamic, backend=backend)
            found.append(call(given, labels))
    wanted = ((given * 2).argmax(-1) == labels).float().mean()
    same = [torch.equal(each, wanted) and not each.requires_grad for each in found]
    return {"same": same, "fallen": fallbacks() != before}


def gradients_are_told() -> Facts:
    """In strict mode a call that would not launch raises, traced or not."""
    said: list[str] = []
    with mock.patch.dict(os.environ, {"FUSION_ADVISOR_STRICT": "1"}):
        for call in (kernel("softmax"), kernel("softmax").operator):
            try:
                call(rows().requires_grad_())
            except RuntimeError as error:
                said.append(str(error))
    return {"said": said}


def distributed() -> Facts:
    """A model in DDP, of one process: eager and compiled."""
    from torch import distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/it", rank=0, world_size=1)
        try:
            plain = DistributedDataParallel(Scaled(kernel("softmax")))
            torch._dynamo.reset()
            inner = DistributedDataParallel(Scaled(kernel("softmax")))
            call: Any = torch.compile(inner, backend="aot_eager")
            with torch.no_grad():
                before = fallbacks()
                same = [close(each(rows()), Scaled(by_hand)(rows())) for each in (plain, call)]
                fallen = fallbacks() != before
            return {"same": same, "fallen": fallen, "eager": gradient(plain), "it": gradient(call)}
        finally:
            dist.destroy_process_group()


# -- names -----------------------------------------------------------------------------------------


def names() -> Facts:
    """The same file again, the same in another package, and another text under the same name."""
    first = kernel("softmax")
    again = importlib.reload(sys.modules["mine.softmax"]).softmax
    with mock.patch.dict(sys.modules):
        for name in [name for name in sys.modules if name.partition(".")[0] == "mine"]:
            del sys.modules[name]
        with mock.patch.object(sys, "path", [str(Path("elsewhere").resolve()), *sys.path]):
            elsewhere = kernel("softmax")
    other = kernel("softmax", "other")
    with torch.no_grad():
        same = [close(f(rows()), by_hand(rows())) for f in (first, again, elsewhere)]
        halved = close(other(rows()), by_hand(rows()) / 2)
        through = close(other.operator(rows()), by_hand(rows()) / 2)
    return {
        "first": str(first.operator),
        "one": first.operator is again.operator is elsewhere.operator,
        "apart": elsewhere.__code__.co_filename != first.__code__.co_filename,
        "other": str(other.operator),
        "same": same,
        "halved": [halved, through],
    }


def earlier() -> Facts:
    """Files of the runtime's first two versions beside this one."""
    softmax, second = kernel("softmax", "earlier"), kernel("softmax", "second")
    x = rows().requires_grad_()
    with torch.no_grad():
        same = close(softmax(rows()), by_hand(rows()))
    softmax(x).square().sum().backward()
    plain = rows().requires_grad_()
    by_hand(plain).square().sum().backward()
    return {
        "same": same,
        "gradient": close(x.grad, plain.grad),
        "fallbacks": fallbacks("earlier"),
        "operator": hasattr(softmax, "operator"),
        "second": close(second(rows()), by_hand(rows())),
        "registered": hasattr(second, "operator"),
    }


SCENARIOS: tuple[Callable[[], Facts], ...] = (
    eager, compiled, results, drawn, checked_by_torch, exported, gradients, gradients_are_told,
    ungraded, distributed, names, earlier,
)  # fmt: skip


def main() -> None:
    warnings.simplefilter("ignore")
    report(SCENARIOS)


if __name__ == "__main__":
    main()
