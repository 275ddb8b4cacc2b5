"""Llama-3-8B's geometry with all of its 32 layers: what the time measures run on."""

from llama_block import Model, get_inputs

__all__ = ["Model", "get_init_inputs", "get_inputs"]


def get_init_inputs() -> list[int]:
    return [32]
