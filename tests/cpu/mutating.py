"""Seeded mutants of an emitted kernel: the checker is only as good as what it catches.

`mutants` changes one thing in a `@triton.jit` function (or one program in the launch grid) of
the file's text. A mutant that no check can tell from the original carries the argument why in
`equivalent`; such mutants are returned too, so that they can be counted and read, never silently
dropped. The arguments are:

- ALWAYS_TRUE: a tile of one row (the constexpr is 1) makes `row < rows` true for every program;
- UNREAD: the value that a masked lane loads reaches only masked stores and re-masked reductions;
- STORE_CASTS: `tl.store` itself rounds to the type of the pointer;
- SAME_TYPE: a cast of a load to the type that its pointer already has;
- LESS_ROUNDING: taking a rounding away brings the value nearer to fp64, which the criterion
  (no further from fp64 than eager) allows by design;
- FEW_PARTS: the sum of a few partial results in fp32 instead of fp64, as CUDA's own sums are made:
  the criterion's margin for results out of parts (`partial_ulps`) allows it;
- ONLY_SQUARED: the sign of a difference that is only ever squared;
- NEUTRAL_ALREADY: the masked lanes hold the neutral element already, from their loads' `other`;
- PROMOTED: Triton widens this operand by itself, because the other one is fp32;
- NAN_AGAIN: a softmax's maximum only shifts: every NaN of the row reaches its sum anyway;
- SENTINEL: a masked score of −10⁴ or less; its exponential is 0 either way, and among fp16
  scores it is no row's maximum;
- CORRECTED: a mean whose remainder is taken back from the deviations: `p = x - sum(x) / n`, then
  `p - sum(p) / n`. The first sum may be off in proportion; the second one is a rounding's worth;
- WAITING: it only says whether programs wait for each other; those of the interpreter never do, and
  nothing of what they compute hangs on it;
- MARGIN: partial sums are combined in float64, closer than eager's own float32 sums are made;
- IN_BLOCKS: random bits begin at a block of four or eight elements, so that one element more for
  each program before it changes nothing for the first few programs, and the cases have no others;
- EQUAL_STRIDES: in every case both tensors have the same strides: the cases are to blame.
"""

from __future__ import annotations

import ast
import copy
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

from fusion_advisor.ir.kernel import Kernel
from fusion_advisor.shipped.files import DEVICE, HOST, texts

ALWAYS_TRUE = "the tile is one row high, so the row mask is true in every program"
UNREAD = "masked lanes of this load reach only masked stores and re-masked reductions"
STORE_CASTS = "tl.store rounds to the pointer's type itself"
SAME_TYPE = "the load has this type already"
LESS_ROUNDING = "a rounding less is nearer to fp64, which the criterion allows"
FEW_PARTS = "a few partial results summed in fp32, which the margin of such results allows"
ONLY_SQUARED = "the difference is only ever squared"
NEUTRAL_ALREADY = "masked lanes hold the neutral element already, from their loads"
PROMOTED = "the other operand is fp32, to which Triton widens this one"
NAN_AGAIN = "the maximum only shifts a softmax, whose sum sees every NaN itself"
SENTINEL = "a masked score, whose exponential is 0 either way"
CORRECTED = "the mean's remainder is taken back from the deviations, to within a rounding"
WAITING = "only whether programs wait hangs on it, and those of the interpreter never do"
MARGIN = "float64 keeps a margin here that the criterion does not ask for"
IN_BLOCKS = "random bits begin at a whole block, the same one for the few programs of the cases"
EQUAL_STRIDES = "both tensors have the same strides in every case"


@dataclass(frozen=True, slots=True)
class Mutant:
    """A changed file. `equivalent` is the argument why it cannot be told from the original."""

    kind: str
    description: str
    text: str
    equivalent: str | None = None


@dataclass(frozen=True, slots=True)
class _Edit:
    """Replace `old`, a node of the original tree, by `new`."""

    kind: str
    old: ast.AST
    new: ast.AST
    equivalent: str | None = None


@dataclass(frozen=True)
class _Scope:
    """One jit function, and what the arguments need to know about it."""

    function: ast.FunctionDef
    constants: dict[str, object]
    types: dict[str, str]
    strides: dict[str, tuple[tuple[int, ...], ...]]
    """The strides of each input in each case, by the input's name."""

    def nodes(self) -> Iterator[ast.AST]:
        for statement in self.function.body:
            yield from ast.walk(statement)

    def assignments(self) -> Iterator[tuple[str, ast.expr]]:
        for node in self.nodes():
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                yield node.targets[0].id, node.value

    def definition(self, name: str) -> ast.expr | None:
        return dict(self.assignments()).get(name)


# --- reading the tree ----------------------------------------------------------------------------


def _callee(node: ast.AST) -> str:
    """`tl.load` for the call `tl.load(…)`; empty for other nodes."""
    return ast.unparse(node.func) if isinstance(node, ast.Call) else ""


def _keyword(call: ast.Call, name: str) -> ast.keyword | None:
    return next((keyword for keyword in call.keywords if keyword.arg == name), None)


def _names(node: ast.AST) -> set[str]:
    return {child.id for child in ast.walk(node) if isinstance(child, ast.Name)}


def _is_jit(function: ast.FunctionDef) -> bool:
    return any(
        ast.unparse(decorator).startswith("triton.jit") for decorator in function.decorator_list
    )


def _is_combine(function: ast.FunctionDef) -> bool:
    """A combine function or helper: it neither loads nor stores."""
    memory = ("tl.load", "tl.store", "load_row", "store_row")
    return not any(_callee(node) in memory for node in ast.walk(function))


def _is_reduction(node: ast.AST) -> bool:
    return _callee(node) in ("tl.sum", "tl.max", "tl.min", "tl.reduce", "tl.argmax", "tl.argmin")


def _copy_without_keywords(call: ast.Call, *dropped: str) -> ast.Call:
    changed = copy.deepcopy(call)
    changed.keywords = [k for k in changed.keywords if k.arg not in dropped]
    return changed


# --- the arguments -------------------------------------------------------------------------------


def _always_true(scope: _Scope, term: ast.AST) -> str | None:
    """A comparison `index < size` whose index steps by a constexpr tile of 1."""
    if not (isinstance(term, ast.Compare) and isinstance(term.left, ast.Name)):
        return None
    index = scope.definition(term.left.id)
    tiles = {name for name in (_names(index) if index else ()) if name in scope.constants}
    return ALWAYS_TRUE if tiles and all(scope.constants[name] == 1 for name in tiles) else None


def _unread(scope: _Scope, load: ast.Call) -> str | None:
    """No path from the load to a reduction that does not pass a `tl.where`."""
    tainted: set[str] = set()

    def reaches(node: ast.AST) -> bool:
        if node is load or (isinstance(node, ast.Name) and node.id in tainted):
            return True
        if _callee(node) == "tl.where":
            return False  # re-masked
        return any(reaches(child) for child in ast.iter_child_nodes(node))

    for name, value in scope.assignments():
        for node in ast.walk(value):
            if _is_reduction(node) and any(reaches(argument) for argument in _arguments(node)):
                return None
        if reaches(value):
            tainted.add(name)
    for node in scope.nodes():
        if _callee(node) == "tl.store" and isinstance(node, ast.Call):
            if _keyword(node, "mask") is None and any(map(reaches, node.args)):
                return None
            if reaches(node.args[0]):
                return None
    return UNREAD


def _arguments(node: ast.AST) -> list[ast.expr]:
    return node.args if isinstance(node, ast.Call) else []


def _cast_argument(scope: _Scope, cast: ast.Call, parents: dict[ast.AST, ast.AST]) -> str | None:
    """Why dropping this cast changes nothing that the criterion holds."""
    assert isinstance(cast.func, ast.Attribute)
    inner, parent = cast.func.value, parents.get(cast)
    if _callee(parent or cast) == "tl.store" or _only_stored(scope, cast, parents):
        return STORE_CASTS
    target = ast.unparse(cast.args[0])
    if isinstance(inner, ast.Call) and _callee(inner) == "tl.load":
        pointers = [scope.types[name] for name in _names(inner.args[0]) if name in scope.types]
        if target == "tl.float32" and "*fp32" in pointers:
            return SAME_TYPE
    if target in ("tl.bfloat16", "tl.float16"):
        return LESS_ROUNDING
    if target == "tl.float64" and _callee(parent or cast) in ("tl.where", "tl.sum"):
        return FEW_PARTS
    return None


def _only_stored(scope: _Scope, cast: ast.AST, parents: dict[ast.AST, ast.AST]) -> bool:
    """Whether a value is given a name, and that to `tl.store` alone."""
    names = [name for name, value in scope.assignments() if value is cast]
    uses = [n for n in scope.nodes() if isinstance(n, ast.Name) and n.id in names]
    read = [n for n in uses if isinstance(n.ctx, ast.Load)]
    return bool(read) and all(_callee(parents.get(n) or n) == "tl.store" for n in read)


def _only_squared(scope: _Scope, difference: ast.AST) -> str | None:
    for name, value in scope.assignments():
        if value is difference:
            uses = [
                node
                for node in scope.nodes()
                if isinstance(node, ast.Name) and node.id == name and node.lineno > value.lineno
            ]
            squares = [
                node
                for node in scope.nodes()
                if isinstance(node, ast.BinOp)
                and isinstance(node.op, ast.Mult)
                and ast.unparse(node) == f"{name} * {name}"
            ]
            return ONLY_SQUARED if uses and len(uses) == 2 * len(squares) else None
    return None


def _on_masked_lanes(scope: _Scope, node: ast.expr) -> float | None:
    """The value of an expression where its loads are masked off; None: not known."""
    if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        return float(node.value)
    if isinstance(node, ast.Name):
        definition = scope.definition(node.id)
        return _on_masked_lanes(scope, definition) if definition else None
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        negated = _on_masked_lanes(scope, node.operand)
        return None if negated is None else -negated
    if isinstance(node, ast.Call):
        other = _keyword(node, "other")
        if _callee(node) == "tl.where":
            taken = _on_masked_lanes(scope, node.args[0])
            return None if taken is None else _on_masked_lanes(scope, node.args[1 if taken else 2])
        if _callee(node) == "tl.load" and other:
            return _on_masked_lanes(scope, other.value)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "to":
            return _on_masked_lanes(scope, node.func.value)
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.NotEq):
        sides = [_on_masked_lanes(scope, side) for side in (node.left, node.comparators[0])]
        return None if None in sides else float(sides[0] != sides[1])
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd):
        sides = [_on_masked_lanes(scope, side) for side in (node.left, node.right)]
        return 0.0 if 0.0 in sides else None
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub, ast.Mult)):
        left, right = (_on_masked_lanes(scope, side) for side in (node.left, node.right))
        if left is not None and right is not None:
            operations = {ast.Add: left + right, ast.Sub: left - right, ast.Mult: left * right}
            return operations[type(node.op)]
    return None


def _neutral_already(scope: _Scope, where: ast.Call) -> str | None:
    """The mask of a `tl.where` can go: its value and its neutral element agree there."""
    held = _on_masked_lanes(scope, where.args[1])
    if held is None:
        return None
    if held <= -1e4 and "-inf" in ast.unparse(where.args[2]) and "*fp16" in scope.types.values():
        return SENTINEL
    return NEUTRAL_ALREADY if held == _on_masked_lanes(scope, where.args[2]) else None


def _is_fp32(scope: _Scope, node: ast.expr) -> bool:
    """Certainly a block of fp32."""
    callee = _callee(node)
    if isinstance(node, ast.Name):
        definition = scope.definition(node.id)
        return definition is not None and _is_fp32(scope, definition)
    if isinstance(node, ast.BinOp):
        return _is_fp32(scope, node.left) or _is_fp32(scope, node.right)
    if callee.endswith(".to") and isinstance(node, ast.Call):
        return ast.unparse(node.args[0]) == "tl.float32"
    if callee in ("tl.div_rn", "tl.sum") and isinstance(node, ast.Call):
        return _is_fp32(scope, node.args[0])
    return callee.startswith("libdevice.")


def _promoted(scope: _Scope, cast: ast.Call) -> str | None:
    """Every use of the name that holds this cast meets an fp32 operand in plain arithmetic."""
    name = next((name for name, value in scope.assignments() if value is cast), None)
    if name is None:
        return None
    uses = [node for node in scope.nodes() if isinstance(node, ast.Name) and node.id == name]
    met: set[int] = set()
    for node in scope.nodes():
        if isinstance(node, ast.BinOp):
            for mine, other in ((node.left, node.right), (node.right, node.left)):
                is_it = isinstance(mine, ast.Name) and mine.id == name
                if is_it and name not in _names(other) and _is_fp32(scope, other):
                    met.add(id(mine))
    reads = [use for use in uses if isinstance(use.ctx, ast.Load)]
    return PROMOTED if reads and all(id(use) in met for use in reads) else None


def _sentinel(scope: _Scope, constant: ast.Constant) -> str | None:
    """A large constant in a kernel that takes exponentials."""
    assert isinstance(constant.value, float)
    takes_exp = any(_callee(node).endswith(".exp") for node in scope.nodes())
    return SENTINEL if takes_exp and abs(constant.value) >= 1e4 else None


def _nan_again(scope: _Scope, combine: str) -> str | None:
    """Every reduction by `combine` gives an `m` used only in `x - m` under an exponential, and the
    exponentials are summed. What parts of a row exchanged is combined together with their sums."""
    found = dict(scope.assignments())
    exchanged = _exchanged(scope)
    peaks = [
        name
        for name, value in found.items()
        if _callee(value) == "tl.reduce" and combine in _names(value)
        if not exchanged & _names(value)
    ]
    for peak in peaks:
        for user, value in _users(scope, peak):
            if f"- {peak}" not in ast.unparse(value):
                return None
            raised = [user] if re.search(r"exp2?\(", ast.unparse(value)) else []
            power = rf"exp2?\({user}( \* [\d.]+)?\)"
            raised += [u for u, v in _users(scope, user) if re.search(power, ast.unparse(v))]
            if not any(_is_summed(scope, name) for name in raised):
                return None
    return NAN_AGAIN if peaks else None


def _exchanged(scope: _Scope) -> set[str]:
    """Names of what the programs that share a row published."""
    return {
        name
        for node in scope.nodes()
        if isinstance(node, ast.Assign) and _callee(node.value) == "published"
        for target in node.targets
        for name in _names(target)
    }


def _users(scope: _Scope, name: str) -> list[tuple[str, ast.expr]]:
    return [(user, value) for user, value in scope.assignments() if name in _names(value)]


def _is_summed(scope: _Scope, name: str) -> bool:
    return any(_callee(node) == "tl.sum" and name in _names(node) for node in scope.nodes())


def _corrected_means(scope: _Scope) -> Iterator[tuple[set[str], set[str]]]:
    """The names that make up a corrected mean: `sum(x)` and `x - sum(x) / n`, then the same of
    what that leaves."""
    parts = [
        (name, found) for name, value in scope.assignments() if (found := _centred(scope, value))
    ]
    for name, (total, _) in parts:
        for again, (left, base) in parts:
            if base == name:
                yield {total, name}, {left, again}


def _centred(scope: _Scope, value: ast.expr) -> tuple[str, str] | None:
    """For `x - … s …` where `s = tl.sum(… x …)`: the names of s and of x."""
    if not (isinstance(value, ast.BinOp) and isinstance(value.op, ast.Sub)):
        return None
    if not isinstance(value.left, ast.Name):
        return None
    base = value.left.id
    for name in _names(value.right):
        total = scope.definition(name)
        if total is not None and _callee(total) == "tl.sum":
            summed = _arguments(total)[0]
            operand = _arguments(summed)[1] if _callee(summed) == "tl.where" else summed
            if isinstance(operand, ast.Name) and operand.id == base:
                return name, base
    return None


def _corrected(scope: _Scope, node: ast.AST, *, first_only: bool = False) -> str | None:
    """The node is part of a corrected mean."""
    owners = {n for n, value in scope.assignments() if any(c is node for c in ast.walk(value))}
    for first, second in _corrected_means(scope):
        if owners & (first if first_only else first | second):
            return CORRECTED
    return None


# --- the mutations: each yields edits of one kind ------------------------------------------------


def _masks(scope: _Scope) -> Iterator[_Edit]:
    """Drop the mask of a load or store."""
    for node in scope.nodes():
        if isinstance(node, ast.Call) and _callee(node) in ("tl.load", "tl.store"):
            mask = _keyword(node, "mask")
            if mask is None:
                continue
            meaning = mask.value
            if isinstance(meaning, ast.Name):
                meaning = scope.definition(meaning.id) or meaning
            changed = _copy_without_keywords(node, "mask", "other")
            why = _always_true(scope, meaning)
            yield _Edit("mask dropped", node, changed, why)


def _mask_terms(scope: _Scope) -> Iterator[_Edit]:
    """Keep one side of `a & b`: the mask widens."""
    for node in scope.nodes():
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd):
            yield _Edit("mask widened", node, node.left, _always_true(scope, node.right))
            yield _Edit("mask widened", node, node.right, _always_true(scope, node.left))


def _bounds(scope: _Scope) -> Iterator[_Edit]:
    """`i < n` becomes `i < n - 1` (the tail is lost) or `i <= n` (one too many)."""
    exchanged = {
        id(node)
        for branch in scope.nodes()
        if isinstance(branch, ast.If) and ast.unparse(branch.test) == "STEP != 0"
        for node in ast.walk(branch)
    }
    for node in scope.nodes():
        if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Lt):
            shorter, longer = copy.deepcopy(node), copy.deepcopy(node)
            less = ast.BinOp(shorter.comparators[0], ast.Sub(), ast.Constant(1))
            shorter.comparators = [less]
            longer.ops = [ast.LtE()]
            waits = WAITING if ast.unparse(node) == "STEP < 0" else None
            later = waits if id(node) in exchanged else None  # only the first launch has STEP 0
            yield _Edit("tail lost", node, shorter, waits)
            yield _Edit("one too many", node, longer, later or _always_true(scope, node))


def _neutral_elements(scope: _Scope) -> Iterator[_Edit]:
    """Another value for masked lanes: of a load's `other`, of a reduction's `tl.where`."""
    for node in scope.nodes():
        if not isinstance(node, ast.Call):
            continue
        other = _keyword(node, "other")
        if _callee(node) == "tl.load" and other and not isinstance(other.value, ast.Name):
            yield _Edit("neutral element", other.value, _flip(other.value), _unread(scope, node))
        if _is_reduction(node) and node.args and _callee(node.args[0]) == "tl.where":
            where = node.args[0]
            assert isinstance(where, ast.Call)
            yield _Edit("neutral element", where.args[2], _flip(where.args[2]))
            yield _Edit("neutral element", where, where.args[1], _neutral_already(scope, where))


def _flip(value: ast.expr) -> ast.expr:
    return ast.Constant(1.0 if ast.unparse(value) in ("0.0", "0") else 0.0)


def _strides(scope: _Scope) -> Iterator[_Edit]:
    """A stride off by one, or another tensor's."""
    names = [name for name in scope.types if "stride" in name]
    for node in scope.nodes():
        if isinstance(node, ast.Name) and node.id in names and isinstance(node.ctx, ast.Load):
            plus = ast.BinOp(ast.Name(node.id), ast.Add(), ast.Constant(1))
            yield _Edit("stride changed", node, plus)
            twice = ast.BinOp(ast.Name(node.id), ast.Mult(), ast.Constant(2))
            yield _Edit("stride changed", node, twice)
            yield from _swaps(scope, node, names)


def _swaps(scope: _Scope, stride: ast.Name, names: list[str]) -> Iterator[_Edit]:
    """The same stride of each other input, whose strides the cases give."""
    tensor, _, axis = stride.id.partition("_stride")
    for name in names:
        other, _, other_axis = name.partition("_stride")
        known = tensor in scope.strides and other in scope.strides
        if known and tensor != other and axis == other_axis:
            same = scope.strides[tensor] == scope.strides[other]
            why = EQUAL_STRIDES if same else None
            yield _Edit("stride swapped", stride, ast.Name(name), why)


def _tiles(scope: _Scope) -> Iterator[_Edit]:
    """Programs that step further than their tile, or all do the first."""
    counted = {
        id(argument)
        for node in scope.nodes()
        if isinstance(node, ast.Call) and _callee(node) in ("random16_run", "random32_run")
        for argument in node.args
    }
    for node in scope.nodes():
        if isinstance(node, ast.BinOp) and _is_program(node.left):
            further = ast.BinOp(node.right, ast.Add(), ast.Constant(1))
            changed = ast.BinOp(node.left, node.op, further)
            yield _Edit("wrong tile", node, changed, IN_BLOCKS if id(node) in counted else None)
            yield _Edit("wrong tile", node, ast.Constant(0))


def _is_program(node: ast.expr) -> bool:
    """The number of the program, as wide as offsets have to be."""
    wide = isinstance(node, ast.Call) and _callee(node) == "wide"
    return _callee(node.args[0] if wide else node) == "tl.program_id"


def _offsets(scope: _Scope) -> Iterator[_Edit]:
    """A pointer one element further."""
    for node in scope.nodes():
        if _callee(node) in ("tl.load", "tl.store") and isinstance(node, ast.Call):
            changed = copy.deepcopy(node)
            changed.args[0] = ast.BinOp(changed.args[0], ast.Add(), ast.Constant(1))
            yield _Edit("wrong offset", node, changed)


def _casts(scope: _Scope) -> Iterator[_Edit]:
    """A cast to fp32 dropped or made narrow; any other cast dropped."""
    parents = {child: node for node in scope.nodes() for child in ast.iter_child_nodes(node)}
    for node in scope.nodes():
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
            continue
        if node.func.attr != "to" or "int" in ast.unparse(node.args[0]):
            continue
        why = _cast_argument(scope, node, parents) or _promoted(scope, node)
        widens = ast.unparse(node.args[0]) == "tl.float32"
        if ast.unparse(node.args[0]) == "tl.float64":
            why = why or MARGIN
        inner = node.func.value
        if widens and _callee(inner).endswith(".to"):
            continue  # the pair is one rounding point, mutated at the inner cast
        yield _Edit("cast dropped", node, inner, why)
        if widens and why in (None, PROMOTED):
            narrow = copy.deepcopy(node)
            narrow.args[0] = ast.parse("tl.float8e5", mode="eval").body
            yield _Edit("cast narrowed", node, narrow)


def _narrowings(scope: _Scope) -> Iterator[_Edit]:
    """A sum rounded to two bits of mantissa (bf16 would hide behind bf16 outputs)."""
    for node in scope.nodes():
        if _callee(node) == "tl.sum":
            assert isinstance(node, ast.expr)
            narrow = ast.parse("x.to(tl.float8e5).to(tl.float32)", mode="eval").body
            yield _Edit("result narrowed", node, _fill(narrow, node), _corrected(scope, node))


def _fill(template: ast.expr, value: ast.expr) -> ast.expr:
    """`template` with its name `x` replaced by `value`."""

    class Filler(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return copy.deepcopy(value) if node.id == "x" else node

    result = Filler().visit(template)
    assert isinstance(result, ast.expr)
    return result


def _missing_stores(scope: _Scope) -> Iterator[_Edit]:
    for node in scope.nodes():
        if isinstance(node, ast.Expr) and _callee(node.value) == "tl.store":
            yield _Edit("missing store", node, ast.Pass())


def _axes(scope: _Scope) -> Iterator[_Edit]:
    for node in scope.nodes():
        if _is_reduction(node) and isinstance(node, ast.Call):
            changed = copy.deepcopy(node)
            axis = _keyword(changed, "axis")
            place = axis.value if axis else changed.args[1] if len(changed.args) > 1 else None
            if isinstance(place, ast.Constant) and place.value == 1:
                place.value = 0
                yield _Edit("wrong axis", node, changed)


def _reductions(scope: _Scope) -> Iterator[_Edit]:
    """Sum instead of max and the other way round."""
    for node in scope.nodes():
        if _is_reduction(node) and isinstance(node, ast.Call):
            changed = _copy_without_keywords(node)
            name = "max" if _callee(node) == "tl.sum" else "sum"
            changed.func = ast.parse(f"tl.{name}", mode="eval").body
            if _callee(node) == "tl.reduce":
                changed.args = changed.args[:2]  # without the combine function
            yield _Edit("other reduction", node, changed, _corrected(scope, node, first_only=True))


def _operands(scope: _Scope) -> Iterator[_Edit]:
    """`a - b` and `a / b` the other way round."""
    for node in scope.nodes():
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Sub, ast.Div)):
            swapped = ast.BinOp(node.right, node.op, node.left)
            yield _Edit("operands swapped", node, swapped, _only_squared(scope, node))
        if _callee(node) == "tl.div_rn" and isinstance(node, ast.Call):
            changed = copy.deepcopy(node)
            changed.args.reverse()
            yield _Edit("operands swapped", node, changed)


def _signs(scope: _Scope) -> Iterator[_Edit]:
    """A float addition turned into a subtraction."""
    for node in scope.nodes():
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            text = ast.unparse(node)
            if not any(word in text for word in ("_ptr", "program_id", "arange", "stride")):
                yield _Edit("sign changed", node, ast.BinOp(node.left, ast.Sub(), node.right))


def _constants(scope: _Scope) -> Iterator[_Edit]:
    """A float constant of the arithmetic times 1000, where it is not a neutral element."""
    neutral = {
        id(constant)
        for node in scope.nodes()
        if isinstance(node, ast.Call) and _callee(node) in ("tl.where", "tl.load")
        for constant in (*node.args[2:], *(k.value for k in node.keywords if k.arg == "other"))
    }
    calls = (node for node in scope.nodes() if isinstance(node, ast.Call))
    divided = {id(call.args[0]) for call in calls if _callee(call) == "tl.div_rn"}
    for node in scope.nodes():
        if not (isinstance(node, ast.Constant) and isinstance(node.value, float)):
            continue
        if node.value and id(node) not in neutral:
            changed = ast.Constant(node.value * 1000.0)
            why = _sentinel(scope, node)
            if id(node) not in divided:  # a mean a thousand times too large leaves roundings
                why = why or _corrected(scope, node)
            yield _Edit("constant changed", node, changed, why)


def _nan_rules(function: ast.FunctionDef, scopes: list[_Scope]) -> Iterator[_Edit]:
    """A combine function that drops NaN, or takes the other extreme."""
    users = [scope for scope in scopes if function.name in _names(scope.function)]
    reasons = [_nan_again(scope, function.name) for scope in users]
    why = NAN_AGAIN if reasons and all(reasons) else None
    for node in ast.walk(function):
        if _callee(node) in ("tl.maximum", "tl.minimum") and isinstance(node, ast.Call):
            if _keyword(node, "propagate_nan"):
                changed = _copy_without_keywords(node, "propagate_nan")
                yield _Edit("NaN dropped", node, changed, why)
            other = copy.deepcopy(node)
            name = "minimum" if _callee(node) == "tl.maximum" else "maximum"
            other.func = ast.parse(f"tl.{name}", mode="eval").body
            yield _Edit("other reduction", node, other)


def _grids(tree: ast.Module, jitted: set[str]) -> Iterator[_Edit]:
    """The launch short by one program along each axis of its grid: `kernel[grid]`, or in emitted
    files `host.launch(kernel, grid, ...)`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript):
            kernel, grid = node.value, node.slice
        elif isinstance(node, ast.Call) and _callee(node) in ("launch", f"{HOST}.launch"):
            kernel, grid = node.args[:2]
        else:
            continue
        if not (isinstance(kernel, ast.Name) and kernel.id in jitted):
            continue
        for axis in range(len(grid.elts) if isinstance(grid, ast.Tuple) else 0):
            changed = copy.deepcopy(node)
            short = changed.slice if isinstance(changed, ast.Subscript) else changed.args[1]
            assert isinstance(short, ast.Tuple)
            short.elts[axis] = ast.BinOp(short.elts[axis], ast.Sub(), ast.Constant(1))
            yield _Edit("grid short", node, changed)


_MUTATIONS: tuple[Callable[[_Scope], Iterator[_Edit]], ...] = (
    _masks,
    _mask_terms,
    _bounds,
    _neutral_elements,
    _strides,
    _tiles,
    _offsets,
    _casts,
    _narrowings,
    _missing_stores,
    _axes,
    _reductions,
    _operands,
    _signs,
    _constants,
)


def with_device_functions(text: str) -> str:
    """An emitted file with the shared device functions that it calls in place of their import."""
    device = ast.parse(texts()[f"{DEVICE}.py"])
    known = {node.name: node for node in device.body if isinstance(node, ast.FunctionDef)}

    def called(names: set[str]) -> set[str]:
        inside = {n.id for name in names for n in ast.walk(known[name]) if isinstance(n, ast.Name)}
        further = inside & known.keys() - names
        return called(names | further) if further else names

    tree, found = ast.parse(text), list[ast.stmt]()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom) and (node.module, node.level) == (DEVICE, 1):
            names = called({each.name for each in node.names})
            found += [ast.parse("from triton.language.extra import libdevice").body[0]]
            found += [known[name] for name in known if name in names]
        else:
            found.append(node)
    return ast.unparse(ast.Module(found, []))


# --- applying ------------------------------------------------------------------------------------


class _Replace(ast.NodeTransformer):
    """Replace one node, found by identity through the markers of `_mark`."""

    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self._mark: object = getattr(old, "mutation_mark", None)
        self._new = new

    def visit(self, node: ast.AST) -> ast.AST:
        if getattr(node, "mutation_mark", None) == self._mark:
            return self._new
        return self.generic_visit(node)


@dataclass(frozen=True)
class _Parts:
    """A file as the texts of its statements, of which an edit changes one."""

    statements: list[ast.stmt]
    texts: list[str]
    place: dict[object, int]
    """Of each marked node, the statement that it is in."""

    @classmethod
    def of(cls, tree: ast.Module) -> _Parts:
        place: dict[object, int] = {}
        for number, statement in enumerate(tree.body):
            for node in ast.walk(statement):
                node.mutation_mark = len(place)  # pyright: ignore[reportAttributeAccessIssue]
                place[len(place)] = number
        return cls(tree.body, [ast.unparse(statement) for statement in tree.body], place)

    @property
    def original(self) -> str:
        return "\n".join(self.texts) + "\n"

    def applied(self, edit: _Edit) -> str:
        number = self.place[getattr(edit.old, "mutation_mark", None)]
        statement = copy.deepcopy(self.statements[number])
        changed = _Replace(edit.old, copy.deepcopy(edit.new)).visit(statement)
        text = ast.unparse(ast.fix_missing_locations(changed))
        return "\n".join([*self.texts[:number], text, *self.texts[number + 1 :]]) + "\n"


def _edits(tree: ast.Module, kernel: Kernel) -> Iterator[_Edit]:
    jitted = [node for node in tree.body if isinstance(node, ast.FunctionDef) and _is_jit(node)]
    scopes = [_scope(function, kernel) for function in jitted if not _is_combine(function)]
    for scope in scopes:
        for mutate in _MUTATIONS:
            yield from mutate(scope)
    for function in jitted:
        if _is_combine(function):
            yield from _nan_rules(function, scopes)
    yield from _grids(tree, {function.name for function in jitted})


def _scope(function: ast.FunctionDef, kernel: Kernel) -> _Scope:
    launch = next((x for x in kernel.launches if x.jit_name == function.name), None)
    strides = {
        name: tuple(case.inputs[index].stride for case in kernel.cases)
        for index, name in enumerate(kernel.inputs)
    }
    constants = dict(launch.constants) if launch else {}
    return _Scope(function, dict(constants), dict(launch.signature) if launch else {}, strides)


@cache
def all_mutants(kernel: Kernel) -> tuple[Mutant, ...]:
    """Every mutant there is, in the order of the file; the equivalent ones with their argument."""
    tree = ast.parse(with_device_functions(kernel.text))
    parts = _Parts.of(tree)
    found: dict[str, Mutant] = {}
    for edit in _edits(tree, kernel):
        text = parts.applied(edit)
        line = getattr(edit.old, "lineno", 0)
        what = f"line {line}: {_short(edit.old)} → {_short(edit.new)}"
        if text != parts.original:
            found.setdefault(text, Mutant(edit.kind, what, text, edit.equivalent))
    return tuple(found.values())


def _short(node: ast.AST) -> str:
    text = " ".join(ast.unparse(ast.fix_missing_locations(copy.deepcopy(node))).split())
    return text if len(text) <= 80 else text[:77] + "..."


def mutants(kernel: Kernel, seed: int, count: int) -> list[Mutant]:
    """`count` mutants (fewer when there are not as many), drawn evenly over the kinds."""
    generator = random.Random(seed)
    kinds: dict[str, list[Mutant]] = {}
    for mutant in all_mutants(kernel):
        kinds.setdefault(mutant.kind, []).append(mutant)
    for group in kinds.values():
        generator.shuffle(group)
    chosen: list[Mutant] = []
    while len(chosen) < count and any(kinds.values()):
        chosen.extend(group.pop() for group in kinds.values() if group)
    return chosen[:count]
