"""`with fusion_advisor.record(model):` keeps what a running program calls its model with.

Within the block each call of the model is noted by its signature: how the arguments nest, each
tensor's shape, strides, dtype and device, the numbers and strings among them, the mode of every
module, autocast, and whether gradients are on. As the block ends each distinct signature is
captured on fake tensors, in a copy of the model that has no weights, and all goes into one file for
`fusion-advisor analyze` (`ir/recording_file.py` has its format). Of tensors it has no data, and no
GPU memory is used.

The model runs as it does without: its results, its exceptions, its state and the generators of
random numbers are the same. Noting a call takes the host some tenths of a millisecond. What is
called from within a call of the model is part of that call. Its Python code runs once more for each
signature as the block ends, on fake tensors: what it does to itself, or to what it holds, happens
to the copy, but what it does elsewhere (prints, a hook that appends to a list) happens once more.

- A block that raises leaves no file, and neither does one in which the model was not called: that
  is a warning. What was left out or could not be captured is a warning, too, and in the file.
- `record` takes what the program calls: the wrapper, where it is DistributedDataParallel,
  DataParallel or what torch.compile gave. It is taken off for the capture. Calls that compiled code
  makes are not seen. FSDP's shards cannot be captured.
- Other recordings, of the same model or of a part of it, may be open meanwhile. Of several
  processes let one record. No other thread may run a model as the block ends.
- Each signature is captured with the model as it is by then, but for the modes of its modules.
"""
# Arguments and results are whatever the user's program has.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportMissingTypeStubs=false
# pyright: reportPrivateUsage=false

from __future__ import annotations

import copy
import random
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal

import torch
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from fusion_advisor.frontend.child import Then, capture_loaded
from fusion_advisor.frontend.export import unwrapped
from fusion_advisor.frontend.signature import (
    Part,
    as_data,
    elements,
    fakes,
    objects_known,
    signature,
    sizes,
    undescribed,
    without_sizes,
)
from fusion_advisor.frontend.user_model import HostFakeMode, Loaded
from fusion_advisor.ir.frames import is_user
from fusion_advisor.ir.graph import Graph
from fusion_advisor.ir.recording_file import LeftOut, RecordedCall, Recording, write_recording
from fusion_advisor.ir.scenario import Scenario
from fusion_advisor.rulebook.load import load_rulebook
from fusion_advisor.rulebook.local_gpu import versions
from fusion_advisor.rulebook.schema import Rulebook
from fusion_advisor.support.codec import to_data
from fusion_advisor.support.errors import CaptureError, UsageError
from fusion_advisor.support.files import content_hash, require_folder

FILE = "fusion-advisor.recording.json"


@contextmanager
def record(
    model: torch.nn.Module, file: str | Path = FILE, *, rules: Sequence[Path] = ()
) -> Generator[None]:
    """Notes the calls of a model within the block; as it ends, captures each distinct one and
    writes the file.

    Calls whose sizes differ little (`[record] apart` of `rules/model.toml`), as those of a cache
    that grows with every token, count as one, captured at their median size. At most `[record]
    captured` are captured: where there are more, those count as one that differ in sizes and
    numbers alone; of what are more even then, the most frequent. Raises UsageError at once where
    the file cannot be written or the rules are wrong, and CaptureError for a model in FSDP and a
    ScriptModule.
    """
    rulebook = load_rulebook(rules)
    if not isinstance(model, torch.nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise UsageError(f"record takes a torch.nn.Module, not {type(model).__name__}")
    place = Path(file).absolute()
    if place.is_dir():
        raise UsageError(f"{file}: a folder; give a file to write")
    require_folder(place.parent)
    seen = _Seen(model)
    with seen.watching():
        yield
    if seen.counts:
        recording, far = _recording(seen, rulebook, place)
        write_recording(recording)
        for line in _lacks(recording, rulebook.record.captured.count, far=far):
            _warn(f"{file}: {line}")
    else:
        _warn(f"{file}: is not written, for the block did not call the {_name(model)}")


def _recording(seen: _Seen, rulebook: Rulebook, file: Path) -> tuple[Recording, bool]:
    """Recording of the calls seen, with the graphs of the most frequent calls; and whether some
    calls stand for others whose sizes are far apart."""
    most = rulebook.record.captured.count
    alike = _near(seen.counts, rulebook.record.apart.value)
    far = len(alike) > most
    if far:
        alike = _alike(seen.counts)
    frequent = sorted(alike, key=lambda counts: -counts.total())[:most]
    chosen = [counts for counts in alike if counts in frequent]
    rest = [counts for counts in alike if counts not in frequent]
    calls = [
        _call(f"call-{number}", seen, each, rulebook) for number, each in enumerate(chosen, start=1)
    ]
    left_out = LeftOut(sum(map(len, rest)), sum(counts.total() for counts in rest))
    recording = Recording(
        versions(), _name(seen.bare), tuple(calls), left_out, _sources(calls), file
    )
    return recording, far


def _alike(
    counts: Counter[_Made], numbers: tuple[type, ...] = (int, float)
) -> list[Counter[_Made]]:
    """The signatures, those together that differ in sizes and numbers of these types alone, in the
    order of their first."""
    groups: dict[_Made, Counter[_Made]] = {}
    for made, count in counts.items():
        groups.setdefault(made.without_sizes(numbers), Counter())[made] = count
    return [*groups.values()]


def _near(counts: Counter[_Made], apart: float) -> list[Counter[_Made]]:
    """Group signatures that differ in sizes and whole numbers alone, where each size is at most the
    share `apart` away from the next; in the order of their first."""
    groups: list[Counter[_Made]] = []
    for kin in _alike(counts, (int,)):
        before: tuple[int, ...] | None = None
        for made in sorted(kin, key=lambda made: sizes(made.arguments)):
            here = sizes(made.arguments)
            if before is None or any(
                abs(one - other) > apart * max(abs(one), abs(other))
                for one, other in zip(before, here, strict=True)
            ):
                groups.append(Counter())
            groups[-1][made] = kin[made]
            before = here
    place = {made: number for number, made in enumerate(counts)}
    return sorted(groups, key=lambda group: min(place[made] for made in group))


def _median(counts: Counter[_Made]) -> _Made:
    """The call of median size."""
    by_size = sorted(counts, key=lambda made: elements(made.arguments))
    upto = accumulate(counts[made] for made in by_size)
    return next(
        made for made, calls in zip(by_size, upto, strict=True) if 2 * calls > counts.total()
    )


def _lacks(recording: Recording, most: int, *, far: bool) -> Iterator[str]:
    """One line for each thing that is not captured; `far` where some calls stand for others that
    are not near them."""
    left_out = recording.left_out
    for call in recording.calls:
        if far and call.signatures > 1:
            yield (
                f"{call.name} ({call.count} calls) stands for {call.signatures} signatures that "
                f"differ in sizes and numbers alone, for there are over {most}; it is captured "
                "at their median size"
            )
    if left_out.calls:
        yield (
            f"{left_out.calls} calls of {left_out.signatures} signatures are left out, for the "
            f"{most} most frequent are captured; [record] captured in the rules says how many"
        )
    for call in recording.calls:
        if call.failure:
            yield f"{call.name} ({call.count} calls) could not be captured: {call.failure}"


@dataclass(frozen=True, slots=True)
class _Made:
    """The way a call is made; equal for calls that launch the same. `modes` has for each module
    whether it is in train mode, the model first."""

    arguments: Part
    modes: tuple[bool, ...]
    autocast: str | None
    grad: bool

    def without_sizes(self, numbers: tuple[type, ...]) -> _Made:
        """Key that is equal for calls that differ in sizes and numbers of these types alone."""
        return replace(self, arguments=without_sizes(self.arguments, numbers))

    @property
    def train(self) -> bool:
        """The mode of the model itself."""
        return self.modes[0]


class _Seen:
    """The calls of a model, counted by how they are made, in the order of their first."""

    def __init__(self, model: torch.nn.Module) -> None:
        if isinstance(model, torch.jit.ScriptModule):
            raise CaptureError(
                f"{_name(model)} has no calls that can be seen: give record the module as it is "
                "before torch.jit makes it a script"
            )
        self.counts: Counter[_Made] = Counter()
        self.bare, self.notes = unwrapped(model)
        self.modules = dict(self.bare.named_modules())
        self._every = [*self.modules.values()]
        self._model = model
        self._lock = threading.Lock()
        self._depth = threading.local()

    @contextmanager
    def watching(self) -> Generator[None]:
        """Counts what is called within the block."""
        compiled: Any = getattr(self._model, "_compiled_call_impl", None)
        with ExitStack() as stack:
            if compiled is None:
                for handle in self._hooks():
                    stack.callback(handle.remove)
            else:  # hooks would be compiled into it
                self._model._compiled_call_impl = self._around(compiled)
                stack.callback(setattr, self._model, "_compiled_call_impl", compiled)
            yield

    def _hooks(self) -> list[Any]:
        """Functions, for a copy of the model copies what its hooks are bound to."""

        def before(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
            # A copy of the model has its hooks, and torch.compile looks into them.
            if not torch.compiler.is_compiling() and module is self._model:
                self._enter(args, kwargs)

        def after(module: torch.nn.Module, args: Any, result: Any) -> None:
            if not torch.compiler.is_compiling() and module is self._model:
                self._leave()

        return [
            self._model.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
            self._model.register_forward_hook(after, always_call=True),
        ]

    def _around(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            self._enter(args, kwargs)
            try:
                return compiled(*args, **kwargs)
            finally:
                self._leave()

        return noted

    def _enter(self, args: Any, kwargs: Any) -> None:
        depth = getattr(self._depth, "value", 0)
        self._depth.value = depth + 1
        if not depth:
            made = self._made(args, kwargs)
            with self._lock:
                self.counts[made] += 1

    def _leave(self) -> None:
        self._depth.value = max(0, getattr(self._depth, "value", 0) - 1)

    def _made(self, args: Any, kwargs: Any) -> _Made:
        autocast = None
        device = _device(self.bare)
        if torch.is_autocast_enabled(device):
            autocast = str(torch.get_autocast_dtype(device)).removeprefix("torch.")
        return _Made(
            signature((args, kwargs)),
            tuple([module.training for module in self._every]),
            autocast,
            torch.is_grad_enabled(),
        )


def _call(name: str, seen: _Seen, counts: Counter[_Made], rulebook: Rulebook) -> RecordedCall:
    """Calls that were made alike, with their graph or with why there is none."""
    made = _median(counts)
    graph: Graph | None = None
    failure = ""
    try:
        graph = _captured(seen, made, rulebook.capture.mask_elements.count)
    except CaptureError as error:
        failure = str(error)
    except Exception as error:  # noqa: BLE001 the program goes on; the file says what it lacks
        failure = f"capture failed: {_said(error)}"
    arguments = as_data(made.arguments)
    if isinstance(arguments, list):
        arguments = dict(zip(("args", "kwargs"), arguments, strict=True))
    others = [at for at, mode in zip(seen.modules, made.modes, strict=True) if mode != made.train]
    return RecordedCall(
        name=name,
        count=counts.total(),
        signatures=len(counts),
        mode=_mode(made),
        grad=made.grad,
        autocast=made.autocast,
        signature={**arguments, "modules_in_other_mode": others},
        graph=to_data(graph) if graph else None,
        failure=failure,
    )


def _captured(seen: _Seen, made: _Made, mask_elements: int) -> Graph:
    """The graph of calls that are made like this one. Raises CaptureError."""
    asked = Scenario(mode=_mode(made), autocast=made.autocast, grad=made.grad)
    modes = dict(zip(seen.modules, made.modes, strict=True))
    graph = captured_bare(seen.bare, made.arguments, modes, asked, mask_elements)
    return replace(graph, differs_from_eager=(*seen.notes, *graph.differs_from_eager))


def captured_bare(
    model: torch.nn.Module,
    arguments: Part,
    modes: Mapping[str, bool],
    asked: Scenario,
    mask_elements: int,
    then: Then | None = None,
) -> Graph:
    """Graph of a live model without wrappers for arguments like these, captured on a copy that has
    no weights; `modes` says of modules by their paths whether they are in train mode. The model and
    the process stay as they are. Raises CaptureError where the model cannot be captured."""
    if why := undescribed(arguments):
        raise CaptureError(why)
    fake = HostFakeMode()
    with undisturbed(), objects_known(arguments):
        bare = without_weights(model, fake)
        for name, mode in modes.items():
            bare.get_submodule(name).training = mode
        args, kwargs = fakes(arguments, fake)
        loaded = Loaded(bare, args, kwargs, fake, _name(bare), breaks=False)
        return capture_loaded(loaded, asked, mask_elements, then)


def without_weights(model: torch.nn.Module, fake: FakeTensorMode) -> torch.nn.Module:
    """A copy whose tensors all belong to the fake mode, whatever holds them."""
    try:
        with FakeCopyMode(fake):
            return copy.deepcopy(model)
    except Exception as error:
        raise CaptureError(
            f"the {_name(model)} cannot be copied: {_said(error)}; keep what cannot be copied out "
            "of its attributes"
        ) from error


@contextmanager
def undisturbed() -> Generator[None]:
    """Leaves the generators of random numbers as they are, and lets nothing that the program has
    turned on around the block change what is captured."""
    numpy = sys.modules.get("numpy")
    drawn, drawn_by_numpy = random.getstate(), numpy.random.get_state() if numpy else None
    enabled = [(device, torch.is_autocast_enabled(device)) for device in ("cpu", "cuda")]
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), _disable_current_modes():
        for device, _ in enabled:
            torch.set_autocast_enabled(device, False)
        try:
            yield
        finally:
            for device, on in enabled:
                torch.set_autocast_enabled(device, on)
            random.setstate(drawn)
            if numpy:
                numpy.random.set_state(drawn_by_numpy)


def _device(model: torch.nn.Module) -> str:
    """Device type whose autocast holds for a model: that of its parameters, if it has any."""
    parameter = next(model.parameters(), None)
    device = torch.get_default_device() if parameter is None else parameter.device
    return device.type if torch.amp.is_autocast_available(device.type) else "cpu"


def _sources(calls: Iterable[RecordedCall]) -> dict[str, str]:
    """The user's own files that graphs name, by their content."""
    nodes = (node for call in calls if call.graph for node in call.graph["nodes"])
    files = sorted({node["source"][0] for node in nodes if node["source"]})
    return {file: content_hash(Path(file)) for file in files if is_user(file)}


def _mode(made: _Made) -> Literal["eval", "train"]:
    return "train" if made.train else "eval"


def _name(model: torch.nn.Module) -> str:
    return type(model).__name__


def _said(error: Exception) -> str:
    """An exception in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def _warn(line: str) -> None:
    warnings.warn(f"fusion_advisor: {line}", stacklevel=4)  # at the end of the user's block
