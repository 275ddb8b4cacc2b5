"""Workflow of `patch hf:config.json`: a package in the user's tree that puts kernels into
transformers' models.

The source of such a model is not the user's. The diff adds `fused_<type>/`: for each file of
transformers with functions that change a module with these and with classes derived from
transformers' own, the kernels, and `fuse(model)`, which gives the modules of a model these classes.
`fuse` leaves a model as it is, with a warning, where transformers' source is not the one that the
package was made of.
"""
# transformers has no types that a strict checker accepts.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import sys
import textwrap
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch

from fusion_advisor.codegen.header import stamped
from fusion_advisor.codegen.kernel_package import package_files
from fusion_advisor.cost.dataflow import dataflow
from fusion_advisor.frontend.child import capture_module
from fusion_advisor.frontend.loading import load
from fusion_advisor.frontend.user_model import resized
from fusion_advisor.fusion.findings import fuse
from fusion_advisor.ir.kernel import LICENSE
from fusion_advisor.ir.scenario import Request
from fusion_advisor.rulebook.load import load_rulebook
from fusion_advisor.rulebook.local_gpu import choose_device
from fusion_advisor.sourcepatch.editing.sources import Function, SourceFile
from fusion_advisor.sourcepatch.equivalence import difference
from fusion_advisor.sourcepatch.function_copies import Functions, Key
from fusion_advisor.sourcepatch.placement import Patch
from fusion_advisor.sourcepatch.trial import patched_copy
from fusion_advisor.support.errors import CaptureError, UsageError
from fusion_advisor.verify.driver import provers
from fusion_advisor.workflows.analyze import Listener, Silent, stamp_of
from fusion_advisor.workflows.apply_source import PlacedKernels, placed
from fusion_advisor.workflows.patch import Patched

STAGES = ("capture", "group", "try", "report")
"""Stages of `patch_family`, in order."""


def patch_family(request: Request, root: Path, listener: Listener | None = None) -> Patched:
    """Patch the family of a configuration: make a diff that adds a package to the tree at `root`.
    The model that the package's `fuse` made has to give the graph of the original in each scenario.
    Runs transformers' code in this process. Raises UsageError and CaptureError as `patch_model`
    does.
    """
    listener = listener or Silent()
    rulebook = load_rulebook(request.rules)
    device, chosen = choose_device(request.device, rulebook)
    with provers(
        device.capability, rulebook.verify, check=request.verify, compile=request.compile
    ) as children:
        listener.stage("capture")
        loaded = load(request.model, request.scenario)
        listener.assumed((chosen, *loaded.assumed))
        kind = str(getattr(getattr(loaded.module, "config", None), "model_type", "model"))
        name = "".join(c if c.isalnum() else "_" for c in kind)
        package = root / f"fused_{name}"
        if package.exists():
            raise UsageError(f"{package}: is there already; remove it, or give another --root")
        listener.stage("group")
        found = placed(
            loaded.module, loaded.args, loaded.kwargs, request.scenario, device, rulebook, name,
            children, _stands_alone, objects=False, least=request.least,
        )  # fmt: skip
    signed = {
        kernel.entry: stamped(kernel.text, stamp_of(request, check, rulebook))
        for kernel, check in found.kernels.items()
    }
    texts = _package(found, signed, loaded.module, package.name)
    made = Patch(
        found.made.puts, found.made.refused, {}, {package / p: t for p, t in texts.items()}
    )
    diff = made.diff(root)
    listener.stage("try")
    flow = found.originals[0][2]
    wrong: dict[str, str] = {}
    given = loaded.args, loaded.kwargs
    trials = [(said, scenario, before, given) for said, scenario, before in found.originals]
    trials += [
        (each.said, found.originals[0][1], each.flow, resized(given, each.sizes))
        for each in found.resized
    ]
    if made.puts:
        with patched_copy(diff, made.after, root) as copy, _imported(copy, package.name) as fused:
            if fused.fuse(loaded.module) is not loaded.module:
                raise AssertionError("fuse gives its model back")
            for said, scenario, before, inputs in trials:
                try:
                    graph = capture_module(
                        loaded.module, *inputs, scenario, references=package.name, breaks=False
                    )
                    differs = difference(before, dataflow(graph, device))
                except CaptureError as error:
                    differs = str(error)
                if differs:
                    wrong[said] = differs.replace(f"{copy}/", "")
    listener.stage("report")
    free = fuse(flow, rulebook, decided=found.decided).groups
    return Patched(
        made, diff if made.puts else "", "", root,
        tuple(said for said, *_ in trials), wrong,
        found.unplaced,
        sum(finding.saved_us_total for finding in free),
        sum(put.finding.saved_us_total for put in made.puts),
    )  # fmt: skip


@contextmanager
def _imported(folder: Path, package: str) -> Generator[Any, None, None]:
    """Import a package from a folder, and forget it afterwards."""
    before = sys.modules.keys() | set[str]()
    sys.path.insert(0, str(folder))
    try:
        yield importlib.import_module(package)
    finally:
        sys.path.remove(str(folder))
        for name in sys.modules.keys() - before:
            if name.partition(".")[0] == package:
                del sys.modules[name]


def _stands_alone(function: FunctionType) -> bool:
    """Whether a function means the same in another class of another file: it closes over nothing,
    `super()` included, and has no names that Python mangles."""
    code = function.__code__
    mangled = any(name.startswith("__") and not name.endswith("__") for name in code.co_names)
    return not (code.co_freevars or "<" in code.co_qualname or mangled)


# The package.


def _package(
    found: PlacedKernels, kernels: Mapping[str, str], model: torch.nn.Module, package: str
) -> dict[Path, str]:
    """Texts of the package's files, by their paths in it; `kernels` are those of the
    kernels' files."""
    changed = found.changed | found.callers.keys()
    files = {file: Path(file).stem for file in sorted({file for file, _ in changed})}
    if len({*files.values()}) < len(files):
        raise UsageError(f"{package}: two files of transformers that change have one name")
    derived = _derived(found, model, changed)
    made = {
        Path(f"{stem}.py"): _module(found, file, files, changed, derived, package)
        for file, stem in files.items()
    }
    made |= package_files(Path("kernels"), kernels)
    made[Path("__init__.py")] = _front(found, changed, derived, files, package)
    return made


def _derived(
    found: PlacedKernels, model: torch.nn.Module, changed: set[Key]
) -> dict[type, dict[str, Key]]:
    """Classes of the model's modules that change, with the functions of the attributes that do."""
    derived: dict[type, dict[str, Key]] = {}
    for cls in dict.fromkeys(type(module) for module in model.modules()):
        for name in dict.fromkeys(n for base in cls.__mro__ for n in vars(base)):
            owner = next(base for base in cls.__mro__ if name in vars(base))
            value = found.functions.attributes.get((owner, name))
            own = [this for this in changed if found.functions.leads_to(value, {this})]
            if own:
                derived.setdefault(cls, {})[name] = own[0]
    return derived


def _module(
    found: PlacedKernels,
    file: str,
    files: Mapping[str, str],
    changed: set[Key],
    derived: Mapping[type, Mapping[str, Key]],
    package: str,
) -> str:
    """Text of one file of the package: the functions of a transformers file that change, and the
    classes derived from those in it."""
    source = SourceFile.of(file, found.texts[file])
    functions = {
        source.qualname(node): node for node in ast.walk(source.tree) if isinstance(node, Function)
    }
    methods = {this for attributes in derived.values() for this in attributes.values()}
    plain = sorted(
        (functions[qualname].lineno, qualname)
        for at, qualname in changed
        if at == file and (at, qualname) not in methods
    )
    classes = {
        cls: attributes
        for cls, attributes in derived.items()
        if _home(attributes.values(), files) == file
    }
    names: dict[str, Any] = {}
    needed = [functions[q] for _, q in plain]
    blocks = [_text(source, functions[qualname], "") for _, qualname in plain]
    for cls, attributes in classes.items():
        body: list[str] = []
        for name, (at, qualname) in attributes.items():
            if at != file:
                raise UsageError(f"{cls.__name__}: its methods that change are of several files")
            function = functions[qualname]
            needed.append(function)
            body.append(_text(source, function, "    "))
            if found.functions.found[at, qualname] is getattr(cls, name) and name != function.name:
                body.append(f"    {name} = {function.name}\n")  # a decorator of the class put it so
        blocks.append(f"class Fused{cls.__name__}({cls.__name__}):\n" + "\n".join(body))
    given = next(f for (at, _), f in found.functions.found.items() if at == file).__globals__
    own = {qualname for _, qualname in plain}
    for function in needed:
        loads = {n.id for n in ast.walk(function) if isinstance(n, ast.Name)}
        known = {"torch": torch, **given}  # guards name it, whatever the file imports
        names |= {n: known[n] for n in sorted(loads - own) if n in known and n != package}
    imports = _imports(names, str(given["__name__"]), files, found.functions, changed)
    bases = sorted(f"from {cls.__module__} import {cls.__name__}\n" for cls in classes)
    listed = ", ".join(f"{cls.__name__}: Fused{cls.__name__}" for cls in classes)
    return (
        f'{_COPIED}\n"""What changes in {given["__name__"]}: written by fusion-advisor."""\n\n'
        f"from __future__ import annotations\n\n{imports}{''.join(bases)}\n"
        f"from . import kernels as {package}\n\n\n"
        + "\n\n".join(blocks)
        + f"\n\nCLASSES = {{{listed}}}\n"
    )


def _home(methods: Iterable[Key], files: Mapping[str, str]) -> str:
    """File that a derived class is written in."""
    return next(file for file, _ in methods if file in files)


def _text(source: SourceFile, function: Function, indent: str) -> str:
    """Text of a function with its decorators, as written."""
    first = min([function.lineno, *(d.lineno for d in function.decorator_list)])
    lines = source.text.splitlines(keepends=True)[first - 1 : function.end_lineno]
    return textwrap.indent(textwrap.dedent("".join(lines)).rstrip() + "\n", indent)


def _imports(
    names: Mapping[str, Any],
    module: str,
    files: Mapping[str, str],
    functions: Functions,
    changed: set[Key],
) -> str:
    """Statements that bind names to what they are in a module of transformers."""
    lines: dict[str, None] = {}
    others: list[str] = []
    for name, value in names.items():
        if isinstance(value, ModuleType):
            alias = "" if name == value.__name__ else f" as {name}"
            lines[f"import {value.__name__}{alias}"] = None
            continue
        sibling = next((this for this in changed if functions.leads_to(value, {this})), None)
        if sibling is not None and not isinstance(value, type):
            lines[f"from .{files[sibling[0]]} import {name}"] = None
        elif getattr(builtins, name, None) is not value:
            others.append(name)
    listed = "".join(f"    {name},\n" for name in sorted(others))
    plain = f"from {module} import (\n{listed})\n" if others else ""
    return "".join(f"{line}\n" for line in sorted(lines)) + plain


def _front(
    found: PlacedKernels,
    changed: set[Key],
    derived: Mapping[type, Mapping[str, Key]],
    files: Mapping[str, str],
    package: str,
) -> str:
    """Text of `fuse`, with the hashes of the source that the package was made of."""
    import transformers

    hashes: dict[str, dict[str, str]] = {}
    for cls in derived:
        hashes.setdefault(cls.__module__, {})[cls.__qualname__] = _hash(cls)
    for this in changed:
        function = found.functions.found[this]
        if "." not in this[1]:
            hashes.setdefault(function.__module__, {})[this[1]] = _hash(function)
    rows = "".join(
        f'    "{module}": {{\n'
        + "".join(f'        "{name}": "{known}",\n' for name, known in sorted(of.items()))
        + "    },\n"
        for module, of in sorted(hashes.items())
    )
    homes = sorted({files[_home(attributes.values(), files)] for attributes in derived.values()})
    imported = "".join(f"    from .{home} import CLASSES as {home}\n" for home in homes)
    merged = " | ".join(homes)
    return _FRONT.format(
        licence=LICENSE,
        package=package,
        version=transformers.__version__,
        rows=rows,
        imported=imported,
        merged=merged,
    )


def _hash(made_of: Any) -> str:
    return sha256(inspect.getsource(made_of).encode()).hexdigest()[:16]


_COPIED = "# SPDX-License-Identifier: Apache-2.0"
"""Licence of transformers, whose functions these are, edited."""

_FRONT = '''{licence}
"""Kernels for a model of transformers {version}, written by fusion-advisor.

    from {package} import fuse

    fuse(model)
"""

import importlib
import inspect
import warnings
from hashlib import sha256

_MADE_OF = {{
{rows}}}


def fuse(model):
    """Let the kernels run in a model, in place; gives it back. Its parameters stay as they are."""
    problem = _changed()
    if problem:
        warnings.warn(f"{package}: {{problem}}; the model stays as it is", stacklevel=2)
        return model
{imported}
    classes = {merged}
    for module in model.modules():
        module.__class__ = classes.get(type(module), type(module))
    return model


def _changed():
    """What is not as in transformers {version}; None where all is."""
    for module, known in _MADE_OF.items():
        try:
            found = importlib.import_module(module)
            source = {{name: inspect.getsource(getattr(found, name)) for name in known}}
        except (ImportError, AttributeError, OSError) as error:
            return f"made for transformers {version}: {{error}}"
        for name, text in source.items():
            if sha256(text.encode()).hexdigest()[:16] != known[name]:
                return f"made for transformers {version}, whose {{name}} is another"
    return None


__all__ = ["fuse"]
'''
