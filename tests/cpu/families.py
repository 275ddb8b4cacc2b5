"""Small models of 24 families of transformers, each called as everyone calls it, under
`fusion_advisor.apply` in Triton's interpreter: run as a program, with the names of families. Prints
what each was given and gave, as JSON."""

# torch and transformers are partly untyped.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from __future__ import annotations

import copy
import json
import os
import pickle
import sys
import traceback
import warnings
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
os.environ["FUSION_ADVISOR_STRICT"] = "1"  # a fault of ours, or a launcher that falls back, raises

import torch
import transformers
from torch._dynamo.utils import counters

import fusion_advisor as fa

SMALL: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 128, "max_position_embeddings": 64,
}  # fmt: skip
ENDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
PAIRS: dict[str, Any] = {
    "d_model": 64, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
    "vocab_size": 128, "decoder_start_token_id": 0, **ENDS,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "num_key_value_heads": 2}
VISION = {"image_size": 32, "patch_size": 8}

CAUSAL: dict[str, dict[str, Any]] = {
    "llama": {**SMALL, "num_hidden_layers": 1, "num_key_value_heads": 2},
    "mistral": {**SMALL, "num_key_value_heads": 2},
    "phi3": {**SMALL, "num_key_value_heads": 2, **ENDS},
    "mixtral": {**SMALL, **EXPERTS, "num_local_experts": 4},
    "gpt_neox": {**SMALL},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128, "n_positions": 64},
    "gpt_oss": {**SMALL, **EXPERTS, "num_local_experts": 4, "head_dim": 16},
    "gemma3_text": {**SMALL, "num_key_value_heads": 2, "head_dim": 16},
    "deepseek_v3": {
        **SMALL, "num_experts_per_tok": 2, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
        "moe_intermediate_size": 64, "q_lora_rank": 32, "kv_lora_rank": 16,
        "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
        "first_k_dense_replace": 1, "num_key_value_heads": 4,
    },
    "qwen3_moe": {
        **SMALL, **EXPERTS, "num_experts": 4, "moe_intermediate_size": 64, "head_dim": 16,
    },
    "qwen3": {**SMALL, "num_key_value_heads": 2, "head_dim": 16},
    "mamba2": {
        "hidden_size": 64, "num_hidden_layers": 2, "num_heads": 8, "head_dim": 16,
        "state_size": 16, "n_groups": 1, "vocab_size": 128, "chunk_size": 16,
    },
    "opt": {**SMALL, "ffn_dim": 128, "word_embed_proj_dim": 64, **ENDS},
    "bloom": {"hidden_size": 64, "n_layer": 2, "n_head": 4, "vocab_size": 128},
    "falcon": {**SMALL, "multi_query": True},
    "stablelm": {**SMALL, "num_key_value_heads": 2},
}  # fmt: skip
"""By the model type of a configuration, what makes it small: `model(input_ids=ids)`."""

OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bart": ("AutoModelForSeq2SeqLM", PAIRS),
    "t5": (
        "AutoModelForSeq2SeqLM",
        {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4,
         "vocab_size": 128, "decoder_start_token_id": 0},
    ),
    "whisper": (
        "AutoModelForSpeechSeq2Seq",
        {**PAIRS, "num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 32},
    ),
    "bert": ("AutoModelForMaskedLM", SMALL),
    "roberta": ("AutoModelForMaskedLM", {**SMALL, **ENDS}),
    "distilbert": (
        "AutoModelForMaskedLM",
        {"dim": 64, "hidden_dim": 128, "n_layers": 2, "n_heads": 4, "vocab_size": 128,
         "max_position_embeddings": 64},
    ),
    "vit": ("AutoModelForImageClassification", {**SMALL, **VISION}),
    "clip": (
        "AutoModel",
        {"projection_dim": 32, "text_config": {**SMALL, **ENDS},
         "vision_config": {**SMALL, **VISION}},
    ),
}  # fmt: skip
FAMILIES = (*CAUSAL, *OTHERS)
UNCACHED = "_without_cache"
"""Behind a family's name: called so that it gives no cache."""
GENERATES = {"_generates_dynamic": "dynamic", "_generates_static": "static"}
"""Behind a family's name: `generate()` is called, with which cache."""


def built(family: str) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A model and the keywords of a call."""
    auto, settings = OTHERS.get(family) or ("AutoModelForCausalLM", CAUSAL[family])
    config = transformers.AutoConfig.for_model(family, **settings)
    torch.manual_seed(0)
    model = getattr(transformers, auto).from_config(config).eval()
    ids = torch.randint(3, 128, (2, 16))
    given: dict[str, Any] = {"input_ids": ids}
    if family in ("bart", "t5"):
        given["decoder_input_ids"] = ids[:, :8]
    if family == "whisper":
        given = {"input_features": torch.randn(2, 16, 64), "decoder_input_ids": ids[:, :8]}
    if family in ("vit", "clip"):
        pixels = {"pixel_values": torch.randn(2, 3, 32, 32)}
        given = pixels if family == "vit" else {**given, **pixels}
    return model, given


def tensors(result: Any) -> list[torch.Tensor]:
    """Those of a result that is given by name, but for a cache."""
    return [value for value in result.to_tuple() if isinstance(value, torch.Tensor)]


def told(family: str) -> dict[str, Any]:
    model, given = built(family.removesuffix(UNCACHED))
    if family.endswith(UNCACHED):
        given["use_cache"] = False
    with torch.no_grad():
        wanted = tensors(model(**given))
        done = fa.apply(model, (), given, inner="eager", device="h200")
        found = tensors(model(**given))
        fa.unapply(model)
    off = max(
        float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted, strict=True)
    )
    return {
        "kernels": done.kernels,
        "refused": done.refused,
        "saved_us": done.saved_us,
        "share": done.share,
        "off": off,
    }


def generated(family: str, cache: str) -> dict[str, Any]:
    """What a model writes, with a cache that grows or with one of a fixed size, for which
    `generate()` compiles the call of one token by itself."""
    counters.clear()
    model, given = built(family)
    how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    wanted = model.generate(**given, **how, cache_implementation=cache)
    if cache == "static":
        how["compile_config"] = transformers.CompileConfig()
        how["compile_config"]._compile_all_devices = True
    done = fa.apply(model, inner="eager", device="h200")
    with warnings.catch_warnings(record=True) as said:
        warnings.filterwarnings("always", message="fusion_advisor")
        found = model.generate(
            **given, **how, cache_implementation=cache, return_dict_in_generate=True
        )
    alike = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    facts: dict[str, Any] = {
        "same": torch.equal(found.sequences, wanted),
        "kernels": sum(done.kernels.values()),
        "said": [str(w.message) for w in said if "fusion_advisor" in str(w.message)],
        "graphs": counters["stats"]["unique_graphs"],
        "plain": [type(each.get_compiled_call).__name__ for each in alike],
        "fixed": [
            hasattr(tensor, "_dynamo_static_input_type")
            for layer in found.past_key_values.layers
            for tensor in (layer.keys, layer.values, layer.cumulative_length)
        ]
        if cache == "static"
        else [],
    }
    fa.unapply(model)
    facts["plain"].append(type(model.get_compiled_call).__name__)
    return facts


def facts_of(family: str) -> dict[str, Any]:
    for end, cache in GENERATES.items():
        if family.endswith(end):
            return generated(family.removesuffix(end), cache)
    return told(family)


def main() -> None:
    for family in sys.argv[1:] or FAMILIES:
        torch._dynamo.reset()
        try:
            facts = facts_of(family)
        except Exception:  # noqa: BLE001 told of each family
            facts = {"raised": traceback.format_exc()}
        print(json.dumps({family: facts}), flush=True)


if __name__ == "__main__":
    main()
