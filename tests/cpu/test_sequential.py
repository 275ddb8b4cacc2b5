"""Calls of `nn.Sequential` in a patch: spelled out where a part of one is replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from fusion_advisor.workflows.patch import Patched

from .test_patch import asking, changed, made

pytestmark = pytest.mark.usefixtures("ways")

PARTS = "nn.GroupNorm(8, 64), nn.SiLU(), nn.Conv2d(64, 64, 3, padding=1)"
MODEL = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        {made}

    def forward(self, x):
        {forward}
"""


def patched(folder: Path, making: str, forward: str, before: str = "") -> Patched:
    """The patch of a model that makes its modules and runs them as given."""
    body = MODEL.format(made=making, forward=forward.replace("\n", "\n        "))
    return made(folder, f"{before}\n{body}", shape="16, 64, 64, 64")


def forward_of(patch: Patched) -> str:
    """The last function of a patched file, without comments."""
    body = (
        changed(patch).partition("def forward(self, x):\n")[2].rpartition("def forward(self, x):")
    )
    lines = body[2].partition("def get_inputs")[0].strip("\n").splitlines()
    return "\n".join(line.strip() for line in lines if "# fusion-advisor" not in line)


def test_a_part_is_replaced_and_the_rest_stays_calls(tmp_path: Path) -> None:
    patch = patched(tmp_path, f"self.block = nn.Sequential({PARTS})", "return self.block(x)")
    assert forward_of(patch) == "return fused_model.block_in_parts(self.block, x)"
    assert "block[0].num_groups != 8" in asking(patch)
    assert "return block[1](block[0](x))" in asking(patch)
    assert asking(patch).endswith(
        """
        type(block) is not torch.nn.Sequential
        or block._forward_hooks
        or block._forward_pre_hooks
        or len(block) != 3
    ):
        return block(x)
    return block[2](group_norm_silu_or_eager(x, block))
"""
    )


def test_what_no_edit_touches_is_as_it_was_written(tmp_path: Path) -> None:
    """The second call has nothing that is fused, and spans lines."""
    patch = patched(
        tmp_path,
        f"self.one = nn.Sequential({PARTS})\n        "
        "self.two = nn.Sequential(nn.Conv2d(64, 64, 1), nn.Conv2d(64, 64, 1))",
        "x = self.two(self.two(  # twice\n    x,\n))\nreturn self.one(x) + self.two(x)",
    )
    assert forward_of(patch) == (
        "x = self.two(self.two(  # twice\nx,\n))\n"
        "return fused_model.one_in_parts(self.one, x) + self.two(x)"
    )


def test_one_within_another_and_names(tmp_path: Path) -> None:
    patch = patched(
        tmp_path,
        "self.net = nn.Sequential(nn.Conv2d(64, 64, 1), nn.Sequential(OrderedDict([\n"
        '            ("norm", nn.GroupNorm(8, 64)), ("act", nn.SiLU()),\n'
        '            ("last", nn.Conv2d(64, 64, 1))])))',
        "return self.net(x)",
        "from collections import OrderedDict",
    )
    assert forward_of(patch) == "return fused_model.net_in_parts(self.net, x)"
    text = asking(patch)
    assert text.index("len(net) != 2") < text.index("len(net[1]) != 3")
    assert "return net[1].last(group_norm_silu_or_eager(net[0](x), net))" in text


def test_a_class_that_inherits_and_a_loop(tmp_path: Path) -> None:
    patch = patched(
        tmp_path,
        "self.blocks = nn.ModuleList([Part(64), Part(64)])",
        "for block in self.blocks:\n    x = x + block(x)\nreturn x",
        "class Part(nn.Sequential):\n    def __init__(self, c):\n"
        f"        super().__init__({PARTS.replace('64', 'c')})\n",
    )
    assert "x = x + fused_model.block_in_parts(block, x)" in forward_of(patch)
    assert "block.forward.__code__.co_qualname != 'Sequential.forward'" in asking(patch)


def test_a_function_that_makes_one(tmp_path: Path) -> None:
    patch = patched(
        tmp_path,
        "self.block = part(64)",
        "return self.block(x)",
        f"def part(c):\n    return nn.Sequential({PARTS.replace('64', 'c')})\n",
    )
    assert forward_of(patch) == "return fused_model.block_in_parts(self.block, x)"


def test_a_list_that_is_comprehended_of_what_another_file_makes(tmp_path: Path) -> None:
    file = tmp_path / "parts.py"
    file.write_text(
        "from torch import nn\n\n\nclass First(nn.Conv2d):\n"
        "    def forward(self, x):\n        return super().forward(x)\n\n\n"
        f"def part(c):\n    return nn.Sequential({PARTS})\n"
    )
    patch = patched(
        tmp_path,
        "self.first, self.blocks = First(64, 64, 1), nn.ModuleList(part(64) for _ in range(2))",
        "x = self.first(x)\nfor block in self.blocks:\n    x = x + block(x)\nreturn x",
        "from parts import First, part",
    )
    assert "x = x + fused_model.block_in_parts(block, x)" in forward_of(patch)
    assert "or len(block) != 3" in asking(patch)


LAYERS = """
class Norm(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(c))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


def feed_forward(c):
    return nn.Sequential(Norm(c), nn.Linear(c, c), nn.GELU(), nn.Linear(c, c))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        {made}

    def forward(self, x):
        for mix, ff in self.layers:
            x = mix(x) + x
            {line}
        return x
"""
APPENDED = """self.layers = nn.ModuleList([])
        for _ in range(2):
            self.layers.append(nn.ModuleList([nn.Linear(256, 256), feed_forward(256)]))"""
COLLECTED = """layers = []
        for _ in range(2):
            layers.append(nn.ModuleList([nn.Linear(256, 256), feed_forward(256)]))
        self.layers = nn.ModuleList(layers)"""


@pytest.mark.parametrize(
    ("making", "line"),
    [
        (APPENDED, "x = ff(x) + x"),
        pytest.param(COLLECTED, "x = x + ff(x)", marks=pytest.mark.deep),
    ],
    ids=["appended", "collected"],
)
def test_a_residual_and_the_norm_that_one_begins_with(
    tmp_path: Path, making: str, line: str
) -> None:
    patch = made(tmp_path, LAYERS.format(made=making, line=line), shape="64, 256, 256")
    body = forward_of(patch)
    assert "x, ff_out = fused_model.ff_in_parts(mix(x), x, ff)" in body
    assert line.replace("ff(x)", "ff_out") in body
    text = asking(patch)
    assert "x = mix_ + x\n        result = ff(x)\n        return x, result" in text
    assert "return x, ff[3](ff[2](ff[1](" in text


@pytest.mark.parametrize(
    "line", ["x = torch.exp(x) + ff(x)", "x = x + (ff(x) if self.training else ff(x))"]
)
def test_one_that_would_run_before_something_else(tmp_path: Path, line: str) -> None:
    patch = made(tmp_path, LAYERS.format(made=APPENDED, line=line), shape="64, 256, 256")
    assert "_in_parts" not in forward_of(patch)


def test_an_activation_that_runs_twice(tmp_path: Path) -> None:
    patch = patched(
        tmp_path,
        "act = nn.SiLU()\n        self.block = nn.Sequential("
        "nn.GroupNorm(8, 64), act, nn.Conv2d(64, 64, 1), nn.GroupNorm(8, 64), act)",
        "return self.block(x)",
    )
    assert forward_of(patch) == "return fused_model.block_in_parts(self.block, x)"
    assert "block[2](group_norm_silu_or_eager" in asking(patch)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("making", "forward"),
    [
        # a model with other numbers may hold more
        (f"self.block = nn.Sequential(*[{PARTS}])", "return self.block(x)"),
        (
            f"self.block = nn.Sequential({PARTS})\n        self.block.append(nn.SiLU())",
            "return self.block(x)",
        ),
        # what a hook of the Sequential does would be lost
        (
            f"self.block = nn.Sequential({PARTS})\n        "
            "self.block.register_forward_hook(lambda module, given, out: out * 2)",
            "return self.block(x)",
        ),
        # one line runs chains of several lengths
        (
            f"self.blocks = nn.ModuleList([nn.Sequential({PARTS}), nn.Sequential({PARTS}, "
            "nn.SiLU())])",
            "for block in self.blocks:\n    x = block(x)\nreturn x",
        ),
        # or none, which leaves no trace
        (
            f"self.blocks = nn.ModuleList([nn.Sequential({PARTS}), nn.Identity()])",
            "for block in self.blocks:\n    x = block(x)\nreturn x",
        ),
        # it is computed anew for each
        (f"self.block = nn.Sequential({PARTS})", "return [self.block(x) for x in (x, 2 * x)][0]"),
    ],
)
def test_what_is_not_spelled_out(tmp_path: Path, making: str, forward: str) -> None:
    patch = patched(tmp_path, making, forward)
    assert not patch.diff, patch.diff
    assert patch.free_us > 0


def test_a_chain_that_the_source_has_spelled_out_stays(tmp_path: Path) -> None:
    """Folding would change what somebody has written."""
    patch = patched(
        tmp_path,
        f"self.norm = nn.Sequential({PARTS})\n        "
        "self.two = nn.Sequential(nn.Conv2d(64, 64, 1), nn.Conv2d(64, 64, 1))",
        "y = self.two[1](self.two[0](x))\nreturn self.norm(y) + self.two(x)",
    )
    assert "y = self.two[1](self.two[0](x))\n" in forward_of(patch)
    assert "+ self.two(x)" in forward_of(patch)
