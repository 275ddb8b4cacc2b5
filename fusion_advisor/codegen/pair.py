"""Group and its backward as one file: kernels of both passes, and the function that autograd calls.

    from forward and backward graphs, each as kernels  →  one text

The function of the group returns its results and what backward reads; a decorator of the runtime
makes an operator of it that autograd can follow. What the kernels do not serve runs the group's
eager statements.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fusion_advisor.codegen.emit import imports_of, in_lines, jits_of, shared_by, wrapped
from fusion_advisor.codegen.host_launcher import launcher
from fusion_advisor.codegen.kernel_file import KernelFile
from fusion_advisor.codegen.selftest import selftest
from fusion_advisor.codegen.test_inputs import at_odd_sizes, cases, launches
from fusion_advisor.ir.graph import Graph, Ref
from fusion_advisor.ir.kernel import PROGRAMS, Kernel
from fusion_advisor.rulebook.schema import Rulebook
from fusion_advisor.schedules.names import Names
from fusion_advisor.shipped.files import HOST


@dataclass(frozen=True)
class PassFiles:
    """One of the two graphs with the files of its kernels, in the order in which they run."""

    graph: Graph
    files: tuple[KernelFile, ...]

    def calls(self, given: Sequence[str], names: Names) -> tuple[list[str], list[str]]:
        """Lines that run the kernels on inputs of these names, and the names of what the graph
        returns. Raises ValueError for a tensor that no kernel makes."""
        inputs = [node for node in self.graph.nodes if node.kind != "call"]
        texts = {Ref(node.name): name for node, name in zip(inputs, given, strict=True)}
        lines: list[str] = []
        for file in self.files:
            taken = ", ".join(_known(texts, ref) for ref in file.expressed.inputs)
            made = [names.claim(name.removesuffix("_out")) for name in file.output_names]
            lines.append(f"{', '.join(made)} = {file.name}({taken})")
            texts |= dict(zip(file.expressed.outputs, made, strict=True))
        return lines, [self._returned(texts, ref) for ref in self.graph.outputs]

    def _returned(self, texts: Mapping[Ref, str], ref: Ref) -> str:
        """A result as it is returned: sums over rows lose dimensions of one place, or get some."""
        nodes = {node.name: node for node in self.graph.nodes}
        shape, base = nodes[ref.node].out.shape, ref
        while base not in texts:
            via = nodes[base.node]
            base = next(via.refs(), None)
            if base is None or not via.op.startswith(_RESHAPED):
                raise ValueError(f"no kernel makes {ref.node}")
        whole = nodes[base.node].out.shape
        gone, new, d = list[int](), list[int](), 0
        for dim, size in enumerate(shape):
            while whole[d : d + 1] == (1,) and (size != 1 or len(whole) - d > len(shape) - dim):
                gone.append(d)
                d += 1
            if whole[d : d + 1] == (size,):
                d += 1
            else:
                new.append(dim)
        gone += range(d, len(whole))
        if any(shape[dim] != 1 for dim in new) or any(whole[dim] != 1 for dim in gone):
            raise ValueError(f"{ref.node} is a view of shape {shape} of a tensor of shape {whole}")
        dropped = f".squeeze({_tuple([f'{dim}' for dim in gone])})" if gone else ""
        return texts[base] + dropped + "".join(f".unsqueeze({dim})" for dim in new)


_RESHAPED = tuple(
    f"aten.{name}"
    for name in ("view.", "_unsafe_view.", "squeeze", "unsqueeze", "expand.", "alias.", "detach.")
)
"""Views that keep the order of elements, by the beginnings of their names."""


def _known(texts: Mapping[Ref, str], ref: Ref) -> str:
    if ref not in texts:
        raise ValueError(f"no kernel makes {ref.node}")
    return texts[ref]


@dataclass(frozen=True)
class Pair:
    """Both passes of a group. `origins` has the source of each input of the backward graph, and
    `gradients` the inputs of the group whose gradients that returns."""

    forward: PassFiles
    backward: PassFiles
    origins: tuple[tuple[str, int], ...]
    gradients: tuple[int, ...]

    @property
    def held(self) -> list[tuple[str, int, int, int]]:
        """Sizes that the backward kernels have as numbers, or that such numbers may follow from: of
        an input or a result of the group or a tensor kept, with its number, the dimension and the
        size."""
        inputs = [node.name for node in self.backward.graph.nodes if node.kind != "call"]
        known = dict(zip(inputs, self.origins, strict=True))
        found: dict[tuple[str, int, int, int], None] = {}
        for file in self.backward.files:
            refs = dict(zip(file.input_names, file.expressed.inputs, strict=False))
            for name, dim, size in (*file.held, *file.walked):
                if refs[name].node in known:
                    kind, number = known[refs[name].node]
                    found["result" if kind == "gradient" else kind, number, dim, size] = None
        return [*found]


_TRAINED = f"@{HOST}.trained("


def has_backward(text: str) -> bool:
    """Whether a kernel's file has its backward, too."""
    return _TRAINED in text


def paired(kernel: Kernel, file: KernelFile, pair: Pair, note: str, rulebook: Rulebook) -> Kernel:
    """File of a group with its backward, from the `kernel` and `file` of the group alone. The
    `note` stands in the docstring. Raises ValueError for a tensor that no kernel makes."""
    files = (*pair.forward.files, *pair.backward.files)
    of_inputs = [(n, d, size) for kind, n, d, size in pair.held if kind == "input"]
    held = [(file.input_names[n], d, size) for n, d, size in of_inputs]
    made = cases(replace(file, held=(*file.held, *held)), rulebook, full_size=False)
    made = tuple(
        replace(case, loaded_bytes=None, stored_bytes=None, loads=None, stores=None)
        for case in made
    )
    parts = [
        *map(_function, files),
        in_lines(
            _backward(pair, kernel),
            kernel.yardstick,
            _forward(pair, kernel),
            selftest(file, at_odd_sizes(made), None, rulebook),
        ),
    ]
    content = "\n\n\n".join(parts)
    imports = imports_of(shared_by(files, content), content)
    head = kernel.text.partition('\n"""\n')[0]
    doc = [head, *wrapped([note]), '"""']
    return replace(
        kernel,
        text="\n".join([*doc, "", *imports, "", "", content]) + "\n",
        cases=made,
        launches=tuple(launch for each in files for launch in launches(each)),
        gradients=pair.gradients,
        held=tuple((n, d) for n, d, _ in of_inputs),
    )


def _function(file: KernelFile) -> str:
    """Kernels of a file and their launcher. Constants of the file are called after it: another
    one's stand beside them."""
    text = "\n\n\n".join((jits_of(file), in_lines(launcher(file, refuses=True))))
    return re.sub(rf"\b{PROGRAMS}(?=(_\d+)?\b)", f"{PROGRAMS}_{file.name.upper()}", text)


def _forward(pair: Pair, kernel: Kernel) -> str:
    """The function of the group."""
    names, count = Names(), len(kernel.outputs)
    inputs = [names.claim(name) for name in kernel.inputs]
    lines, made = pair.forward.calls(inputs, names)
    sources = {"input": inputs, "result": made[:count], "kept": made[count:]}
    kept = [sources[kind][number] for kind, number in pair.origins if kind != "gradient"]
    of = _tuple([f'"{inputs[number]}"' for number in pair.gradients])
    held = [
        f'("{sources[kind][number]}", {sources[kind][number]}, {dim}, {size})'
        for kind, number, dim, size in pair.held
    ]
    return "\n".join(
        [
            f"{_TRAINED}backward, reference, gradients={of}, results={count})",
            f"def {kernel.name}({', '.join(inputs)}):",
            '    """Results, and what backward reads."""',
            *(f"    {line}" for line in lines),
            *([f"    {HOST}.made_for({', '.join(held)})"] if held else []),
            f"    return {_tuple(made[:count])}, {_tuple(kept)}",
        ]
    )


def _backward(pair: Pair, kernel: Kernel) -> str:
    """The function that makes gradients of what was kept and of the results' gradients."""
    names = Names()
    inputs = [node.name for node in pair.backward.graph.nodes if node.kind != "call"]
    given = [names.claim(name) for name in inputs]
    arriving = ["_"] * len(kernel.outputs)
    kept: list[str] = []
    for name, (kind, number) in zip(given, pair.origins, strict=True):
        if kind == "gradient":
            arriving[number] = name
        else:
            kept.append(name)
    lines, made = pair.backward.calls(given, names)
    said = " and ".join(kernel.inputs[number] for number in pair.gradients)
    return "\n".join(
        [
            "def backward(kept, gradients):",
            f'    """Gradients of {said}."""',
            *([f"    {_tuple(kept)} = kept"] if kept else []),
            f"    {_tuple(arriving)} = gradients",
            *(f"    {line}" for line in lines),
            f"    return {_tuple(made)}",
        ]
    )


def _tuple(items: Sequence[str]) -> str:
    return f"({', '.join(items)}{',' if len(items) == 1 else ''})"
