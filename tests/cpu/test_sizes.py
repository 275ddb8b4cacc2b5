"""Sizes that become numbers in torch or in Python: a patched model is the original at other sizes,
or the place is left with its reason; an emitted file does not serve sizes that it was not made for.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fusion_advisor.codegen.emit import emit
from fusion_advisor.cost.dataflow import dataflow
from fusion_advisor.frontend.child import capture_module
from fusion_advisor.fusion.findings import fuse
from fusion_advisor.ir.scenario import Request, Scenario, Sizes
from fusion_advisor.rulebook.load import load_rulebook
from fusion_advisor.shipped.load import load_module
from fusion_advisor.sourcepatch.trial import patched_copy
from fusion_advisor.workflows.patch import Patched, patch_model

from .in_process import captured, captured_as_asked

pytestmark = pytest.mark.usefixtures("ways")

REASON = "a size became a number there"

GLU = """
import torch
import torch.nn.functional as F


def glu(x):
    a, b = x.chunk(2, dim=-1)
    return a * torch.sigmoid(b)


class Model(torch.nn.Module):
    def forward(self, x):
        return glu(x * 2 + 1)


def get_inputs():
    return [torch.randn(4096, 2048)]
"""

SCALED = """
import torch
import torch.nn.functional as F


class Model(torch.nn.Module):
    def __init__(self, width, parts):
        super().__init__()
        self.weight, self.parts = torch.nn.Parameter(torch.ones(width)), {held}

    def forward(self, x):
        return {body}


def get_init_inputs():
    return [1024, 4]


def get_inputs():
    return [torch.randn(4096, 1024)]
"""

FORWARD = """
import torch
import torch.nn.functional as F


class Model(torch.nn.Module):
    def forward(self, x):
        {body}


def get_inputs():
    return [torch.randn({shape})]
"""


def made(folder: Path, text: str) -> Patched:
    """The patch of a file with a model, kernels unchecked; it has to hold."""
    file = folder / "model.py"
    file.write_text(text)
    request = Request(str(file), device="h200", verify=False, compile=False)
    capture = captured_as_asked(request.scenario, resized=True)
    patch = patch_model(request, folder.resolve(), captured=capture)
    assert patch.wrong == {}
    return patch


def reasons(patch: Patched) -> str:
    return "\n".join([*patch.unplaced.values(), *patch.patch.refused.values()])


def loaded(file: Path, *given: float) -> torch.nn.Module:
    """The model of a file, always with the same weights; where there is no GPU its kernels run as
    their references."""
    torch.manual_seed(0)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(file.parent))
        try:
            return load_module(file.read_text(), file.parent).Model(*given)
        finally:
            for name in [name for name in sys.modules if name.startswith("fused_model")]:
                del sys.modules[name]


def assert_same(
    patch: Patched, folder: Path, shapes: Sequence[tuple[int, ...]], *given: float
) -> None:
    """Where the original runs at a size the patched model gives its shape and numbers."""
    assert_same_for(patch, folder, [(torch.randn(shape),) for shape in shapes], *given)


def assert_same_for(
    patch: Patched, folder: Path, inputs: Sequence[tuple[torch.Tensor, ...]], *given: float
) -> None:
    """As `assert_same`, of whole inputs."""
    original = loaded(folder / "model.py", *given)
    if not patch.diff:
        return
    with patched_copy(patch.diff, patch.patch.after, folder.resolve()) as copy:
        edited = loaded(copy / "model.py", *given)
        ran = 0
        for each in inputs:
            with torch.no_grad(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    wanted = original(*each)
                except (RuntimeError, ValueError, ArithmeticError):  # it does not take that
                    continue
                found = edited(*each)
            assert found.shape == wanted.shape
            torch.testing.assert_close(found, wanted, equal_nan=True)
            ran += 1
        assert ran > 1, "the sizes show something"


def test_the_patched_model_is_the_original_at_other_widths(tmp_path: Path) -> None:
    """The chunk of a width has a number of it: the kernel serves that width, and a guard asks."""
    patch = made(tmp_path, GLU)
    assert 'host.held_to("x", x, 1, 2048)' in patch.diff
    assert not patch.patch.refused
    assert_same(patch, tmp_path, [(4, 4096), (4, 1024), (4, 2048), (1, 2), (1, 2048), (3, 6)])
    assert {"at 2048 x 1024", "at 1 x 2048"} <= {*patch.tried}


QUICK = {
    "chunk": ("a, b = (x + 1).chunk(2, 1); return a * torch.sigmoid(b)", "512, 1024"),
    "mean by hand": ("return torch.exp(x - x.sum(-1, keepdim=True) / x.shape[-1])", "512, 1024"),
    "computed view": (
        "y = torch.tanh(x + 1); return (y.view(y.shape[0], 2, y.shape[1] // 2) * 2).sum(1)",
        "512, 1024",
    ),
    "roll and an op with an empty result": (
        "return F.logsigmoid(torch.roll(x, (1, -2), (2, 3))) * 2 + 1",
        "8, 4, 64, 64",
    ),
}
DEEP = {
    "unflatten": ("return torch.tanh(x + 1).unflatten(-1, (4, -1)).softmax(-1) * 2", "512, 1024"),
    "repeat": ("y = torch.exp(x) + 1; return y.repeat(1, 2) * torch.sigmoid(y.sum())", "512, 1024"),
    "arange": ("return torch.exp(x) * torch.arange(x.shape[1]) + 1", "512, 1024"),
    "arange of another": ("return torch.exp(x) + 1 + torch.arange(x.shape[0]).sum()", "512, 1024"),
    "expand": (
        "y = torch.exp(x.sum(1, keepdim=True)); return y.expand(-1, x.shape[1]) + torch.tanh(x)",
        "512, 1024",
    ),
    "interpolate": ("return torch.exp(F.interpolate(x + 1, scale_factor=2) * 2)", "8, 4, 64, 64"),
    "interpolate to a size": (
        "return torch.exp(F.interpolate(x + 1, (x.shape[2] * 2, x.shape[3] * 2)) * 2)",
        "8, 4, 64, 64",
    ),
    "pool": ("return torch.tanh(F.adaptive_avg_pool2d(torch.exp(x), 4) + 1)", "8, 4, 64, 64"),
    "pool to a size": (
        "return torch.tanh(F.adaptive_avg_pool2d(torch.exp(x), x.shape[-1] // 2) + 1)",
        "8, 4, 64, 64",
    ),
    "slice": (
        "h = x.shape[-1] // 2; y = x + 1; return y[:, :h] * torch.tanh(y[:, h:])",
        "512, 1024",
    ),
    "narrow": ("y = torch.exp(x); return y.narrow(1, x.shape[1] // 4, 8) * 2 + 1", "512, 1024"),
    "literal slice": ("y = x + 1; return torch.tanh(y[:, :64]) * y[:, 64:128]", "512, 1024"),
    "scale": ("return torch.softmax(torch.exp(x) * x.shape[-1] ** -0.5, -1)", "512, 1024"),
    "variance": ("return (x - x.mean(-1, keepdim=True)) / (x.shape[-1] - 1)", "512, 1024"),
    "window": ("return torch.exp(x + 1).unfold(1, x.shape[1] // 4, 2).sum(-1) * 2", "64, 256"),
    "pad": ("return F.pad(torch.exp(x), (0, x.shape[1])) * 2 + 1", "512, 1024"),
    "row of one": ("return torch.tanh(x).view(1, 2, -1) * 2 + 1", "1, 4096"),
}  # fmt: skip
SHAPES = {
    2: [(1, 1024), (3, 512), (5, 2048), (2, 16), (4, 1), (7, 48), (512, 1024), (512, 130)],
    4: [(1, 4, 64, 64), (2, 3, 32, 16), (1, 1, 8, 8), (2, 4, 64, 32), (2, 4, 65, 66)],
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.deep) for name in DEEP)]
)
def test_a_size_that_becomes_a_number(tmp_path: Path, name: str) -> None:
    """The patched model is the original at other sizes, or the place is left with its reason."""
    body, shape = (QUICK | DEEP)[name]
    patch = made(tmp_path, FORWARD.format(body=body.replace("; ", "\n        "), shape=shape))
    assert patch.diff or REASON in reasons(patch)
    assert_same(patch, tmp_path, SHAPES[len(shape.split(", "))])


@pytest.mark.deep
def test_a_cut_that_cuts_nothing_off_yet(tmp_path: Path) -> None:
    """torch leaves out a slice up to an end that is all, and has it at larger sizes again."""
    body = "y = torch.exp(x)[:, :1024]\n        return torch.tanh(y) * 2 + 1"
    patch = made(tmp_path, FORWARD.format(body=body, shape="512, 1024"))
    assert "x.size(1) != 1024" in patch.diff
    assert_same(patch, tmp_path, [(512, 1024), (4, 512), (4, 2048), (4, 1025)])


def test_a_cut_far_beyond_what_is_there(tmp_path: Path) -> None:
    """Its number is in no size that is tried, and is kept: beyond it the reference runs."""
    body = "y = torch.exp(x)[:, :4096]\n        return torch.tanh(y) * 2 + 1"
    patch = made(tmp_path, FORWARD.format(body=body, shape="512, 1024"))
    assert "torch.ops.aten.slice.Tensor(y, 1, 0, 4096)" in patch.diff
    assert "(n0, 1024), (1024, 1)" in patch.diff, "it serves the size that was seen"
    assert_same(patch, tmp_path, [(512, 1024), (4, 512), (4, 8192), (4, 4097)])


ODD = """if x.shape[1] % 2 == 0:
            raise ValueError("odd widths alone")
        y = torch.exp(x).view(x.shape[0], 3, -1)
        return torch.tanh(y) * 2 + y.sum(1, True)"""


def test_sizes_that_were_not_tried_are_asked_for(tmp_path: Path) -> None:
    """A model that takes odd multiples of 3 was seen at one width; the kernel serves that one."""
    patch = made(tmp_path, FORWARD.format(body=ODD, shape="512, 9"))
    assert 'host.held_to("x", x, 1, 9)' in patch.diff
    assert_same(patch, tmp_path, [(512, 9), (4, 9), (4, 15), (1, 21), (7, 27)])


SHARED = """
import torch
import torch.nn.functional as F


class Model(torch.nn.Module):
    def forward(self, x, y):
        {body}


def get_inputs():
    return [{drawn}]
"""
ROTATED = (
    "x = F.rms_norm(x, (64,)); p, q = x[..., ::2], x[..., 1::2]; y = y[None, None]; "
    "return torch.stack((p * y - q * y, q * y + p * y), -1).flatten(-2).bfloat16()"
)
TOWARDS = "z = x * y; return F.leaky_relu(F.normalize(z, dim=-1), 0.1)"
LOSS = "return -F.log_softmax(x, -1).gather(1, y[:, None]).squeeze(1)"


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("body", "shapes", "others"),
    [
        (ROTATED, ((4, 8, 128, 64), (128, 32)), [((4, 8, 1, 64), (128, 32))]),
        (TOWARDS, ((64, 8, 128), (64, 8, 128)), [((1, 8, 128), (64, 8, 128)), ((64, 8, 1),) * 2]),
        (LOSS, ((512, 320), (512,)), [((7, 320), (6,)), ((6, 320), (1,)), ((6, 320), (0,))]),
    ],
    ids=["view of what was broadcast", "expanded towards a result", "fewer targets than rows"],
)
def test_inputs_that_share_a_size_and_differ_in_it(
    tmp_path: Path,
    body: str,
    shapes: tuple[tuple[int, ...], ...],
    others: list[tuple[tuple[int, ...], ...]],
) -> None:
    """The size of one input is not that of the result: eager broadcasts it, or takes a part."""

    def drawn(shape: tuple[int, ...]) -> str:
        randint = len(shape) == 1
        return f"torch.randint(0, 8, {shape})" if randint else f"torch.randn({shape})"

    body = body.replace("; ", "\n        ")
    text = SHARED.format(body=body, drawn=", ".join(map(drawn, shapes)))
    patch = made(tmp_path, text)
    assert patch.diff, reasons(patch)
    inputs = [
        tuple(
            torch.randint(0, 8, shape) if len(shape) == 1 else torch.randn(shape) for shape in each
        )
        for each in (shapes, *others)
    ]
    assert_same_for(patch, tmp_path, inputs)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("held", "body", "asked", "refused"),
    [
        ("None", "torch.tanh((torch.exp(x) * self.weight).chunk(2, -1)[0])",
         ", weight, 0, 1024)", ""),
        ("parts", "torch.exp(x * self.weight) * self.parts + 1", "self.weight, self.parts)", ""),
        ("None", "F.normalize(torch.exp(x) * self.weight, dim=-1) * 2", "(x, self.weight)", ""),
        ("torch.nn.Parameter(torch.ones(parts))",
         "torch.exp(torch.exp(x).sum(-1, True)).expand(-1, len(self.parts)) + 1",
         "", "(-1, len(self.parts))` ("),
    ],
    ids=["a weight is asked", "a number is given", "a size that is given", "one that is not given"],
)  # fmt: skip
def test_a_number_of_the_configuration(
    tmp_path: Path, held: str, body: str, asked: str, refused: str
) -> None:
    """What a factory is given is varied, too: kernels are given what the model holds of it, and
    read sizes off what they take, or a guard asks these."""
    patch = made(tmp_path, SCALED.format(held=held, body=body))
    assert_same(patch, tmp_path, [(4, 1024), (1, 1024), (4, 24)], 1024, 4)
    assert_same(patch, tmp_path, [(4, 512), (1, 512), (4, 24)], 512, 2)
    assert asked in patch.diff
    assert refused in reasons(patch)
    assert (patch.saved_us == pytest.approx(patch.free_us)) == (not refused)
    assert any("in get_init_inputs()" in said for said in patch.tried)


WHOLE = {
    "halves that get names": (
        "p, q = x.exp().chunk(2, -1); "
        "return torch.cat((p * y[None] - q * y[None], q * y[None] + p * y[None]), -1) * 2",
        ((3, 96, 64), (96, 32)),
        [((3, 96, 64), (1, 32)), ((3, 96, 64), (96, 1)), ((3, 96, 48), (96, 24)), ((1, 5, 2),) * 2],
    ),
    "steps that get names": (
        "p, q = x.exp()[..., ::2], x.exp()[..., 1::2]; "
        "return torch.stack((p * y - q * y, q * y + p * y), -1).flatten(-2) * 2",
        ((3, 96, 64), (96, 32)),
        [((3, 96, 64), (96, 1)), ((3, 96, 48), (96, 24)), ((1, 1, 64), (1, 32))],
    ),
    "a part of a width": (
        "return F.cross_entropy(x, y.sigmoid(), label_smoothing=0.1, reduction='none') * 2",
        ((512, 320), (512, 320)),
        [((7, 320), (7, 320)), ((7, 160), (7, 160)), ((1, 1), (1, 1))],
    ),
    "a method of what is no kernel's": (
        "z = x.transpose(1, 2).contiguous(); return torch.sin(z) + z * y",
        ((3, 96, 64), (3, 64, 96)),
        [((3, 48, 64), (3, 64, 48)), ((1, 1, 64), (3, 64, 1)), ((2, 2, 2),) * 2],
    ),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("body", "shapes", "others"), WHOLE.values(), ids=WHOLE)
def test_what_is_one_kernel_is_one_call(
    tmp_path: Path,
    body: str,
    shapes: tuple[tuple[int, ...], ...],
    others: list[tuple[tuple[int, ...], ...]],
) -> None:
    """All that `analyze` takes together is put; numbers that hold at one size are asked for."""
    drawn = ", ".join(f"torch.randn({shape})" for shape in shapes)
    text = SHARED.format(body=body.replace("; ", "\n        "), drawn=drawn)
    patch = made(tmp_path, text)
    assert patch.saved_us == pytest.approx(patch.free_us), reasons(patch)
    inputs = [tuple(torch.randn(shape) for shape in each) for each in (shapes, *others)]
    assert_same_for(patch, tmp_path, inputs)


def kernels(model: torch.nn.Module, x: torch.Tensor, folder: Path) -> Iterator[Any]:
    """What `emit` writes for a model that was seen at one size, as loaded modules."""
    rulebook = load_rulebook()
    device = rulebook.device("h200")
    flow = dataflow(capture_module(model, (x,)), device)
    found = fuse(flow, rulebook)
    for finding in found.groups:
        kernel = emit(flow, finding.decision, finding.name, rulebook)
        yield getattr(load_module(kernel.text, folder), kernel.entry)


@pytest.mark.parametrize(
    "body",
    [
        "a, b = (x * 2 + 1).chunk(2, dim=-1)\n        return a * torch.sigmoid(b)",
        "return torch.exp(x - x.sum(-1, keepdim=True) / x.shape[-1])",
        "return torch.relu(x) / x.new_ones(x.shape).sum(-1, keepdim=True)",
    ],
    ids=["chunk", "mean by hand", "a sum over what is made"],
)
@pytest.mark.filterwarnings("ignore:.*running eager instead")
def test_an_emitted_file_refuses_a_size_that_is_a_number_in_it(tmp_path: Path, body: str) -> None:
    """Its reference holds the number, too, and may not run in its place."""
    (tmp_path / "model.py").write_text(FORWARD.format(body=body, shape="4096, 2048"))
    model = loaded(tmp_path / "model.py")
    (kernel,) = kernels(model, torch.empty(4096, 2048), tmp_path)
    x = torch.randn(8, 2048)
    torch.testing.assert_close(kernel(x), model(x))
    for width in (4096, 1024):
        with pytest.raises(ValueError, match=f"has {width} in dimension 1, and this was made for"):
            kernel(torch.randn(8, width))


HELPER = """
import torch
from torch import nn


def scaled(x):
    mean = x.mean(-1, keepdim=True)
    x = x - mean
    return x / torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


class Model(nn.Module):
    def __init__(self, wide, narrow):
        super().__init__()
        self.down, self.out = nn.Linear(wide, narrow), nn.Linear(narrow, 8)

    def forward(self, x):
        return scaled(self.out(scaled(self.down(scaled(x)))))


def get_init_inputs():
    return [2048, 512]


def get_inputs():
    return [torch.randn(4096, 2048)]
"""


def test_one_kernel_serves_a_helper_at_every_width(tmp_path: Path) -> None:
    """A helper has one text: the kernel of its longest rows stands there for all that it is given,
    rows too short for a group of their own included."""
    patch = made(tmp_path, HELPER)
    assert patch.patch.refused == {}
    assert len({put.kernel for put in patch.patch.puts}) == 1
    assert sum(put.occurrences for put in patch.patch.puts) >= 2
    assert len({put.finding.id for put in patch.patch.puts}) == len(patch.patch.puts) >= 2
    assert len([path for path in patch.patch.after if path.stem.startswith("layer_norm")]) == 1
    assert_same(patch, tmp_path, [(5, 2048), (1, 2048)], 2048, 512)
    assert_same(patch, tmp_path, [(5, 96), (1, 96)], 96, 1)


HEADS = """
import torch
from torch import nn


class Norm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.down = nn.Linear(width, width)
        self.n1, self.n2 = Norm(width), Norm(width // 4)

    def forward(self, x):
        y = self.down(self.n1(x))
        return self.n2(y.unflatten(-1, (4, -1)))


def get_init_inputs():
    return [1024]


def get_inputs():
    return [torch.randn(8, 512, 1024)]
"""


@pytest.mark.deep
def test_a_module_of_rows_and_of_their_heads(tmp_path: Path) -> None:
    """A reference reads no size because a tensor is called `n1`: two norms are the same."""
    patch = made(tmp_path, HEADS)
    assert patch.saved_us == pytest.approx(patch.free_us), reasons(patch)
    assert_same(patch, tmp_path, [(5, 3, 1024), (1, 1, 1024)], 1024)
    assert_same(patch, tmp_path, [(5, 3, 96), (1, 1, 96)], 96)


CHANNELS = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width, out):
        super().__init__()
        self.norm = nn.GroupNorm(8, width)
        self.out = nn.Conv2d(width, out, 1)

    def forward(self, x):
        h = self.norm(x)
        return self.out(h * torch.sigmoid(h))


class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.one, self.two = Block(width, 2 * width), Block(2 * width, 2 * width)
        self.three = Block(width, width)

    def forward(self, x):
        x = self.two(self.one(x))
        return self.three(x[:, ::2])


def get_init_inputs():
    return [64]


def get_inputs():
    return [torch.randn(8, 64, 64, 64)]
"""


@pytest.mark.deep
def test_kernels_of_one_text_are_chosen_by_what_they_are_given(tmp_path: Path) -> None:
    """A group norm's kernel holds its channels, and eager copies what lies out of order: three
    calls of one text need three kernels."""
    patch = made(tmp_path, CHANNELS)
    assert patch.patch.refused == {}
    assert len({put.kernel for put in patch.patch.puts}) == 3, reasons(patch)
    asking = next(t for path, t in patch.patch.after.items() if path.name == "or_eager.py")
    assert ".dim() >= 2 and " in asking
    assert ".is_contiguous():" in asking
    assert "num_channels" not in asking, "a size, which the kernel reads off its tensor"
    assert_same(patch, tmp_path, [(2, 64, 4, 6), (1, 64, 1, 3)], 64)
    assert_same(patch, tmp_path, [(2, 16, 4, 6), (1, 16, 1, 3)], 16)


INHERITED = """
import torch
from torch import nn


class Norm(nn.LayerNorm):
    def forward(self, x):
        return super().forward(x.float()).type(x.dtype)


class Model(nn.Module):
    def __init__(self, eps=1e-5):
        super().__init__()
        self.norm = Norm(1024, eps=eps)

    def forward(self, x):
        y = self.norm(x)
        return y * torch.sigmoid(y)


def get_inputs():
    return [torch.randn(4096, 1024)]
"""


def test_a_number_that_torch_reads_of_a_class_that_inherits_is_asked(tmp_path: Path) -> None:
    """The class's own source does not name it."""
    patch = made(tmp_path, INHERITED)
    assert patch.diff
    assert_same(patch, tmp_path, [(2, 1024), (1, 1024)], 0.5)


TURNED = """
import torch


class Model(torch.nn.Module):
    def forward(self, x, y):
        p, q = x.float()[..., ::2], x.float()[..., 1::2]
        return torch.stack((p * y - q, q * y + p), -1).flatten(-2).to(x.dtype)


def get_inputs():
    x = torch.randn(1, 33, 32, 8, dtype=torch.bfloat16).transpose(-1, -2)
    return [x, torch.randn(33, 1, 16)]
"""


def test_inputs_lie_at_other_sizes_as_they_did(tmp_path: Path) -> None:
    """A kernel that is written at a larger batch serves the layout that the model is given."""
    patch = made(tmp_path, TURNED)
    kernel = next(text for text in patch.patch.after.values() if "def reference" in text)
    assert "a_strides[3]" in kernel or "x_strides[3]" in kernel, kernel


def test_inputs_at_other_sizes_take_no_memory(tmp_path: Path) -> None:
    """A model is captured at other sizes on a machine that could not hold its inputs."""
    (tmp_path / "model.py").write_text(
        "import torch\n\n\n"
        "class Model(torch.nn.Module):\n"
        "    def forward(self, x):\n        return x.exp().sigmoid()\n\n\n"
        "def get_inputs():\n    return [torch.empty(1 << 24, 1 << 22)]\n"
    )
    at = Scenario(sizes=Sizes(((0, 0, 1 << 25),)))
    graph = captured(str(tmp_path / "model.py"), at)
    assert next(n for n in graph.nodes if n.kind == "input").out.shape == (1 << 25, 1 << 22)


def test_a_table_has_to_have_the_places_that_are_read(tmp_path: Path) -> None:
    """Eager raises for a position beyond the table, and a kernel would read what lies behind."""
    text = """
import torch
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.token, self.place = nn.Embedding(97, 64), nn.Embedding(32, 64)

    def forward(self, tokens):
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.token(tokens) * 8.0 + self.place(places)


def get_inputs():
    return [torch.randint(97, (64, 24))]
"""
    patch = made(tmp_path, text)
    kernel = next(text for text in patch.patch.after.values() if "def reference" in text)
    assert "place_weight, 0, n2)" in kernel.partition("host.holds(")[2], kernel
