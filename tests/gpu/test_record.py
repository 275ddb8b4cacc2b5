"""`fusion_advisor.record` around a model on the GPU: its memory and its numbers are left alone."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import fusion_advisor
from fusion_advisor.ir.recording_file import recorded_graph, recording_of


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(512, 512), nn.LayerNorm(512), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert x.is_cuda  # on fake tensors, too
        places = torch.arange(512, device=x.device)
        return self.drop(torch.softmax(self.norm(self.linear(x)) + places, -1))


def test_a_capture_takes_no_memory_of_the_gpu_and_no_random_numbers(tmp_path: Path) -> None:
    model, x = Block().cuda(), torch.randn(4096, 512, device="cuda")
    file = tmp_path / "r.json"
    torch.cuda.synchronize()
    with fusion_advisor.record(model, file):
        model(x)
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            model.eval()(x)
        torch.cuda.reset_peak_memory_stats()
        held, drawn = torch.cuda.memory_allocated(), torch.cuda.get_rng_state()
    # One block at most: PyTorch's fake tensors start a device with an element of their own.
    assert torch.cuda.max_memory_allocated() - held <= 512
    assert torch.cuda.memory_allocated() == held
    assert torch.equal(torch.cuda.get_rng_state(), drawn)
    found = recording_of(str(file))
    assert found is not None
    assert [(call.mode, call.grad, call.autocast) for call in found.calls] == [
        ("train", True, None), ("eval", False, "bfloat16"),
    ]  # fmt: skip
    assert found.calls[0].signature["args"] == ["float32[4096, 512] on cuda:0"]
    for call in found.calls:
        ops = [node.op for node in recorded_graph(f"{file}:{call.name}").nodes]
        assert "aten._softmax.default" in ops
        assert ("aten.native_dropout.default" in ops) == (call.mode == "train")


def test_a_captured_cuda_graph_is_not_broken_by_noting_its_calls(tmp_path: Path) -> None:
    model, x = Block().cuda().eval(), torch.randn(64, 512, device="cuda")
    with torch.no_grad(), fusion_advisor.record(model, tmp_path / "r.json"):
        expected = model(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = model(x)
        graph.replay()
        torch.testing.assert_close(result, expected)
    found = recording_of(str(tmp_path / "r.json"))
    assert found is not None
    assert found.total == 2
