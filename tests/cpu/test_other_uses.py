"""Uses of a patched model that its capture did not see: they give what the original gives.

Where a kernel would compute something else there, a guard asks, or the group is left out.
"""

from __future__ import annotations

import itertools
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fusion_advisor.ir.graph import Graph
from fusion_advisor.ir.scenario import Request, Scenario
from fusion_advisor.shipped.load import load_module
from fusion_advisor.sourcepatch.trial import patched_copy
from fusion_advisor.support.errors import CaptureError
from fusion_advisor.workflows.patch import patch_model

from .in_process import captured_as_asked
from .test_patch import HEAD, asking, changed, made

pytestmark = pytest.mark.usefixtures("ways")

Use = Callable[[Any], list[object]]


def uses(
    folder: Path,
    body: str,
    use: Use,
    shape: str = "8, 32, 1024",
    inputs: int = 1,
    *,
    resized: bool = False,
    everywhere: bool = False,
) -> str:
    """The source and the guards of a patch, as `made` makes it; `use` of the model's file gives the
    same before and after."""
    patch = made(folder, body, shape=shape, count=inputs, resized=resized, everywhere=everywhere)
    assert patch.diff, (patch.unplaced, patch.patch.refused)
    text = changed(patch)
    with patched_copy(patch.diff, patch.patch.after, folder.resolve()) as copy:
        results: list[list[object]] = []
        for file in (folder / "model.py", copy / "model.py"):
            with pytest.MonkeyPatch.context() as path, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # kernels fall back where there is no GPU
                path.syspath_prepend(str(file.parent))
                torch.manual_seed(0)
                module = load_module(file.read_text(), file.parent)
                try:
                    results.append(use(module))
                finally:
                    for name in [name for name in sys.modules if name.startswith("fused_model")]:
                        del sys.modules[name]
    for found, known in zip(*results, strict=True):
        if isinstance(known, torch.Tensor):
            assert isinstance(found, torch.Tensor)
            torch.testing.assert_close(found, known)
        else:
            assert found == known
    functions = [t for p, t in patch.patch.after.items() if p.name == "or_eager.py"]
    return "\n".join([text, *functions])


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (2, 3, 1024)))


METHOD = """
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.lin = nn.Linear(1024, 1024)

        def act(self, x):
            return torch.tanh(x) * 0.5

        def forward(self, x):
            return self.act(self.lin(x)) + x
"""


def test_a_subclass_overrides_a_method(tmp_path: Path) -> None:
    def use(file: Any) -> list[object]:
        class Other(file.Model):
            def act(self, x: torch.Tensor) -> torch.Tensor:
                return torch.relu(x)

        return [model(drawn()) for model in (file.Model(), Other())]

    assert "fused_model.tanh_mul_add_or_eager(self.lin(x), x, self.act)" in uses(
        tmp_path, METHOD, use
    )


def test_an_instance_overrides_its_forward(tmp_path: Path) -> None:
    def use(file: Any) -> list[object]:
        model = file.Model()
        model.block.forward = lambda x: x * 2
        replaced = file.Model()
        replaced.block, replaced.gelu = torch.nn.Identity(), torch.nn.ReLU()
        return [model(drawn()), replaced(drawn())]

    text = uses(
        tmp_path,
        """
        class Block(nn.Module):
            def forward(self, x):
                return torch.tanh(x) * 0.5

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.block, self.lin, self.gelu = Block(), nn.Linear(1024, 1024), nn.GELU()

            def forward(self, x):
                return self.gelu(self.block(self.lin(x)) + x)
        """,
        use,
    )
    assert "type(gelu) is not torch.nn.GELU" in text


def test_a_class_of_one_name_in_another_file_is_told_apart(tmp_path: Path) -> None:
    def use(file: Any) -> list[object]:
        other = "class Act(torch.nn.Module):\n    def forward(self, x):\n        return x.exp()"
        there: dict[str, Any] = {"torch": torch}
        exec(compile(other, "of_a_model.py", "exec"), there)
        model, held = file.Model(), file.Model()
        model.act = there["Act"]()
        held.act.forward = partial(type(held.act).forward, held.act)  # as hooks of libraries do
        return [model(drawn()), held(drawn()), file.Model()(drawn())]

    text = uses(
        tmp_path,
        """
        class Act(nn.Module):
            def forward(self, x):
                return torch.tanh(x) * 2.0

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.act, self.lin = Act(), nn.Linear(1024, 1024)

            def forward(self, x):
                return self.act(self.lin(x)) + x
        """,
        use,
    )
    assert "act.forward.__code__.co_filename.rpartition('/')[2] != 'model.py'" in text


def test_classes_of_one_name_are_told_apart(tmp_path: Path) -> None:
    def use(file: Any) -> list[object]:
        return [file.Model(act)(drawn()) for act in (file.Soft.Act(), file.Hard.Act())]

    uses(
        tmp_path,
        """
        class Soft:
            class Act(nn.Module):
                def forward(self, x):
                    return torch.tanh(x) * 2.0

        class Hard:
            class Act(nn.Module):
                def forward(self, x):
                    return torch.relu(x) * 2.0

        class Model(nn.Module):
            def __init__(self, act=None):
                super().__init__()
                self.act, self.lin = act or Soft.Act(), nn.Linear(1024, 1024)

            def forward(self, x):
                return self.act(self.lin(x)) + x
        """,
        use,
    )


EFFECTS = {
    "an attribute that is set": "self.calls = self.calls + 1",
    "a method that is called": "self.seen.append(1)",
    "a context": "with torch.no_grad():\n                    x = x * 3.0",
    "a global name": "global COUNT\n                COUNT = COUNT + 1",
}


@pytest.mark.parametrize("effect", EFFECTS.values(), ids=EFFECTS.keys())
def test_what_a_function_does_beside_computing_is_done(tmp_path: Path, effect: str) -> None:
    def use(file: Any) -> list[object]:
        model = file.Model()
        result = model(drawn().requires_grad_())
        result.sum().backward()
        lin: Any = model.lin
        return [result, model.block.calls, len(model.block.seen), file.COUNT, lin.weight.grad]

    body = '''
        COUNT = 0

        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.calls, self.seen = 0, []

            def forward(self, x):
                """Of the house."""
                EFFECT
                return torch.tanh(x) * 0.5

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.block, self.lin = Block(), nn.Linear(1024, 1024)

            def forward(self, x):
                return self.block(self.lin(x)) + x
        '''
    text = uses(tmp_path, body.replace("EFFECT", effect), use)
    assert "fused_model.tanh_mul" in text, "what the function computes is a kernel within it"


def test_conditions_of_a_function_are_asked_where_it_was_called(tmp_path: Path) -> None:
    """On sizes, ranks, layouts and objects; an assert is one, and so is what raises."""

    def use(file: Any) -> list[object]:
        model, given = file.Model(), drawn(3, 1024)
        results = [model(given), model(drawn(2, 65, 1024)), model(drawn(2, 3, 1024))]
        model.options.twice = True
        results.append(model(drawn(2, 3, 1024)))
        for wrong in (drawn(9, 3, 1024), drawn(2, 2, 2, 1024)):
            with pytest.raises((AssertionError, ValueError)) as raised:
                model(wrong)
            results.append(str(raised.value))
        transposed = drawn(1024, 3).t()
        return [*results, file.Model.act(model, transposed)]

    text = uses(
        tmp_path,
        """
        class Options:
            pass

        def helper(x, options, limit=64):
            assert x.size(0) < 9 or x.dim() == 2, "many"
            rows = x.shape[-2]
            if rows > limit:
                return x
            if x.dim() == 2:
                x = x * 7
            elif x.dim() != 3:
                raise ValueError("rank")
            if getattr(options, "twice", False):
                x = x * 2
            return torch.sigmoid(x) * 3

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.lin, self.options = nn.Linear(1024, 1024), Options()

            def act(self, x):
                return (x if x.is_contiguous() else x + 1) * 3.0 + x.tanh()

            def forward(self, x):
                y = self.lin(x)
                y = helper(y, self.options) + x
                return y @ y.transpose(-1, -2)
        """,
        use,
    )
    assert "y.size(-2) > 64 or y.dim() == 2 or y.dim() != 3" in text.replace("\n        ", " ")


def test_a_module_that_an_index_takes_is_left(tmp_path: Path) -> None:
    """The last block of two is the second of three."""

    def use(file: Any) -> list[object]:
        model = file.Model(3)
        for number, norm in enumerate(model.norms):
            norm.weight.data.fill_(number + 1.0)
        return [model(drawn())]

    uses(
        tmp_path,
        """
        class Model(nn.Module):
            def __init__(self, count=2):
                super().__init__()
                self.norms = nn.ModuleList([nn.LayerNorm(1024) for _ in range(count)])
                self.lin = nn.Linear(1024, 1024)

            def forward(self, x):
                y = self.norms[-1](torch.tanh(self.lin(x) * 2.0))
                return y + torch.sigmoid(x) * 3.0
        """,
        use,
    )


def test_a_write_into_an_argument_is_left(tmp_path: Path) -> None:
    def use(file: Any) -> list[object]:
        given, more = drawn(), drawn()
        return [file.Block()(given, more), given, file.Model()(more)]

    text = uses(
        tmp_path,
        """
        class Block(nn.Module):
            def forward(self, x, h):
                x += h
                own = torch.tanh(x) * 2.0
                own += h
                return own

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.block, self.lin = Block(), nn.Linear(1024, 1024)

            def forward(self, x):
                return self.block(self.lin(x), x) @ x.transpose(-1, -2)
        """,
        use,
        everywhere=True,
    )
    assert "x += h" in text
    assert "fused_model.tanh_mul_add_or_eager(x, h)" in text


def test_numbers_that_are_no_plain_ones_stay_as_they_are_then(tmp_path: Path) -> None:
    """NumPy's, members of enums, private attributes, and what a closure binds anew."""

    def use(file: Any) -> list[object]:
        model = file.Model()
        model.act = file.counting()
        results = [model(drawn()), model(drawn())]
        model.number, model.member, model.word = (
            file.np.float32(3.5),
            file.Rate.HIGH,
            file.Kind.HARD,
        )
        model._Model__eps = 0.125
        return [*results, model(drawn())]

    text = uses(
        tmp_path,
        """
        import enum
        import numpy as np

        class Rate(float, enum.Enum):
            LOW, HIGH = 2.0, 3.0

        class Kind(enum.Enum):
            SOFT, HARD = 0.25, 4.0

        def counting():
            count = 1.0

            def act(x):
                nonlocal count
                count = count + 1.0
                return torch.tanh(x) * count

            return act

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.lin, self.act = nn.Linear(1024, 1024), counting()
                self.number, self.member, self.word = np.float32(2.5), Rate.LOW, Kind.SOFT
                self.__eps = 0.5

            def forward(self, x):
                y = torch.tanh(self.lin(x) * self.number) + x
                y = torch.sigmoid(self.lin(y) * self.member) + x
                y = torch.sigmoid(self.lin(y) * self.word.value) + x
                y = torch.exp(self.lin(y) * self.__eps) + x
                return self.act(self.lin(y)) + x
        """,
        use,
    )
    assert "(self.lin(x), x, self.number)" in text
    assert "self.lin(y) * self.word.value" in text, "no guard asks for it"


def test_operands_of_several_dtypes_are_asked_one_by_one(tmp_path: Path) -> None:
    """A cast to a dtype that another tensor has launches nothing where both have one."""

    def use(file: Any) -> list[object]:
        results: list[object] = []
        for one, other in itertools.product((torch.float32, torch.bfloat16), repeat=2):
            model = file.Model()
            model.lin.to(one)
            model.proj.to(other)
            results.append(model(drawn().to(one)))
        return results

    uses(
        tmp_path,
        """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.lin, self.proj = nn.Linear(1024, 1024), nn.Linear(1024, 1024)

            def forward(self, x):
                y = torch.tanh(self.lin(x)).to(self.proj.weight.dtype) * 2.0
                return self.proj(y)
        """,
        use,
    )


def test_the_dtype_of_what_is_made_of_operands_is_theirs(tmp_path: Path) -> None:
    """A norm by hand of a sum: float32 of bfloat16, or of what is float32 already."""

    def use(file: Any) -> list[object]:
        model = file.Model()
        dtypes = itertools.product((torch.float32, torch.bfloat16), repeat=2)
        return [model(drawn().to(one), drawn().to(other)) for one, other in dtypes]

    text = uses(
        tmp_path,
        """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.weight = nn.Parameter(torch.rand(1024))

            def forward(self, x, y=None):
                x = x * 0.5 + (x if y is None else y)
                h = x.float()
                scale = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
                return (h * scale * (1.0 + self.weight)).to(x.dtype)
        """,
        use,
    )
    assert "if y is not None or (fused := mul_residual_rms_norm.or_none(x, self.weight))" in text, (
        "the launcher asks for their dtypes"
    )


def test_gradients_that_a_method_stops_are_stopped(tmp_path: Path) -> None:
    def use(file: Any) -> list[object]:
        model, given = file.Model(), drawn().requires_grad_()
        model(given).sum().backward()
        return [given.grad, model.lin.weight.grad]

    uses(
        tmp_path,
        """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.lin = nn.Linear(1024, 1024)

            @torch.no_grad()
            def stopped(self, x):
                return torch.sigmoid(x) * 3.0

            def forward(self, x):
                y = self.lin(x)
                y = self.stopped(y) + torch.tanh(y)
                z = self.lin(y.detach() * 2.0 + y)
                with torch.no_grad():
                    s = torch.exp(y) * 2
                return z * s + y.data * 3
        """,
        use,
    )


def test_none_and_tensors_in_place_of_numbers(tmp_path: Path) -> None:
    """What stands for a number is one, or eager runs: a parameter keeps its gradient."""

    def use(file: Any) -> list[object]:
        model, results = file.Model(), []
        for low, high in ((None, 0.5), (-0.25, None)):
            model.low, model.high = low, high
            results.append(model(drawn()))
        for scale in (torch.full((1024,), 0.3), torch.full((3, 1), 0.4), 2, True):
            model.scale = scale
            results.append(model(drawn()))
        model.scale = nn.Parameter(torch.tensor(0.2))
        model(drawn()).sum().backward()
        return [*results, model.scale.grad]

    text = uses(
        tmp_path,
        """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.lin = nn.Linear(1024, 1024)
                self.low, self.high, self.scale = -0.5, 1.0, 0.5

            def forward(self, x):
                y = torch.clamp(self.lin(x) * 2.0, min=self.low, max=self.high)
                y = torch.tanh(self.lin(y) * self.scale) + x
                return torch.sigmoid(self.lin(y) / self.scale) * x
        """,
        use,
    )
    assert "self.low, self.high)" in text
    assert "x, self.scale)" in text


def test_an_argument_that_is_left_out_later(tmp_path: Path) -> None:
    def use(file: Any) -> list[object]:
        model = file.Model()
        return [model(drawn(), drawn()), model(drawn())]

    text = uses(
        tmp_path,
        """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.lin = nn.Linear(1024, 1024)

            def forward(self, x, residual=None):
                y = torch.sigmoid(x + residual if residual is not None else x) * 2.0
                return self.lin(y)
        """,
        use,
        shape="8, 32, 1024), torch.empty(8, 32, 1024",
    )
    assert "residual is None" in text


def test_a_group_at_fault_is_left_out_and_the_others_are_put(tmp_path: Path) -> None:
    """Here the model cannot be captured where two of four kernels are called."""

    def capturing(model: str, *rest: Any) -> Graph:
        text = Path(model).read_text()
        for wrong in ("fused_model.exp_mul", "fused_model.sigmoid_mul"):
            if wrong in text:
                raise CaptureError(f"{wrong} is wrong")
        return capture(model, *rest)

    capture = captured_as_asked(Scenario())
    file = tmp_path / "model.py"
    file.write_text(HEAD + FOUR)
    request = Request(str(file), Scenario(), device="h200", verify=False, compile=False)
    patch = patch_model(request, tmp_path.resolve(), captured=capturing)
    assert patch.wrong == {}
    text = changed(patch)
    assert "fused_model.tanh_mul" in text
    assert "fused_model.softmax_or_eager" in text or "fused_model.mul_softmax" in text
    assert "exp(y) * 2.0" in text
    assert "sigmoid(y) * 2.0" in text
    whys = [left.why for left in patch.left]
    assert len(whys) == 2
    assert all(
        "with it the patched model is wrong" in why and "_mul is wrong" in why for why in whys
    )


FOUR = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(1024, 1024)

    def forward(self, x):
        y = self.lin(torch.tanh(x) * 2.0)
        y = self.lin(torch.exp(y) * 2.0)
        y = self.lin(torch.sigmoid(y) * 2.0)
        return torch.softmax(self.lin(y) * 2.0, -1)


def get_inputs():
    return [torch.empty(8, 32, 1024)]
"""


def seen_alike(module: Any) -> list[object]:
    """Results where operands have one shape, where one is broadcast, and with gradients."""
    model, found = module.Model().eval(), list[object]()
    for shape in [(2, 3, 1024), (2, 3, 1), (1, 1, 1024), (3, 1024), (1024,)]:
        x, y = drawn().requires_grad_(), drawn(*shape)
        result = model(x, y)
        result.sum().backward()
        found += [result.detach(), x.grad]
    return found


SIMILAR = """
class Model(nn.Module):
    def forward(self, x, y):
        return F.cosine_similarity(x * 0.5, y, dim=-1) * 2.0
"""


def test_operands_that_torch_broadcasts_first(tmp_path: Path) -> None:
    """The launches that were captured do not broadcast, for the operands had one shape."""
    text = uses(tmp_path, SIMILAR, seen_alike, shape="8, 32, 1024), torch.empty(8, 32, 1024")
    assert "size(" not in text, "the launcher asks"


def test_a_compiled_patch_compiles_the_statements_where_no_kernel_runs(tmp_path: Path) -> None:
    def use(module: Any) -> list[object]:
        model = module.Model().eval()
        module.__dict__["Model"] = lambda: torch.compile(model, backend="aot_eager", fullgraph=True)
        return seen_alike(module)

    uses(tmp_path, SIMILAR, use, shape="8, 32, 1024), torch.empty(8, 32, 1024")


def test_another_rank_where_torch_gave_sizes(tmp_path: Path) -> None:
    body = """
        class Model(nn.Module):
            def forward(self, x):
                return F.normalize(torch.tanh(x), dim=-1) * 2.0
        """

    def use(file: Any) -> list[object]:
        return [file.Model()(drawn(*shape)) for shape in [(4, 1024), (2, 2, 3, 1024)]]

    uses(tmp_path, body, use)


def test_a_tensor_for_a_number(tmp_path: Path) -> None:
    body = """
        class Model(nn.Module):
            def __init__(self, low=-0.5):
                super().__init__()
                self.low = low

            def forward(self, x):
                return torch.clamp(torch.tanh(x), self.low) * 2.0
        """
    uses(tmp_path, body, lambda m: [m.Model(torch.tensor(low))(drawn()) for low in (-0.5, 0.1)])


OPERANDS = """
class Model(nn.Module):
    def __init__(self, **chosen):
        super().__init__()
        self.norm, self.by = nn.LayerNorm(1024, **chosen), 0.5

    def forward(self, x, y):
        return self.norm(torch.tanh(x + y * self.by)) * 2.0
"""


def with_others(model: Any, x: torch.Tensor, y: Any) -> list[object]:
    """Results with a number for a tensor, and with a tensor for a number that the model holds."""
    found = [model(x, y), model(x, 2.0)]
    model.by = torch.tensor(0.5)
    return [*found, model(x, y)]


def test_numbers_and_nothing_in_place_of_tensors(tmp_path: Path) -> None:
    """A norm without weights, and a number that is added where the capture had a tensor."""

    def use(module: Any) -> list[object]:
        without, x, y = module.Model(elementwise_affine=False).eval(), drawn(), drawn()
        return [*with_others(without, x, y), *with_others(module.Model().eval(), x, y)]

    uses(tmp_path, OPERANDS, use, shape="8, 32, 1024), torch.empty(8, 32, 1024")


def test_tensors_in_place_of_numbers_are_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where kernels could run, tracers ask the same."""

    def use(module: Any) -> list[object]:
        x, y, found = drawn(), drawn(), list[object]()
        held, without = module.Model().eval(), module.Model(elementwise_affine=False).eval()
        held.by = nn.Parameter(torch.tensor(0.5))
        for model in (held, without):
            with torch.no_grad():
                found.append(torch.export.export(model, (x, y), strict=False).module()(x, y))
        return found

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    uses(tmp_path, OPERANDS, use, shape="8, 32, 1024), torch.empty(8, 32, 1024")


def test_what_torch_func_transforms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors have a dimension more than they show there, or no place in memory."""

    def use(module: Any) -> list[object]:
        model, x, y = module.Model().eval().requires_grad_(False), drawn(), drawn()
        scaled = torch.func.grad(lambda by: (model(x, y * 2.0) * by).sum())
        return [torch.vmap(model)(x, y), scaled(drawn(1024))]

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    uses(tmp_path, OPERANDS, use, shape="8, 32, 1024), torch.empty(8, 32, 1024")


def test_a_dropout_in_an_operand_is_not_asked(tmp_path: Path) -> None:
    """It stays where it was; and what holds it may be another module later."""
    body = """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm = nn.LayerNorm(1024)
                self.mlp = nn.Sequential(
                    nn.Linear(1024, 64), nn.Dropout(0.1), nn.Linear(64, 1024)
                )

            def forward(self, x, y):
                return x + y * self.mlp(self.norm(x) * (1 + y) + x)
        """

    def use(module: Any) -> list[object]:
        model, x, y = module.Model(), drawn(), drawn()
        torch.manual_seed(1)
        found = [model(x, y), model.eval()(x, y)]
        model.mlp = nn.Identity()
        return [*found, model(x, y)]

    text = uses(tmp_path, body, use, shape="8, 32, 1024), torch.empty(8, 32, 1024")
    assert ".training" not in text


CHANNELS = """
class Block(nn.Module):
    def __init__(self, width, out):
        super().__init__()
        self.norm, self.out = nn.GroupNorm(8, width), nn.Conv2d(width, out, 1)

    def forward(self, x):
        h = self.norm(x)
        return self.out(h * torch.sigmoid(h))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = Block(64, 128), Block(128, 64)

    def forward(self, x):
        return self.two(self.one(x))
"""


def test_kernels_that_are_chosen_by_size_leave_the_rest_to_the_statements(tmp_path: Path) -> None:
    """A weight whose elements lie apart: torch's function copies it first, and its op does not."""

    def use(module: Any) -> list[object]:
        model, found = module.Model().eval(), list[object]()
        for norm in (model.one.norm, model.two.norm):
            norm.weight = nn.Parameter(torch.stack([torch.rand(norm.num_channels)] * 2, -1)[..., 0])
        found.append(model(drawn(2, 64, 5, 3)))
        model.one.norm.weight = None
        return [*found, model(drawn(2, 64, 5, 3))]

    text = uses(tmp_path, CHANNELS, use, shape="8, 64, 32, 32")
    chosen = text.partition('"""The same computation, by sizes and strides."""')[2]
    assert chosen.partition("\n\n\n")[0].count(".or_none(") == 2


LOOP = """
        for fc in self.fc:
            x = torch.tanh(fc(x)) * 2.0
            if scale is None:
                {}
            x = x * (1 + scale) + 0.5
        return x
    """
JUMPS = {
    "a loop that goes on": LOOP.format("continue"),
    "a loop that ends": LOOP.format("break"),
    "an early return of a result": """
        x = 3.0 * torch.tanh(self.fc[0](x) / 3.0)
        if scale is None:
            return x
        return x, (F.softmax(x, -1) * scale).sum(-1)
    """,
    "an error": """
        x = 3.0 * torch.tanh(self.fc[0](x) / 3.0)
        if scale is None:
            raise ValueError("no scale")
        return x, torch.sigmoid(x) * scale
    """,
    "an early return of something else": """
        y = torch.tanh(self.fc[0](x)) + 1.0
        if scale is None:
            return x
        return y * torch.sigmoid(scale)
    """,
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", JUMPS)
def test_what_leaves_a_block_is_not_passed(name: str, tmp_path: Path) -> None:
    def use(file: Any) -> list[object]:
        model, found = file.Model(), list[object]()
        for scale in (None, drawn()):
            try:
                made = model(drawn(), scale)
                found += made if isinstance(made, tuple) else [made]
            except ValueError as error:
                found.append(str(error))
        return found

    forward = JUMPS[name].replace("\n", "\n        ")
    uses(
        tmp_path,
        f"""
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.fc = nn.ModuleList([nn.Linear(1024, 1024) for _ in range(2)])

            def forward(self, x, scale=None):{forward}
        """,
        use,
        inputs=2,
    )


def test_hooks_of_a_module_whose_call_goes_run(tmp_path: Path) -> None:
    def use(file: Any) -> list[object]:
        found = list[object]()
        for attribute in ("norm", "act"):
            model, calls = file.Model(), list[str]()

            def before(*_: object, calls: list[str] = calls) -> None:
                calls.append("before")

            def behind(_: object, given: object, made: Any) -> Any:
                return made * 1.5

            module = getattr(model, attribute)
            module.register_forward_pre_hook(before)
            module.register_forward_hook(behind)
            found += [model(drawn()), calls]
        return found

    text = uses(
        tmp_path,
        """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm, self.act = nn.LayerNorm(1024), nn.GELU()

            def forward(self, x):
                return self.act(self.norm(x)) * 2.0 + x
        """,
        use,
    )
    assert "or norm._forward_hooks\n        or norm._forward_pre_hooks" in text


@pytest.mark.parametrize("view", ["flatten(0, 1)", "unflatten(-1, (8, 128))"])
def test_what_is_seen_of_a_result_is_seen_of_it_still(view: str, tmp_path: Path) -> None:
    """The statements of the function beside the kernels see it, too."""

    def use(file: Any) -> list[object]:
        return [
            each for shape in ((2, 3, 1024), (1, 7, 1024)) for each in file.Model()(drawn(*shape))
        ]

    text = uses(
        tmp_path,
        f"""
        class Model(nn.Module):
            def forward(self, x):
                x = torch.tanh(x[:, 1:]).mul(2.0).{view}
                lse = torch.logsumexp(x, -1)
                return x.sort(-1).values, lse
        """,
        use,
    )
    assert f".{view}" in text
    assert "_or_eager(x[:, 1:])" in text, text


def test_a_run_in_which_two_operands_are_one_tensor_keeps_its_statements(tmp_path: Path) -> None:
    """A cross network, whose first layer crosses its input with itself."""

    def use(file: Any) -> list[object]:
        model, x = file.Model(), drawn()
        return [model(x), model.layers[0](x, x), model.layers[0](x, x + 1.0)]

    text = uses(
        tmp_path,
        """
        class Cross(nn.Module):
            def __init__(self):
                super().__init__()
                self.lin = nn.Linear(1024, 1024)

            def forward(self, x0, x):
                return x0 * torch.tanh(self.lin(x)) + x

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = nn.ModuleList(Cross() for _ in range(3))

            def forward(self, x0):
                x = x0
                for layer in self.layers:
                    x = layer(x0, x)
                return x
        """,
        use,
    )
    assert "if x0 is x or (fused :=" in text


def test_runs_of_which_some_ask_whether_there_is_a_bias_ask_alike(tmp_path: Path) -> None:
    """Of one of these norms the class of the model says that it has one."""

    def use(file: Any) -> list[object]:
        model, other, x = file.Model(), file.Model(), drawn()
        other.one, other.more[0] = file.Soft(1024, bias=False), file.Soft(1024, 1e-3, False)
        return [model(x), other(x)]

    text = uses(
        tmp_path,
        """
        class Soft(nn.LayerNorm):
            def forward(self, x):
                return torch.tanh(super().forward(x))

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.lin, self.one = nn.Linear(1024, 1024), Soft(1024)
                more = [Soft(1024), Soft(1024)]
                self.more = nn.ModuleList(more)

            def forward(self, x):
                x = self.one(self.lin(x))
                for norm in self.more:
                    x = norm(self.lin(x))
                return x
        """,
        use,
    )
    assert "fused_model.layer_norm_tanh_or_eager(x, " in text
    assert "or bias is None" in text, text


def test_a_number_made_of_a_size_and_of_the_configuration_is_asked(tmp_path: Path) -> None:
    """The kernel serves one size, which says the number for one configuration alone."""

    def use(file: Any) -> list[object]:
        model, x = file.Model(), torch.arange(4096)
        found = [model(x)]
        model.factor = 0.25
        return [*found, model(x)]

    text = uses(
        tmp_path,
        """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.factor = 0.5

            def capacity(self, count):
                return int(count * self.factor)

            def forward(self, x):
                cap = self.capacity(x.size(0))
                return torch.where(x - 1 < cap, x * cap + 1, 7 * cap)
        """,
        use,
        shape="4096, dtype=torch.int64",
        resized=True,
    )
    assert "cap != 2048" in text


def test_a_size_is_asked_of_what_has_that_dimension(tmp_path: Path) -> None:
    """A size chooses one of several kernels, and another one is asked of what may have fewer
    dimensions."""

    def use(file: Any) -> list[object]:
        return [file.Norm(64)(drawn(64)), file.Power()(drawn(8)), file.Norm(64)(drawn(5, 64))]

    text = uses(
        tmp_path,
        """
        class Power(nn.Module):
            def forward(self, x):
                return torch.tanh(x) ** x.size(-1) + 1.0

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.one, self.two, self.power = Norm(1024), Norm(512), Power()
                self.down, self.up = nn.Linear(1024, 512), nn.Linear(512, 64)

            def forward(self, x):
                y = self.down(self.one(x)).transpose(1, 2)
                return self.power(self.up(self.two(y)))
        """,
        use,
        shape="8, 512, 1024",
        everywhere=True,
    )
    assert "if not x.is_contiguous():" in text, text
    assert "or x.dim() < 1\n        or x.size(-1) != 64" in text, text


def test_a_norm_without_weight_and_bias_may_get_them(tmp_path: Path) -> None:
    """The class says that it has none; its object may be given another norm."""

    def use(file: Any) -> list[object]:
        model, x = file.Model(), drawn()
        found = [model(x)]
        model.norm = nn.LayerNorm(1024)
        nn.init.constant_(model.norm.weight, 3.0)
        return [*found, model(x)]

    text = uses(
        tmp_path,
        """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm = nn.LayerNorm(1024, elementwise_affine=False)

            def forward(self, x):
                return torch.tanh(self.norm(x)) * 2.0
        """,
        use,
    )
    assert "norm.weight is not None\n        or norm.bias is not None" in text, text


def test_a_module_of_another_class_lacks_what_a_guard_reads(tmp_path: Path) -> None:
    """Its class is asked before its methods, its flags and its parts."""

    def use(file: Any) -> list[object]:
        model, found = file.Model(), list[object]()
        for block in (nn.Identity(), nn.Tanh(), file.Block()):
            model.block = block
            found.append(model(drawn()))
        model.block.norm = nn.Identity()
        return [*found, model(drawn())]

    text = uses(
        tmp_path,
        """
        class Half(nn.Module):
            def _norm(self, x):
                return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

            def forward(self, x):
                return self._norm(x) * 0.5

        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm, self.drop, self.twice = Half(), nn.Dropout(0.5), True

            def forward(self, x):
                x = self.drop(self.norm(x))
                if self.twice:
                    x = x * 2.0
                return x

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.block, self.lin = Block(), nn.Linear(1024, 1024)

            def forward(self, x):
                return self.block(self.lin(x)) + x
        """,
        use,
    )
    assert text.index("block.forward") < text.index("block.norm"), text


def test_a_dropout_in_an_operand_is_called_once(tmp_path: Path) -> None:
    """Another module in its place may draw at each call."""

    def use(file: Any) -> list[object]:
        class Drawing(nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return torch.dropout(x, 0.3, True)

        model, calls, x = file.Model(), list[str](), drawn()
        model.drop.register_forward_hook(lambda *_: calls.append("called"))
        found = [*model(x), len(calls)]
        model.drop = Drawing()
        torch.manual_seed(1)
        return [*found, *model(x)]

    text = uses(
        tmp_path,
        """
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.drop, self.lin, self.norm = nn.Dropout(0.5), nn.Linear(1024, 1024), Norm(1024)

            def forward(self, x):
                y = self.lin(x)
                x = x + self.drop(y)
                return x, self.norm(x)
        """,
        use,
    )
    assert "_or_eager(x, self.drop(y), self.norm)" in text, text


def test_a_module_that_launched_nothing_is_asked_for(tmp_path: Path) -> None:
    """A dropout in eval, within what is called, may be another module, or have a hook."""

    def use(file: Any) -> list[object]:
        model, hooked, x = file.Model(), file.Model(), drawn()
        model.block.drop = nn.Tanh()
        hooked.rest[0].register_forward_hook(lambda *of: of[2] * 2.0)
        return [file.Model()(x), model(x), hooked(x)]

    text = uses(
        tmp_path,
        """
        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.drop = nn.Dropout(0.5)

            def forward(self, x):
                return self.drop(torch.tanh(x)) * 2.0

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.block, self.lin = Block(), nn.Linear(1024, 1024)
                self.rest = nn.Sequential(nn.Identity(), nn.Sigmoid())

            def forward(self, x):
                return self.rest(self.block(self.lin(x)) + x)
        """,
        use,
    )
    assert "type(block.drop) is not torch.nn.Dropout" in text, text
    assert "is not torch.nn.Identity" in text, text


SEQUENTIAL = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1024, 1024), nn.Tanh(), nn.Sigmoid(){more})

    def forward(self, x):
        {forward}
"""
CHAINS = {
    "within": (", nn.Linear(1024, 1024)", "return self.net(x)"),
    "beyond": ("", "return self.net(x * 2.0) + x"),
    "whole": ("", "y = self.net[0](x)\n        return self.act(y) + x"),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CHAINS)
def test_a_sequential_may_run_otherwise(name: str, tmp_path: Path) -> None:
    """It has a hook, holds another module more, or is another one."""

    def use(file: Any) -> list[object]:
        found, x = list[object](), drawn()
        for change in range(4):
            torch.manual_seed(change)
            model = file.Model()
            net = model.net if name != "whole" else model.act
            if change == 1:
                net.register_forward_hook(lambda *of: of[2] * 100.0)
            elif change == 2:
                net.append(nn.Tanh())
            elif change == 3:
                model.net = nn.Sequential(nn.Linear(1024, 1024), nn.Tanh())
                model.act = nn.Tanh()
            found.append(model(x))
        return found

    more, forward = CHAINS[name]
    body = SEQUENTIAL.format(more=more, forward=forward)
    act = "self.act = nn.Sequential(nn.Tanh(), nn.Sigmoid())\n\n    def forward"
    text = uses(tmp_path, body.replace("\n    def forward", f"        {act}"), use)
    assert "is not torch.nn.Sequential" in text, text
    assert "fused_model.net_in_parts(self.net, x)" in text or name == "whole", text


def test_what_a_call_leaves_out_is_not_asked(tmp_path: Path) -> None:
    """A default says what a condition is, and a later call of the same text has it, too."""

    def use(file: Any) -> list[object]:
        return [file.Model()(drawn())]

    text = uses(
        tmp_path,
        """
        def gated(x, mask=None):
            if mask is not None:
                x = x * mask
            return torch.tanh(x) * torch.sigmoid(x)

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.lin = nn.Linear(1024, 1024)

            def forward(self, x):
                return gated(self.lin(x)) + x
        """,
        use,
    )
    assert "return fused_model.tanh_sigmoid_mul_add(self.lin(x), x)" in text, text
    assert "None is not None" not in text, text


def test_an_operator_of_python_raises_its_own_error(tmp_path: Path) -> None:
    def use(file: Any) -> list[object]:
        model, x = file.Model(), drawn(2, 32, 1024)
        found = [model(x)]
        model.valid = model.valid.float()
        with pytest.raises(TypeError) as raised:  # where the op raises NotImplementedError
            model(x)
        return [*found, str(raised.value)]

    text = uses(
        tmp_path,
        """
        def held(x, valid):
            return torch.tanh(x).masked_fill(~valid, -1.0)

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("valid", torch.rand(32, 1024) > 0.5)

            def forward(self, x):
                return held(x, self.valid)
        """,
        use,
    )
    assert "masked_fill(~valid, -1.0)" in text


def test_a_norm_without_weights_serves_other_widths(tmp_path: Path) -> None:
    """What it has to be for is the size of what it is given."""
    patch = made(
        tmp_path,
        """
        class Model(nn.Module):
            def __init__(self, width=1024):
                super().__init__()
                self.norm = nn.LayerNorm(width, elementwise_affine=False)

            def forward(self, x, scale):
                return self.norm(x) * (1 + scale)
        """,
        count=2,
        resized=True,
    )
    assert "norm.normalized_shape != (x.size(-1),)" in asking(patch)
    assert "1024" not in asking(patch)
