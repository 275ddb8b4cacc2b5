"""Workflow of `fusion_advisor.export`: a model as a folder that runs without this package, of a
program of `torch.export`, its kernels, and a loader. The folder imports torch and Triton alone.
"""
# The model and its inputs are whatever the user has.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import dataclasses
import inspect
import sys
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from keyword import iskeyword
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from fusion_advisor.codegen.kernel_package import package_files
from fusion_advisor.dynamo.exported import with_kernels
from fusion_advisor.frontend.user_model import failure, given_inputs
from fusion_advisor.ir.kernel import LICENSE, Kernel
from fusion_advisor.rulebook.load import load_rulebook
from fusion_advisor.rulebook.local_gpu import choose_device, gpu_names, require_triton
from fusion_advisor.support.errors import AdvisorError, UsageError
from fusion_advisor.support.files import require_folder, whole_folder, write
from fusion_advisor.verify.driver import Provers, holds, provers
from fusion_advisor.verify.driver import verify as checked
from fusion_advisor.workflows.apply import Gathered
from fusion_advisor.workflows.placed import Placed

PROGRAM, LOADER = "program.pt2", "program.py"
"""Files of a folder beside its kernels: the program, and what loads it."""

_LOADER = f'''{LICENSE}
"""Loader of the program beside this file, which fusion-advisor exported. It needs torch and Triton
alone, and runs on the device that the model was on."""

import importlib.util
import sys
from pathlib import Path

import torch

PACKAGE = "{{package}}"
"""Package that the program's operators are named after, wherever the folder lies."""
HERE = Path(__file__).resolve().parent


def load():
    """Load the program: a module that is called as the model was, with the kernels in it, without
    gradients."""
    if PACKAGE not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            PACKAGE, HERE / "__init__.py", submodule_search_locations=[str(HERE)]
        )
        kernels = importlib.util.module_from_spec(spec)
        sys.modules[PACKAGE] = kernels
        spec.loader.exec_module(kernels)
    found = Path(sys.modules[PACKAGE].__file__).resolve().parent
    if found != HERE:
        raise ImportError(f"{{{{HERE}}}}: {{{{PACKAGE}}}} is imported from {{{{found}}}} already")
    return torch.export.load(HERE / "{PROGRAM}").module().requires_grad_(False)
'''


_BROUGHT = ("aten", "prim", "prims", "higher_order", "fusion_advisor")
"""Namespaces of operators that torch and a folder's kernels bring."""


@dataclass
class Exported(Placed):
    """Account of the kernels in an exported program, and the folder that it is in."""

    folder: Path = field(kw_only=True)


def export(
    model: torch.nn.Module,
    folder: str | Path,
    example_inputs: Any = (),
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    device: str | None = None,
    rules: Sequence[str | Path] = (),
    verify: bool = True,
) -> Exported:
    """Write a model as a folder that needs torch and Triton alone: `program.pt2`, the kernels of
    all accepted groups, each checked against float64 with `verify`, and `program.py`, whose
    `load()` gives the model back.

    The example inputs are as `apply` takes them. `dynamic_shapes` is torch.export's; without it
    every size of a tensor may change where the model allows that. The model is exported as it is
    (`eval()` first), without gradients, and stays as it is. A record that it returns, such as an
    output of transformers, becomes a dict, and every kind of tuple a tuple. What the folder needs
    beyond torch and Triton, operators and containers of other libraries, is warned of in one line.
    Raises UsageError for a folder that is there or whose name is no name of a package, CaptureError
    for a model that torch.export cannot trace.
    """
    folder = Path(folder)
    if not folder.name.isidentifier() or iskeyword(folder.name):
        raise UsageError(f"export: {folder.name} is no name of a package; give letters, digits, _")
    if _is_taken(folder):
        raise UsageError(f"export: {folder.name} is the name of a package that is there already")
    if folder.exists() or folder.is_symlink():
        raise UsageError(f"export: {folder} is there already; remove it or give another folder")
    if not isinstance(model, torch.nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(f"export: {type(model).__name__} is no torch.nn.Module")
    require_triton("export")
    require_folder(folder.parent)
    args, kwargs = given_inputs(example_inputs)
    kwargs |= example_kwargs or {}
    rulebook = load_rulebook(tuple(map(Path, rules)))
    chosen, _ = choose_device(device, rulebook, gpu_names())
    shapes = _every_size(model, args, kwargs) if dynamic_shapes is None else dynamic_shapes
    with provers(chosen.capability, rulebook.verify, check=verify, compile=verify) as children:

        def proven(kernels: Sequence[Kernel]) -> list[str]:
            return _faults(kernels, children)

        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # torch's, of its own parts
            with _told(f"exporting {type(model).__name__}"):
                program = _traced(model, args, kwargs, shapes)
                program, outcome = with_kernels(program, chosen, rulebook, folder.name, proven)
    done = Exported(folder=folder)
    Gathered(done).add(outcome)
    kernels = {place.kernel.entry: place.kernel.text for place in outcome.taken if place.kernel}
    with whole_folder(folder) as made, _told(f"writing {folder}"):
        for file, text in package_files(folder, kernels).items():
            write(made / file.name, text)
        write(made / LOADER, _LOADER.format(package=folder.name))
        torch.export.save(program, made / PROGRAM)
        torch.export.load(made / PROGRAM)  # what torch can write it cannot always read
    if needs := sorted({*_needed(program)}):
        warnings.warn(
            f"fusion_advisor.export: {folder} needs {', '.join(needs)}: import what registers "
            "that before load()", stacklevel=2,
        )  # fmt: skip
    return done


@contextmanager
def _told(stage: str) -> Generator[None]:
    """Make one line of what torch.export raises."""
    try:
        yield
    except AdvisorError:
        raise
    except Exception as error:
        raise failure(stage, error, "torch.export has to do it: try that alone") from error


def _traced(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], shapes: Any
) -> torch.export.ExportedProgram:
    """The program of a model, whose results have no classes of its library."""

    def plain(module: Any, given: Any, result: Any) -> Any:
        return _plain(result)

    hook = model.register_forward_hook(plain)
    try:
        return torch.export.export(model, args, kwargs, dynamic_shapes=shapes)
    finally:
        hook.remove()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    if dataclasses.is_dataclass(value):
        return {each.name: _plain(getattr(value, each.name)) for each in dataclasses.fields(value)}
    if isinstance(value, list | tuple):
        return (list if isinstance(value, list) else tuple)(map(_plain, value))
    return value


def _is_taken(folder: Path) -> bool:
    """Whether an import of the folder's name has another meaning here."""
    if folder.name in sys.stdlib_module_names:
        return True
    try:
        found = find_spec(folder.name)
    except ValueError:  # `__main__`
        return True
    places = (found.submodule_search_locations or ()) if found else ()
    return found is not None and folder.absolute() not in map(Path, places)


def _needed(program: torch.export.ExportedProgram) -> Iterator[str]:
    """Yield operators and containers that neither torch nor this package's kernels bring."""
    for node in program.graph.nodes:
        if getattr(node.target, "namespace", "aten") not in _BROUGHT:
            yield str(node.target)
    todo = [program.call_spec.in_spec, program.call_spec.out_spec]
    while todo:
        spec: Any = todo.pop()
        if spec is None or spec.type is None:
            continue
        root = spec.type.__module__.partition(".")[0]
        if root not in ("builtins", "collections", "torch"):
            yield f"{spec.type.__module__}.{spec.type.__qualname__}"
        todo += spec.children()


def _every_size(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any] | None:
    """Dynamic shapes in which every size of every tensor may change; None, which fixes all, where
    torch.export has no way to say it."""
    auto = torch.export.Dim.AUTO

    def sizes(value: Any) -> Any:
        return dict.fromkeys(range(value.dim()), auto) if isinstance(value, torch.Tensor) else None

    taken = inspect.signature(model.forward)
    try:
        given = taken.bind(*args, **kwargs).arguments
    except TypeError as error:
        raise UsageError(f"export: the inputs do not fit forward{taken}: {error}") from error
    if any(given.get(n) for n, each in taken.parameters.items() if each.kind is each.VAR_KEYWORD):
        warnings.warn(
            "fusion_advisor.export: every size is fixed: forward takes **keywords, for which "
            "torch.export knows no sizes that change", stacklevel=3,
        )  # fmt: skip
        return None
    return pytree.tree_map(sizes, dict(given))


def _faults(kernels: Sequence[Kernel], children: Provers) -> list[str]:
    """Why each kernel may not run; "" of one that passed what was asked for."""
    return [
        next(f"{each.failure}" for each in (compiled, check) if each and each.failure)
        if not holds(check, compiled)
        else ""
        for check, compiled in checked(kernels, children)
    ]
