"""The kernel of `l1`: Triton's own file, for it is compiled from its source."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportMissingTypeStubs=false, reportUntypedFunctionDecorator=false
# pyright: reportMissingParameterType=false

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["row", "pitch", "step"])
def ask(far, near, row, pitch, step, apart, vector: tl.constexpr, stored: tl.constexpr):
    """One request of 32 lanes for whole vectors, and one of neighbours."""
    program = tl.program_id(0)
    places = tl.arange(0, 32 * vector)
    lanes = places // vector
    units = lanes // row * pitch + lanes % row * step
    there = far + program * apart + units * vector + places % vector
    here = near + program * 32 * vector + places
    if stored:
        tl.store(there, tl.load(here))
    else:
        tl.store(here, tl.load(there))
