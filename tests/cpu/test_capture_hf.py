"""`hf:config.json`: built from the configuration alone, attention masks as eager has them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from fusion_advisor.frontend.child import Scenario, capture_here
from fusion_advisor.ir.graph import Graph, Tensor
from fusion_advisor.ir.scenario import parse_input
from fusion_advisor.support.errors import CaptureError

pytest.importorskip("transformers")

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 128,
    "dtype": "bfloat16",
}


def write(folder: Path, content: dict[str, Any]) -> str:
    file = folder / "config.json"
    file.write_text(json.dumps(content))
    return f"hf:{file}"


def attention(model: str, scenario: Scenario) -> list[Any]:
    nodes = capture_here(model, scenario).nodes
    return [n for n in nodes if n.op == "aten.scaled_dot_product_attention.default"]


def test_a_causal_model_skips_its_mask_as_eager_does(tmp_path: Path) -> None:
    found = attention(write(tmp_path, LLAMA), Scenario(batch=2, seq=16))
    assert len(found) == 2
    assert all(len(list(node.refs())) == 3 for node in found)
    assert {node.out.dtype for node in found} == {"bfloat16"}
    assert {node.module for node in found} == {
        "model.layers.0.self_attn",
        "model.layers.1.self_attn",
    }


def test_decode_is_one_token_against_a_static_cache(tmp_path: Path) -> None:
    scenario = Scenario(batch=3, phase="decode", kv_len=32)
    graph = capture_here(write(tmp_path, LLAMA), scenario)
    assert graph.captured_by == "export"
    ids = next(node for node in graph.nodes if node.kind == "input")
    assert ids.out.shape == (3, 1)
    keys = kept(graph)["past_key_values_layers_0_keys"]
    assert keys.shape == (3, 2, 32, 16)
    assert any(keys.storage in node.mutates for node in graph.nodes)


def kept(graph: Graph) -> dict[str, Tensor]:
    """What is handed to a step of decode besides the token."""
    inputs = {node.name: node.out for node in graph.nodes if node.kind == "input"}
    return {name: tensor for name, tensor in inputs.items() if name != "input_ids"}


LATENT = {
    "model_type": "minicpm3", "architectures": ["MiniCPM3ForCausalLM"], "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 128,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 12, "num_key_value_heads": 4,
}  # fmt: skip
SHARED = {
    "model_type": "falcon", "architectures": ["FalconForCausalLM"], "hidden_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 128, "multi_query": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "keys", "values"),
    [(LATENT, (1, 1, 32, 16), (1, 1, 32, 4)), (SHARED, (1, 1, 32, 16), (1, 1, 32, 16))],
    ids=["latent", "shared"],
)
def test_keys_and_values_are_as_large_as_the_model_makes_them(
    tmp_path: Path, config: dict[str, Any], keys: tuple[int, ...], values: tuple[int, ...]
) -> None:
    found = kept(capture_here(write(tmp_path, config), Scenario(phase="decode", kv_len=32)))
    assert found["past_key_values_layers_0_keys"].shape == keys
    assert found["past_key_values_layers_0_values"].shape == values


def test_a_window_that_is_full_is_rolled_on(tmp_path: Path) -> None:
    config = {**LLAMA, "model_type": "mistral", "architectures": ["MistralForCausalLM"]}
    scenario = Scenario(phase="decode", kv_len=32)
    graph = capture_here(write(tmp_path, {**config, "sliding_window": 8}), scenario)
    assert kept(graph)["past_key_values_layers_0_keys"].shape == (1, 2, 8, 16)
    assert sum(node.op == "aten.roll.default" for node in graph.nodes) == 2 * 2


STATES = {
    "model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"], "hidden_size": 32,
    "num_hidden_layers": 2, "num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 1,
    "vocab_size": 128, "chunk_size": 16,
}  # fmt: skip


def test_a_model_with_a_cache_of_its_own_is_given_that(tmp_path: Path) -> None:
    graph = capture_here(write(tmp_path, STATES), Scenario(phase="decode", kv_len=32))
    own = "cache=DynamicCache of the model's own (forward takes no past_key_values)"
    assert own in graph.assumed
    states = kept(graph)
    assert states["cache_params_layers_1_recurrent_states_0"].shape == (1, 4, 16, 8)
    written = {storage for node in graph.nodes for storage in node.mutates}
    assert {tensor.storage for tensor in states.values()} <= written


MIXED = {
    "model_type": "minimax", "architectures": ["MiniMaxForCausalLM"], "hidden_size": 64,
    "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128, "num_local_experts": 2,
    "layer_types": ["linear_attention", "full_attention"], "block_size": 8, "dtype": "bfloat16",
}  # fmt: skip


def test_a_model_that_refuses_a_static_cache_is_given_its_own(tmp_path: Path) -> None:
    graph = capture_here(write(tmp_path, MIXED), Scenario(phase="decode", kv_len=32))
    own = "cache=MiniMaxCache of the model's own (StaticCache raised ValueError)"
    assert own in graph.assumed
    assert kept(graph)["past_key_values_layers_1_keys"].shape == (1, 2, 31, 16)


def test_a_model_that_keeps_nothing_says_so(tmp_path: Path) -> None:
    bert = {**LLAMA, "model_type": "bert", "architectures": ["BertLMHeadModel"]}
    graph = capture_here(write(tmp_path, bert), Scenario(phase="decode", kv_len=32))
    assert "cache=none: the model keeps nothing from token to token" in graph.assumed


def test_dtype_of_the_scenario_wins(tmp_path: Path) -> None:
    found = attention(write(tmp_path, LLAMA), Scenario(seq=16, dtype="float16"))
    assert {node.out.dtype for node in found} == {"float16"}


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"hidden_size": 4}, "no model_type"),
        ({**LLAMA, "architectures": ["NoSuchModel"]}, "transformers has no NoSuchModel"),
    ],
)
def test_a_wrong_config_is_one_line(tmp_path: Path, content: dict[str, Any], expected: str) -> None:
    with pytest.raises(CaptureError, match=expected):
        capture_here(write(tmp_path, content))


def test_a_missing_config() -> None:
    with pytest.raises(CaptureError, match="give the path of a config"):
        capture_here("hf:nowhere/config.json")


GEMMA = {
    "model_type": "gemma3",
    "architectures": ["Gemma3ForConditionalGeneration"],
    "mm_tokens_per_image": 4,
    "text_config": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
    },
    "vision_config": {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 56, "patch_size": 14,
    },
}  # fmt: skip


def test_the_tower_that_text_alone_does_not_reach_is_named(tmp_path: Path) -> None:
    graph = capture_here(write(tmp_path, GEMMA), Scenario(batch=1, seq=16))
    assert graph.not_run == ("model.vision_tower", "model.multi_modal_projector")
    (tmp_path / "text").mkdir()
    assert capture_here(write(tmp_path / "text", LLAMA), Scenario(batch=1, seq=16)).not_run == ()


CLIP = {
    "model_type": "clip",
    "architectures": ["CLIPModel"],
    "text_config": {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "vocab_size": 128, "max_position_embeddings": 16,
    },
    "vision_config": {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1,
        "num_attention_heads": 2, "image_size": 56, "patch_size": 14,
    },
}  # fmt: skip


def test_a_model_that_takes_images_too_says_how_to_give_them(tmp_path: Path) -> None:
    model = write(tmp_path, CLIP)
    with pytest.raises(CaptureError, match="give --input pixel_values=") as caught:
        capture_here(model, Scenario(batch=2))
    given = str(caught.value).partition("--input ")[2]
    assert given == "pixel_values=2x3x56x56:float32"
    graph = capture_here(model, Scenario(batch=2, inputs=(parse_input(given),)))
    assert not graph.not_run


SPEECH = {
    "model_type": "speech_to_text", "architectures": ["Speech2TextForConditionalGeneration"],
    "encoder_layers": 1, "decoder_layers": 1, "d_model": 64, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 128, "decoder_ffn_dim": 128,
}  # fmt: skip


def test_an_image_that_is_cut_into_patches_comes_with_their_places(tmp_path: Path) -> None:
    """Siglip2 reads the sizes of its images in a tensor."""
    content = {
        "model_type": "siglip2", "architectures": ["Siglip2ForImageClassification"],
        "vision_config": {
            "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2,
            "num_hidden_layers": 1, "num_patches": 16, "patch_size": 4,
        },
    }  # fmt: skip
    graph = capture_here(write(tmp_path, content), Scenario(batch=2))
    assert {(2, 16, 48), (2, 16)} <= {
        node.out.shape for node in graph.nodes if node.kind == "input"
    }


def test_a_spectrogram_has_the_sizes_of_its_configuration(tmp_path: Path) -> None:
    config = {
        "model_type": "audio-spectrogram-transformer", "architectures": ["ASTModel"],
        "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2,
        "num_hidden_layers": 1, "max_length": 64, "num_mel_bins": 32,
    }  # fmt: skip
    graph = capture_here(write(tmp_path, config), Scenario(batch=2))
    assert next(node for node in graph.nodes if node.kind == "input").out.shape == (2, 64, 32)


def test_an_input_that_nothing_tells_can_be_given(tmp_path: Path) -> None:
    model = write(tmp_path, SPEECH)
    with pytest.raises(CaptureError, match="give --input input_features=SHAPE:DTYPE"):
        capture_here(model, Scenario(batch=1, seq=8))
    given = parse_input("input_features=1x64x80:float32")
    assert capture_here(model, Scenario(batch=1, seq=8, inputs=(given,))).nodes


WINDOWS = {
    "model_type": "longformer", "architectures": ["LongformerForMaskedLM"], "hidden_size": 64,
    "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 128,
    "attention_window": 16,
}  # fmt: skip


def test_a_model_may_ask_whether_any_of_its_text_is_hidden(tmp_path: Path) -> None:
    graph = capture_here(write(tmp_path, WINDOWS), Scenario(batch=1, seq=512))
    assert any("mm" in node.op for node in graph.nodes)
