"""`fusion_advisor.apply(how="source")`: groups run as kernels in memory, all else stays."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from .spawned import run_script

MODEL = """
import torch
import torch.nn.functional as F
from torch import nn


class Norm(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(d))

    def forward(self, x):
        variance = x.float().pow(2).mean(-1, keepdim=True)
        return self.weight * (x.float() * torch.rsqrt(variance + 1e-6)).to(x.dtype)


class Block(nn.Module):
    def __init__(self, d, p):
        super().__init__()
        self.norm, self.drop = Norm(d), nn.Dropout(p)
        self.gate, self.up, self.down = nn.Linear(d, d), nn.Linear(d, d), nn.Linear(d, d)

    def forward(self, x, h):
        x = x + h
        y = self.norm(x)
        z = F.silu(self.gate(y)) * self.up(y)
        return x, self.drop(self.down(z))


class Model(nn.Module):
    def __init__(self, d=96, p=0.0):
        super().__init__()
        self.layers = nn.ModuleList([Block(d, p), Block(d, p)])

    def forward(self, x):
        h = torch.sin(x) * 2
        for layer in self.layers:
            x, h = layer(x, h)
        return x + h
"""

HEAD = """
import torch
from fusion_advisor.verify.interpreter import install
install()
import fusion_advisor
"""

KEPT = """
from kept import Model, Norm

torch.manual_seed(0)
model = Model().eval()
plain = Model().eval()
plain.load_state_dict(model.state_dict())
keys, parameters = list(model.state_dict()), [id(p) for p in model.parameters()]
done = fusion_advisor.apply(model, (x,), device="h200", verify=False, how="source")


def fallbacks():
    launcher, *_ = vars(model.layers[0].forward.__globals__["fused_kernels_1"]).values()
    return sum(launcher.__globals__["host"].fallbacks.values())
"""

SAME = """
x = torch.randn(40, 96)


def same(a, b):
    with torch.no_grad():
        torch.testing.assert_close(a(x), b(x), rtol=1e-4, atol=1e-5)
"""


ON_BLOCKS = {
    "kernels run and all else stays": """
    assert sum(done.kernels.values()) >= 4, done
    assert type(model.layers[0]).__name__ == "Block"
    assert isinstance(model.layers[0].norm, Norm)
    assert list(model.state_dict()) == keys
    assert [id(p) for p in model.parameters()] == parameters
    same(model, plain)
    x = torch.randn(7, 96)
    same(model, plain)
    assert fallbacks() == 0
    """,
    "what the kernels do not serve": """
    model.train(), plain.train()
    a, b = model(x).sum(), plain(x).sum()
    a.backward(), b.backward()
    for p, q in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)
    model.eval(), plain.eval()
    before = fallbacks()
    for dtype in (torch.bfloat16, torch.float64):
        model.to(dtype), plain.to(dtype)
        x = x.to(dtype)
        with torch.no_grad():
            assert torch.equal(model(x), plain(x)), dtype
    assert fallbacks() == before, "the original statements run, not a launcher's reference"
    """,
    "hooks copies and pickles": """
    import copy, io, pickle
    seen = []
    for m in (model, plain):
        m.layers[0].norm.register_forward_hook(lambda *_: seen.append("norm"))
        m.layers[1].register_forward_hook(lambda *_: seen.append("block"))
    same(model, plain)
    assert seen == ["norm", "block"] * 2
    for m in (model, plain):
        m.layers[0].norm._forward_hooks.clear()
        m.layers[1]._forward_hooks.clear()
    twin = copy.deepcopy(model)
    assert type(twin.layers[0]) is type(model.layers[0])
    assert twin.layers[0].norm.weight is not model.layers[0].norm.weight
    same(twin, plain)
    back = pickle.loads(pickle.dumps(model))
    import kept
    assert type(back.layers[0]) is kept.Block
    same(back, plain)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    same(torch.load(buffer, weights_only=False), plain)
    same(torch.nn.DataParallel(model), plain)
    """,
    "applied kernels are known when analysed again": """
    from fusion_advisor.frontend.child import capture_module
    graph = capture_module(model, (x,))
    own = [node.op for node in graph.nodes if node.op.startswith("fusion_advisor.")]
    assert len(own) == sum(done.kernels.values()), own
    assert fallbacks() == 0
    again = fusion_advisor.apply(model, (x,), device="h200", verify=False, how="source")
    assert not again.kernels, again
    same(model, plain)
    """,
    # Gradients are reduced and hooks run, around a model with kernels and within it.
    "distributed data parallel": """
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel
    store = dist.FileStore("store", 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    seen = []
    models = [DistributedDataParallel(m) for m in (model, plain)]
    for m in models:
        m.register_forward_hook(lambda *_: seen.append("whole"))
        m.module.layers[1].norm.register_forward_pre_hook(lambda *_: seen.append("norm"))
    same(*models)
    assert seen == ["norm", "whole"] * 2
    assert fallbacks() == 0
    for m in models:
        m.train()
        m(x).square().sum().backward()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-4)
    assert list(models[0].state_dict()) == ["module." + key for key in keys]
    dist.destroy_process_group()
    """,
}
"""What holds of a model of blocks to which kernels were applied, as scripts."""
EACH = """
import json, os, sys, textwrap, traceback

said = {}
for name, script in json.loads(sys.argv[1]).items():
    reads, writes = os.pipe()
    if not (child := os.fork()):
        found = ""
        try:
            exec(compile(textwrap.dedent(script), name, "exec"), globals())
        except BaseException:
            found = traceback.format_exc()
        os.write(writes, found[-4096:].encode())
        os._exit(0)
    os.close(writes)
    said[name] = os.fdopen(reads).read()
    said[name] += "" if os.waitpid(child, 0)[1] == 0 else "ended"
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each script raises, in a fork of one process in which the kernels are applied."""
    folder = tmp_path_factory.mktemp("kept")
    (folder / "kept.py").write_text(MODEL)
    found = run_script(HEAD + SAME + KEPT + EACH, json.dumps(ON_BLOCKS), folder=folder)
    return json.loads(found.splitlines()[-1])


@pytest.mark.parametrize("name", ON_BLOCKS)
def test_of_a_model_of_blocks(name: str, said: dict[str, str]) -> None:
    assert said[name] == ""


def run_alone(folder: Path, script: str) -> None:
    """In a process of its own, whose Triton is the interpreter."""
    run_script(HEAD + SAME + textwrap.dedent(script), folder=folder)


NUMBERS = """
import math
import torch
import torch.nn.functional as F
from torch import nn


class Settings:
    def __init__(self):
        self.gain = 3.0


class Norm(nn.Module):
    def __init__(self, d, eps):
        super().__init__()
        self.weight, self.eps, self.settings = nn.Parameter(torch.ones(d)), eps, Settings()

    def forward(self, x):
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return x * self.weight * self.settings.gain


def halved(x, by):
    return torch.tanh(x) / by


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.own = Norm(96, 1e-6), nn.LayerNorm(96, eps=1e-3)
        self.a, self.b, self.c = nn.Linear(96, 96), nn.Linear(96, 96), nn.Linear(96, 96)
        self.act, self.function, self.scale, self.by = nn.ReLU(), F.silu, 0.5, 2.0
        self.two = False

    def weighted(self, x):
        if self.two:
            return x * 2
        return x * self.scale

    def forward(self, x):
        y = self.a(self.norm(x))
        y = self.b(self.own(y + x))
        y = self.act(y) + x
        y = self.c(self.weighted(torch.sigmoid(y)))
        y = self.a(self.function(y) + x)
        by = self.by
        return halved(y, by) / math.sqrt(y.size(-1))
"""


def test_what_is_changed_afterwards_changes_the_result(tmp_path: Path) -> None:
    """Numbers, functions and submodules that a kernel was made for: another one is served by the
    original statements."""
    (tmp_path / "numbered.py").write_text(NUMBERS)
    run_alone(
        tmp_path,
        """
        import copy
        from numbered import *

        model = Model().eval()
        plain = copy.deepcopy(model)
        done = fusion_advisor.apply(model, (x,), device="h200", verify=False, how="source")
        assert sum(done.kernels.values()) == 5, done
        served = vars(model.forward.__globals__["fused_kernels_1"])
        counts = dict.fromkeys(served, 0)

        def counting(name, launcher):
            def call(*args):
                counts[name] += 1
                return launcher(*args)
            return call

        for name, launcher in [*served.items()]:
            served[name] = counting(name, launcher)
        same(model, plain)
        assert sum(counts.values()) == 5, counts
        changes = [
            lambda m: setattr(m, "scale", 4.0),
            lambda m: setattr(m, "two", True),
            lambda m: setattr(m, "by", 0.1),
            lambda m: setattr(m, "function", F.gelu),
            lambda m: setattr(m, "act", nn.Tanh()),
            lambda m: setattr(m.own, "eps", 5.0),
            lambda m: setattr(m.norm, "eps", 5.0),
            lambda m: setattr(m.norm.settings, "gain", 0.2),
        ]
        with torch.no_grad():
            for change in changes:
                before, twins = plain(x), [copy.deepcopy(model), copy.deepcopy(plain)]
                for each in twins:
                    change(each)
                assert not torch.allclose(twins[1](x), before, rtol=1e-3), "it matters"
                for name in counts:
                    counts[name] = 0
                same(*twins)
                assert sum(counts.values()) == 4, counts
        """,
    )


HELD = """
import torch
from torch import nn


class Settings:
    def __init__(self):
        self.s = 2.0


class Own(nn.LayerNorm):
    pass


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin, self.own, self.cfg = nn.Linear(96, 96), Own(96), Settings()
        self.k, self.none, self.pair, self.f = 1.0, None, [0.5, 2.0], True
        self.bounds = (0.0, float("inf"))

    def g(self):
        if self.f: return 2.0
        return 0.5

    @classmethod
    def h(cls, x, a, b):
        return torch.tanh(x) * b + a


class Local(Base):
    def forward(self, x):
        cfg = self.cfg
        return torch.tanh(self.lin(x)) * cfg.s + 1


class Absent(Base):
    def forward(self, x):
        s = 1.0 if self.none is None else self.none
        return torch.tanh(self.lin(x)) * s * 3 + 1


class Listed(Base):
    def forward(self, x):
        return torch.tanh(self.lin(x)) * self.pair[1] + 1


class Branching(Base):
    def forward(self, x):
        return torch.tanh(self.lin(x)) * self.g() + 1


class Called(Base):
    def forward(self, x):
        return self.h(self.lin(x), self.k, self.cfg.s) * 2


class Derived(Base):
    def forward(self, x):
        return self.own(self.lin(x) + x) * 2


class Counted(Base):
    def forward(self, x):
        n = sum(p for p in (1, 2))
        return torch.tanh(self.lin(x)) * n * self.k + 1


class Nested(Base):
    def forward(self, x):
        def f(t):
            return torch.tanh(t) * self.k + 1
        return f(self.lin(x))


class Rebound(Base):
    def forward(self, x):
        y = torch.tanh(self.lin(x))
        n = y.size(0)
        y = y * 2
        return y.view(n, -1) + 1


class Closed(Base):
    def forward(self, x):
        s = self.k
        def f(t):
            return torch.tanh(t) * s + 1
        return f(self.lin(x)) * 2


class Joined(Base):
    def forward(self, x):
        x = self.lin(x)
        if self.f: x = torch.tanh(x) * self.k + 1
        return x


class Otherwise(Base):
    def forward(self, x):
        x = self.lin(x)
        if not self.f:
            x = x * 3
        else: x = torch.tanh(x) * self.k + 1
        return x


class Bounded(Base):
    def forward(self, x):
        return torch.clamp(torch.tanh(self.lin(x)) * 2, self.bounds[0], self.bounds[1]) + 1


class Changing(Base):
    def forward(self, x):
        self.k = 3.0 - self.k
        return torch.tanh(self.lin(x)) * self.k + 1

"""


KINDS = (
    "Local", "Absent", "Listed", "Branching", "Called", "Derived", "Counted", "Nested", "Rebound",
    "Closed", "Bounded", "Joined", "Otherwise", "Changing",
)  # fmt: skip
LEFT = ("Joined", "Otherwise", "Changing")


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
def test_wherever_a_number_comes_from(kind: str, tmp_path: Path) -> None:
    """Each is asked for, or the group is left: nothing that changes is silently what it was."""
    (tmp_path / "held.py").write_text(HELD)
    run_alone(
        tmp_path,
        f"""
        import copy
        import held

        changes = [
            lambda m: None,
            lambda m: setattr(m.cfg, "s", 5.0),
            lambda m: setattr(m, "k", 7.0),
            lambda m: setattr(m, "none", 4.0),
            lambda m: setattr(m, "pair", [1.0, 9.0]),
            lambda m: setattr(m, "bounds", (0.0, 0.5)),
            lambda m: setattr(m, "f", False),
            lambda m: setattr(m.own, "eps", 3.0),
        ]
        model = held.{kind}().eval()
        plain = copy.deepcopy(model)
        done = fusion_advisor.apply(model, (x,), device="h200", verify=False, how="source")
        assert bool(done.kernels) == {kind not in LEFT}, done
        plain.k = model.k  # to trace a model is to run it
        for change in changes:
            twins = copy.deepcopy(model), copy.deepcopy(plain)
            for each in twins:
                change(each)
            same(*twins)
        """,
    )


def test_the_module_is_there_without_torch() -> None:
    """Importing the package costs nothing until `apply` is asked for."""
    code = """
        import sys, fusion_advisor
        assert "torch" not in sys.modules
        assert "apply" in fusion_advisor.__all__
        assert "torch" not in sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


DECORATED = """
import functools
import torch
import torch.nn.functional as F
from torch import nn


def recorded(forward):
    @functools.wraps(forward)
    def inner(self, *args):
        inner.calls += 1
        return forward(self, *args)

    inner.calls = 0
    return inner


def rotate(x):
    one, two = x.chunk(2, -1)
    return torch.cat((-two, one), -1)


def turned(x, cos, sin):
    return x * cos + rotate(x) * sin


class Registered(nn.Module):
    known = []

    def __init_subclass__(cls):
        Registered.known.append(cls)


class Block(Registered):
    @staticmethod
    def gated(a, b):
        return F.silu(a) * b

    @torch.no_grad()
    @recorded
    def forward(self, x):
        return turned(self.gated(x, x), torch.cos(x), torch.sin(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.lin = Block(), nn.Linear(96, 96)

    def forward(self, x):
        return self.lin(self.block(self.lin(x)))
"""


def test_decorated_methods_and_functions_of_modules(tmp_path: Path) -> None:
    (tmp_path / "decorated.py").write_text(DECORATED)
    run_alone(
        tmp_path,
        """
        import decorated
        forward, turned, rotate = decorated.Block.forward, decorated.turned, decorated.rotate
        calls = forward.__wrapped__
        model = decorated.Model().eval()
        twin = decorated.Model().eval()
        twin.load_state_dict(model.state_dict())
        done = fusion_advisor.apply(model, (x,), device="h200", verify=False, how="source")
        assert sum(done.kernels.values()) == 1 and done.saved_us > 0, done
        assert decorated.Block.forward is forward and decorated.turned is turned
        assert decorated.rotate is rotate, "others see the functions that they know"
        assert decorated.Registered.known == [decorated.Block]
        before = calls.calls
        same(model, twin)
        assert calls.calls == before + 1, "the copy counts for itself"
        assert type(model.block).forward.__wrapped__.calls == before + 1
        x = x.double()
        model.double(), twin.double()
        same(model, twin)
        """,
    )


def test_a_batch_of_one_says_nothing_of_others(tmp_path: Path) -> None:
    """Its kernels serve several; a number that Python made of a size is in none of them."""
    (tmp_path / "sized.py").write_text(
        "import torch\nfrom torch import nn\n\n\nclass Model(nn.Module):\n"
        "    def forward(self, x):\n"
        "        x = torch.tanh(x) + torch.exp(x)\n"
        "        x = x.sum(1) / x.shape[1]\n"
        "        return torch.sin(x) * 2 * x.shape[0]\n"
    )
    run_alone(
        tmp_path,
        """
        import sized
        for batch in (1, 3):
            model, twin = sized.Model().eval(), sized.Model().eval()
            x = torch.randn(batch, 40, 96)
            done = fusion_advisor.apply(model, (x,), device="h200", verify=False, how="source")
            assert done.kernels, done
            assert any("a size became a number there" in why for why in done.unplaced.values())
            files = [
                each.__globals__
                for name, space in vars(sized).items()
                if name.startswith("fused_kernels")
                for each in vars(space).values()
            ]
            for shape in ((1, 40, 96), (3, 40, 96), (5, 17, 96), (2, 1, 96)):
                x = torch.randn(shape)
                same(model, twin)
            assert files and not any(file["host"].fallbacks for file in files)
        """,
    )


def test_guards_where_the_file_does_not_import_torch(tmp_path: Path) -> None:
    (tmp_path / "torchless.py").write_text(
        "from torch import nn\n\n\nclass Model(nn.Module):\n    def forward(self, x):\n"
        "        return x.pow(2) * x.tanh()\n"
    )
    run_alone(
        tmp_path,
        """
        import torchless
        model, twin = torchless.Model().eval(), torchless.Model().eval()
        done = fusion_advisor.apply(model, (x,), device="h200", verify=False, how="source")
        assert sum(done.kernels.values()) == 1, done
        same(model, twin)
        x = x.bfloat16()
        with torch.autocast("cpu"):
            assert torch.equal(model(x), twin(x))
            assert model(x).dtype == twin(x).dtype
        """,
    )


def test_a_source_that_changed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "decorated.py").write_text(DECORATED)
    run_alone(
        tmp_path,
        """
        import decorated, pathlib
        model = decorated.Model().eval()
        file = pathlib.Path(decorated.__file__)
        file.write_text(file.read_text().replace("F.silu(a) * b", "F.silu(a) + b"))
        try:
            fusion_advisor.apply(model, (x,), device="h200", verify=False, how="source")
        except fusion_advisor.support.errors.UsageError as error:
            assert "Block.gated() is not what was imported" in str(error), error
        else:
            raise AssertionError
        assert type(model.block) is decorated.Block
        """,
    )


TABLES = """
from collections.abc import MutableMapping

import torch
import torch.nn.functional as F
from torch import nn


class Registry(MutableMapping):
    shared = {}

    def __init__(self):
        self.own = {}

    def __getitem__(self, name):
        return self.own[name] if name in self.own else self.shared[name]

    def __setitem__(self, name, value):
        self.own[name] = value

    def __delitem__(self, name):
        del self.own[name]

    def __iter__(self):
        return iter({**self.shared, **self.own})

    def __len__(self):
        return len({**self.shared, **self.own})

    @classmethod
    def register(cls, name, value):
        cls.shared[name] = value

    def chosen(self, name, default):
        return self.get(name, default)


def gated(module, a, b):
    return F.silu(a) * b


def doubled(x):
    return torch.tanh(x) * 2 + x


def squared(x):
    return torch.exp(x) * x


class Scaled:
    def __init__(self, scale):
        self.scale = scale

    def __call__(self, x):
        return torch.sin(x) * x + self.scale


Registry.register("gated", gated)
GATES = Registry()
ACTIVATIONS = {"doubled": doubled}
SCALED = Scaled(0.5)


def looked_up(cls):
    plain = cls.forward

    def forward(self, *args):
        return gates.chosen(self.gate, plain)(self, *args)

    gates = GATES
    cls.forward = forward
    return cls


@looked_up
class Gate(nn.Module):
    def __init__(self, gate="gated"):
        super().__init__()
        self.gate = gate

    def forward(self, a, b):
        return a + b


class Model(nn.Module):
    AFTER = {"squared": squared}

    def __init__(self):
        super().__init__()
        self.lin, self.gate, self.activation = nn.Linear(96, 96), Gate(), "doubled"

    def forward(self, x):
        x = self.lin(GATES[self.gate.gate](self, self.lin(x), x))
        x = self.lin(ACTIVATIONS[self.activation](x))
        x = self.lin(self.AFTER["squared"](x))
        x = self.lin(self.gate(self.lin(x), x))
        return SCALED(x)
"""


def test_functions_of_tables_and_callable_objects(tmp_path: Path) -> None:
    """Only the model sees the copies; what is registered later is seen by all."""
    (tmp_path / "tables.py").write_text(TABLES)
    run_alone(
        tmp_path,
        """
        import copy, pickle
        import tables
        from fusion_advisor.frontend.child import capture_module
        torch.manual_seed(0)
        model, plain = tables.Model().eval(), tables.Model().eval()
        plain.load_state_dict(model.state_dict())
        keys = [*model.state_dict()]
        done = fusion_advisor.apply(model, (x,), device="h200", verify=False, how="source")
        assert done.kernels, done
        assert sum(done.kernels.values()) == 5, done

        def launched(model):
            graph = capture_module(model, (x,))
            return sum(node.op.startswith("fusion_advisor.") for node in graph.nodes)

        assert launched(model) == 5 and launched(plain) == 0
        same(model, plain)
        same(copy.deepcopy(model), plain)
        assert launched(copy.deepcopy(model)) == 5
        back = pickle.loads(pickle.dumps(model))
        assert type(back) is tables.Model
        same(back, plain)
        assert [*model.state_dict()] == keys
        assert tables.GATES["gated"] is tables.gated and type(tables.GATES) is tables.Registry
        assert type(tables.ACTIVATIONS) is dict and type(tables.SCALED) is tables.Scaled
        model.double(), plain.double()  # where the original statements run, which Dynamo can trace
        x = x.double()
        same(torch.compile(model, backend="eager", fullgraph=True), plain)
        model.float(), plain.float()
        x = x.float()
        again = fusion_advisor.apply(model, (x,), device="h200", verify=False, how="source")
        assert not again.kernels, again
        same(model, plain)
        model.train(), plain.train()
        for each in (model, plain):
            each(x).square().sum().backward()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-4)
        model.eval(), plain.eval()

        before = plain(x)
        tables.Registry.register("summed", lambda module, a, b: a + b)
        tables.GATES["differed"] = lambda module, a, b: a - b
        tables.ACTIVATIONS["halved"] = lambda x: x / 2
        tables.SCALED.told = "everything"
        for gate in ("summed", "differed", "gated"):
            for each in (model, plain):
                each.gate.gate, each.activation = gate, "halved"
            same(model, plain)
            assert not torch.equal(plain(x), before)
        tables.Registry.register("gated", lambda module, a, b: a * b)
        same(model, plain)
        inside = type(model).forward.__globals__["edited_kernels_1"]
        assert inside.SCALED.told == "everything" and inside.SCALED is not tables.SCALED
        for each in (model, plain):
            each.gate.gate = "of nobody"
            try:
                each(x)
            except KeyError:
                continue
            raise AssertionError
        """,
    )


def test_tables_that_cannot_be_stood_in_for(tmp_path: Path) -> None:
    """Dicts with a class of their own, state in slots, and what raises as it is read stay."""
    (tmp_path / "closed.py").write_text(CLOSED)
    run_alone(
        tmp_path,
        """
        import closed
        model, plain = closed.Model().eval(), closed.Model().eval()
        plain.load_state_dict(model.state_dict())
        done = fusion_advisor.apply(model, (x,), device="h200", verify=False, how="source")
        assert not done.kernels, done
        left = {why.rpartition(": ")[2] for why in done.unplaced.values()}
        assert left == {f"{n}() cannot be edited there" for n in ("doubled", "squared", "scaled")}
        same(model, plain)
        """,
    )


CLOSED = """
from collections import OrderedDict
from collections.abc import Mapping

import torch
from torch import nn


def doubled(x):
    return torch.tanh(x) * 2 + x


def squared(x):
    return torch.exp(x) * x


def scaled(x):
    return torch.sin(x) * x + 0.5


class Slotted(Mapping):
    __slots__ = ("held",)

    def __init__(self, held):
        self.held = held

    def __getitem__(self, name):
        return self.held[name]

    def __iter__(self):
        return iter(self.held)

    def __len__(self):
        return len(self.held)


class Lazy(Slotted):
    def __iter__(self):
        raise RuntimeError("all of it is too much")


ORDERED = OrderedDict(doubled=doubled)
SLOTTED = Slotted({"squared": squared})
LAZY = Lazy({"scaled": scaled})


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(96, 96)

    def forward(self, x):
        x = self.lin(ORDERED["doubled"](x))
        x = self.lin(SLOTTED["squared"](x))
        return LAZY["scaled"](x)
"""


FAMILIES = """
import copy
import fusion_advisor
import torch
from fusion_advisor.frontend.child import capture_module
from transformers import AutoConfig, AutoModel

small = dict(hidden_size=64, intermediate_size=160, num_attention_heads=4, num_hidden_layers=2)


def family(kind, **more):
    torch.manual_seed(0)  # no token is so near to two experts that a rounding sends it elsewhere
    config = AutoConfig.for_model(kind, **{**small, "vocab_size": 128, **more})
    model = AutoModel.from_config(config).eval().to(torch.bfloat16)
    given = dict(input_ids=torch.randint(0, 128, (2, 24)), use_cache=False)
    plain = copy.deepcopy(model)
    done = fusion_advisor.apply(model, (), given, device="h200", verify=False, how="source")
    return model, plain, given, done


def equal(model, plain, given):
    with torch.no_grad():
        one, other = model(**given)[0], plain(**given)[0]
    torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)
"""


@pytest.mark.deep
@pytest.mark.parametrize(
    ("kind", "more", "least"),
    [
        ("llama", {"num_key_value_heads": 2}, {"residual_rms_norm": 2, "rms_norm": 3, "swiglu": 2}),
        ("gpt_neox", {}, {}),
        ("mixtral", {"num_key_value_heads": 2, "num_local_experts": 4}, {"swiglu": 2}),
    ],
)
def test_families_of_transformers(
    tmp_path: Path, kind: str, more: dict[str, int], least: dict[str, int]
) -> None:
    (tmp_path / "families.py").write_text(FAMILIES)
    run_alone(
        tmp_path,
        f"""
        from families import *

        model, plain, given, done = family("{kind}", **{more})
        assert done.kernels.items() >= {least}.items(), done
        turned = ("rotary_embedding", "mul_neg_add")  # the latter of a part of each head
        rotary = sum(n for name, n in done.kernels.items() if name.startswith(turned))
        assert rotary >= 2, "queries and keys, in each of two layers"
        graph = capture_module(model, (), given)
        own = [node.op for node in graph.nodes if node.op.startswith("fusion_advisor.")]
        assert len(own) == sum(done.kernels.values()), "no guard keeps a kernel from its tensors"
        equal(model, plain, given)
        equal(copy.deepcopy(model), plain, given)
        kinds = [{{type(m) for m in each.modules()}} for each in (model, plain)]
        assert kinds[0] != kinds[1]
        import pickle
        back = pickle.loads(pickle.dumps(model))
        assert {{type(m) for m in back.modules()}} == kinds[1]
        """,
    )


FOLDED = """
import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.bias = nn.Linear(96, 96), nn.Parameter(torch.randn(5, 96))

    def forward(self, x):
        batch, length, size = x.shape
        y = self.first(x.reshape(batch * length, size))
        y = F.silu(y).sigmoid()
        return (y.view(batch, length, size) + self.bias).softmax(-1)
"""


def test_a_batch_that_no_input_has_stays_with_the_source(tmp_path: Path) -> None:
    """The kernel could not find it in rows that are batch and length at once, nor its reference."""
    (tmp_path / "folded.py").write_text(FOLDED)
    run_alone(
        tmp_path,
        """
        from folded import Model

        model, plain, x = Model().eval(), Model().eval(), torch.randn(8, 5, 96)
        plain.load_state_dict(model.state_dict())
        done = fusion_advisor.apply(model, (x,), device="h200", verify=False, how="source")
        assert any("became a number there: 8 in" in why for why in done.unplaced.values()), done
        assert done.kernels
        same(model, plain)
        x = torch.randn(3, 5, 96)
        same(model, plain)
        """,
    )
