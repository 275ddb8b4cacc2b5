"""Products that add into their residuals, and what the norm behind moves less: where the limits of
`rules/rewrites/residual-product.toml` are from.

    python -m benchmarks.rules.products [--out DIR]

Of each size, in bfloat16: a product [tokens, contracted] x [contracted, width] alone, with its sum
in the residual's memory, and by `torch.addmm`; an RMSNorm of residual plus product, which gives the
sum too, and an RMSNorm alone, both as torch.compile makes them. `saved` is what the second pair
takes less than the first. Microseconds, medians of times in turn, a cold L2; the host's time of a
call is the median of batches of calls that wait for no GPU.
"""

# torch is typed in places only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from ..gpu import clock, heading

SIZES = (
    *((4096, k, 4096) for k in (4096, 14336)), (8192, 4096, 4096), (1024, 4096, 4096),
    (4096, 8192, 3072), *((4096, k, 2048) for k in (2048, 8192)), (1024, 2048, 2048),
    *((4096, k, 1024) for k in (1024, 3072)), *((4096, k, 768) for k in (768, 3072)),
)  # fmt: skip
"""Tokens, contracted, width."""
ROUNDS = 15


def host_us(call: Callable[[], Any]) -> float:
    """Host time of a call, us."""
    import torch

    found: list[float] = []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(100):
            call()
        found.append((time.perf_counter() - began) * 1e4)
    return statistics.median(found)


def main() -> int:
    """Time each size, write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="h200")
    parser.add_argument("--out", type=Path, default=Path("build"))
    options = parser.parse_args()
    import torch
    import torch.nn.functional as F

    from fusion_advisor.dynamo.residual_products import OPERATOR

    torch.set_grad_enabled(False)
    torch.manual_seed(0)

    def added(residual: torch.Tensor, product: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        total = residual + product
        return total, F.rms_norm(total, total.shape[-1:])

    def normed(total: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(total, total.shape[-1:])

    both, alone = (torch.compile(each, dynamic=False) for each in (added, normed))
    watch = clock(options.device)
    lines = [
        *heading("Products that add into their residuals"), "",
        "| tokens, contracted, width | product | in place | addmm | sum and norm | norm | saved |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16)

    for tokens, contracted, width in SIZES:
        torch.compiler.reset()
        a, b = drawn(tokens, contracted), drawn(width, contracted).t() / contracted**0.5
        residual, product = drawn(tokens, width), a @ b
        runs = (
            partial(torch.mm, a, b),
            partial(OPERATOR, residual.clone(), a, b, 1.0),
            partial(torch.addmm, residual, a, b),
            partial(both, residual, product),
            partial(alone, residual),
        )
        turns = watch.turns(runs, ROUNDS)
        watch.release()
        us = [statistics.median(each) for each in turns]
        saved = us[0] + us[3] - us[1] - us[4]
        cells = [f"{tokens}, {contracted}, {width}", *(f"{each:.1f}" for each in (*us, saved))]
        lines.append(f"| {' | '.join(cells)} |")
    a, b, into = drawn(8, 8), drawn(8, 8), drawn(8, 8)
    plain = host_us(partial(torch.mm, a, b, out=into))
    ours = host_us(partial(OPERATOR, into, a, b, 1.0))
    lines += ["", f"Host time of a call: {plain:.1f} us of `torch.mm`, {ours:.1f} us in place."]
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "residual_products.md").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
