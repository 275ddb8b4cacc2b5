"""Products that add into their residuals."""
# Dynamo's graphs are untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportPrivateUsage=false

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.backends.debugging import aot_eager

from fusion_advisor.dynamo.backend import Outcome, fusion_advisor
from fusion_advisor.dynamo.custom_ops import loosen_views
from fusion_advisor.dynamo.options import inner_compiler
from fusion_advisor.dynamo.residual_products import (
    NAME,
    OPERATOR,
    residual_products,
    write_in_place,
)
from fusion_advisor.dynamo.rewrites.base import Taken
from fusion_advisor.frontend.aot import Lowered, lower

pytestmark = pytest.mark.usefixtures("compiled_anew")

Model = Callable[..., Any]
Inner = Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]
WIDTH, INNER = 8, 16
OUT, IN, NARROW = torch.randn(WIDTH, INNER), torch.randn(INNER, WIDTH), torch.randn(WIDTH, WIDTH)
BIAS = torch.randn(WIDTH)


def compiled(
    model: Model, inner: Inner = aot_eager, least: float = 0.0, **how: Any
) -> tuple[Model, list[list[Taken]]]:
    """A model with its products in place, compiled by `inner`, and what was taken of each graph."""
    found: list[list[Taken]] = []

    def backend(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        lowered, taken = rewritten(module, inputs, least)
        found.append(taken)
        write_in_place(lowered.module, taken)
        loosen_views(lowered.module)
        written = lowered.module.graph.find_nodes(op="call_function", target=OPERATOR)
        assert len(written) == len(taken)
        return inner(lowered.module, inputs)

    return torch.compile(model, backend=backend, **how), found


def rewritten(
    module: torch.fx.GraphModule, inputs: Sequence[Any], least: float = 0.0
) -> tuple[Lowered, list[Taken]]:
    taken: list[Taken] = []
    lowered = lower(module, inputs, lambda traced: taken.extend(residual_products(traced, least)))
    launched = [node.op for node in lowered.graph.nodes]
    assert launched.count("aten.addmm.default") >= len(taken)
    return lowered, taken


def taken_of(model: Model, *inputs: torch.Tensor, **how: Any) -> int:
    """How many products of a model add into their residuals; the model gives what it gave, and its
    inputs stay."""
    run, found = compiled(model, **how)
    before = [each.clone() for each in inputs]
    with torch.no_grad():
        torch.testing.assert_close(run(*inputs), model(*inputs))
    torch.testing.assert_close([*inputs], before)
    assert len(found) == 1
    return len(found[0])


def normed(x: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, (WIDTH,))


def block(x: torch.Tensor) -> torch.Tensor:
    x = x + F.linear(normed(x), NARROW)
    return x + F.linear(F.silu(F.linear(normed(x), IN)), OUT)


# -- what is taken ---------------------------------------------------------------------------------


def layers(x: torch.Tensor) -> Any:
    return normed(block(block(x * 2)))


def times_a_number(x: torch.Tensor) -> Any:
    x = x * 2
    return normed(F.linear(normed(x), NARROW) * 0.25 + x)


def matrices(x: torch.Tensor) -> Any:
    x = x.sin()
    return normed(x + normed(x) @ NARROW)


def in_place(x: torch.Tensor) -> Any:
    x = x * 2
    found = F.linear(normed(x), NARROW)
    found += x
    return found, found.sin()


def a_product_as_residual(x: torch.Tensor) -> Any:
    return normed(F.linear(x, NARROW) + F.linear(x.sin(), NARROW))


def a_residual_that_is_written(x: torch.Tensor) -> Any:
    x = x * 2
    x += F.linear(normed(x), NARROW)
    return normed(x), x


@pytest.mark.parametrize(
    ("model", "count", "shape"),
    [
        (layers, 4, (2, 3, WIDTH)),
        (layers, 4, (2, 1, 3, WIDTH)),
        (times_a_number, 1, (2, 3, WIDTH)),
        (matrices, 1, (3, WIDTH)),
        (in_place, 1, (2, 3, WIDTH)),
        (a_product_as_residual, 1, (2, 3, WIDTH)),
        (a_residual_that_is_written, 1, (2, 3, WIDTH)),
    ],
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_product_adds_into_a_residual_that_nothing_else_reads(
    model: Model, count: int, shape: tuple[int, ...], dynamic: bool
) -> None:
    assert taken_of(model, torch.randn(shape), dynamic=dynamic) == count


def test_one_graph_serves_all_sizes() -> None:
    run, found = compiled(layers, dynamic=True)
    with torch.no_grad():
        for batch, tokens in ((2, 3), (4, 5), (1, 7), (3, 1)):
            x = torch.randn(batch, tokens, WIDTH)
            torch.testing.assert_close(run(x), layers(x))
    assert {len(taken) for taken in found} == {4}


def test_inductor_writes_in_place_and_copies_nothing() -> None:
    """Residuals of all layers are one memory, without a copy before a product."""
    from torch._inductor.utils import run_and_get_code

    run, found = compiled(layers, inner_compiler("inductor", {}))
    x = torch.randn(2, 3, WIDTH)
    with torch.no_grad():
        result, (code, *_) = run_and_get_code(run, x)
    torch.testing.assert_close(result, layers(x))
    calls = [line for line in code.splitlines() if "add_product_.default(" in line]
    assert len(found[0]) == len(calls) == 4
    assert len({line.split("(")[1:3][1].split(",")[0] for line in calls}) == 1
    assert "copy_" not in code.replace("copy_misaligned", "")


# -- what stays ------------------------------------------------------------------------------------


def an_input(x: torch.Tensor) -> Any:
    return normed(x + F.linear(normed(x), NARROW))


def a_view_of_an_input(x: torch.Tensor) -> Any:
    return normed(x.view(-1, 3, WIDTH).contiguous() + F.linear(normed(x), NARROW))


def nothing_dropped_of_an_input(x: torch.Tensor) -> Any:
    return normed(F.dropout(x, training=False) + F.linear(normed(x), NARROW))


def read_later(x: torch.Tensor) -> Any:
    x = x * 2
    return normed(x + F.linear(normed(x), NARROW)) * x


def a_view_read_later(x: torch.Tensor) -> Any:
    x = x * 2
    turned = x.transpose(0, 1)
    return normed(x + F.linear(normed(x), NARROW)), turned + 1


def returned(x: torch.Tensor) -> Any:
    x = x * 2
    return normed(x + F.linear(normed(x), NARROW)), x[0]


def with_a_bias(x: torch.Tensor) -> Any:
    x = x * 2
    return normed(x + F.linear(normed(x), NARROW, BIAS))


def a_vector(x: torch.Tensor) -> Any:
    return normed(torch.sin(x[0, 0]) + F.linear(normed(x), NARROW))


def of_another_type(x: torch.Tensor) -> Any:
    x = x * 2
    return normed(x + F.linear(x.bfloat16(), NARROW.bfloat16()))


def a_product_read_twice(x: torch.Tensor) -> Any:
    found = F.linear(normed(x * 2), NARROW)
    return normed(x * 2 + found), found.sin()


def another_layout(x: torch.Tensor) -> Any:
    turned = (x * 2).transpose(0, 1)
    return normed(turned + F.linear(normed(turned), NARROW))


def weighted(x: torch.Tensor) -> Any:
    x = x * 2
    return normed(torch.add(x, F.linear(normed(x), NARROW), alpha=2))


def counted(x: torch.Tensor) -> Any:
    x = x.long()
    return x + torch.mm(x.view(-1, WIDTH), NARROW.long()).view(x.shape)


@pytest.mark.parametrize(
    "model",
    [
        an_input, a_view_of_an_input, nothing_dropped_of_an_input, read_later, a_view_read_later,
        returned, with_a_bias, a_vector, of_another_type, a_product_read_twice, another_layout,
        weighted, counted,
    ],
)  # fmt: skip
def test_other_sums_stay(model: Model) -> None:
    assert taken_of(model, torch.randn(2, 3, WIDTH)) == 0


def test_a_small_product_stays() -> None:
    flops = 2 * 6 * WIDTH * WIDTH
    x = torch.randn(2, 3, WIDTH)
    assert taken_of(times_a_number, x, least=flops) == 1
    torch.compiler.reset()
    assert taken_of(times_a_number, x, least=flops + 1) == 0


def test_a_residual_that_a_kernel_reads_later_has_a_sum_beside_it() -> None:
    """A kernel may take in what was computed before, and read the residual behind the sum."""
    seen: list[torch.fx.GraphModule] = []

    def backend(module: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        lowered, taken = rewritten(module, inputs)
        graph, (sum_,) = lowered.module.graph, taken
        (sine,) = graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
        graph.output_node().prepend(sine)  # as if a kernel read the residual there
        (last,) = graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)[-1:]
        sine.append(last)
        write_in_place(lowered.module, [sum_])
        seen.append(lowered.module)
        return lowered.module.forward

    def model(x: torch.Tensor) -> torch.Tensor:
        x = x.cos()
        early = x.sin()
        return (x + F.linear(x, NARROW)) * early

    x = torch.randn(2, 3, WIDTH)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(model, backend=backend)(x), model(x))
    assert not seen[0].graph.find_nodes(op="call_function", target=OPERATOR)


@pytest.fixture
def rules(tmp_path: Path) -> str:
    """Rules by which no product is too small."""
    file = tmp_path / "small.toml"
    never = '{ value = 0, unit = "us", source = "this test: however small" }'
    file.write_text(f"[rewrites.{NAME}.limits]\ncall = {never}\n")
    return str(file)


def told(x: torch.Tensor, **options: Any) -> Outcome:
    """What the backend says of a step, of its forward graph where gradients are required."""
    found: list[Outcome] = []
    options = {"device": "h200", **options}
    backend = partial(fusion_advisor, dry=True, options=options, on_outcome=found.append)
    torch.compile(layers, backend=backend)(x)
    return found[0]


@pytest.mark.parametrize(
    ("options", "count"),
    [({}, 4), ({"rewrites": False}, 0), ({"max_autotune": True}, 0), ({"inner": "eager"}, 0)],
)
def test_the_backend_tells_what_it_took(options: dict[str, Any], count: int, rules: str) -> None:
    with torch.no_grad():
        outcome = told(torch.randn(2, 3, WIDTH), rules=rules, **options)
    assert [taken.name for taken in outcome.rewrites] == [NAME] * count
    assert not any(taken.source is None for taken in outcome.rewrites)
    assert (f"rewritten x{count}: {NAME}" in str(outcome)) == bool(count)


def test_what_the_host_would_wait_for_stays() -> None:
    with torch.no_grad():
        assert not told(torch.randn(2, 3, WIDTH)).rewrites


def test_a_step_with_gradients_keeps_its_residuals(rules: str) -> None:
    outcome = told(torch.randn(2, 3, WIDTH, requires_grad=True), rules=rules)
    assert outcome.phase == "forward"
    assert not outcome.rewrites
