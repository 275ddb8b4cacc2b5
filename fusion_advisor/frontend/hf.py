"""`hf:config.json`: a Hugging Face model built from its configuration alone, with inputs for it."""
# transformers has no types that a strict checker accepts.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false, reportUnknownParameterType=false
# pyright: reportMissingTypeStubs=false, reportMissingImports=false

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fusion_advisor.frontend.signature import signature, undescribed
from fusion_advisor.frontend.user_model import (
    Loaded,
    building,
    failure,
    guarded,
    read_json,
    under_scenario,
)
from fusion_advisor.ir.scenario import Scenario
from fusion_advisor.support.errors import CaptureError, did_you_mean

_DEFAULT_BATCH = 1
_DEFAULT_TOKENS = 512
_AUDIO_SAMPLES = 16_000
_DEFAULT_PIXELS = 224


def load_config(model: str, scenario: Scenario, fake: FakeTensorMode) -> Loaded:
    """Builds `config.json` or `config.json#AutoClass` and derives its inputs."""
    path, _, wanted = model.partition("#")
    if scenario.sizes.built:
        raise CaptureError(f"hf:{path}: is built of its configuration, of no get_init_inputs()")
    content = read_json(path)
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise CaptureError(
            f"hf:{path}: transformers is not installed; pip install 'fusion-advisor[hf]'"
        ) from error
    config = guarded(f"reading {path}", lambda: _config(transformers, content, path))
    if scenario.dtype is not None:
        config.dtype = getattr(torch, scenario.dtype)
    cls = _model_class(transformers, wanted, config, path)
    assumed: list[str] = []
    if not wanted:
        assumed.append(f"class={cls.__name__}")
    with building(scenario, fake):
        module, kwargs = built(cls, config, scenario, assumed, f"from {path}")
    shaped = replace(scenario, batch=None, seq=None)
    args, kwargs = under_scenario(module, (), kwargs, shaped, fake)
    assumed.append(f"mode={scenario.mode}")
    if scenario.dtype is None:
        assumed.append(f"dtype={str(module_dtype(module)).removeprefix('torch.')} from the config")
    hint = _hint(module, config, scenario.batch or _DEFAULT_BATCH, kwargs)
    return Loaded(module, args, kwargs, fake, f"hf:{model}", assumed, hint=hint)


def built(
    cls: Any, config: Any, scenario: Scenario, assumed: list[str], said: str = ""
) -> tuple[torch.nn.Module, dict[str, Any]]:
    """A model of a configuration with keyword inputs for the scenario's phase, batch and tokens, on
    the default device; what was assumed is added to `assumed`."""
    module = guarded(f"building {cls.__name__} {said}", lambda: _build(cls, config))
    kwargs = _inputs(module, config, scenario, assumed)
    if scenario.phase == "decode":
        return module, _decoding(module, config, scenario, kwargs, assumed)
    return module, kwargs


def module_dtype(module: torch.nn.Module) -> torch.dtype:
    """The dtype of the first floating parameter; the default dtype without one."""
    floats = (p.dtype for p in module.parameters() if p.dtype.is_floating_point)
    return next(floats, torch.get_default_dtype())


def _config(transformers: Any, content: dict[str, Any], path: str) -> Any:
    fields = dict(content)
    kind = fields.pop("model_type", None)
    if kind is None:
        raise CaptureError(f"{path}: has no model_type; add it, for example 'llama'")
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    if kind not in known:
        raise CaptureError(
            f"{path}: transformers {transformers.__version__} knows no model_type {kind!r}: "
            f"{did_you_mean(kind, known)}correct it there"
        )
    return transformers.AutoConfig.for_model(kind, **fields)


def _model_class(transformers: Any, wanted: str, config: Any, path: str) -> Any:
    names = [wanted] if wanted else list(config.architectures or ())
    for name in names:
        if hasattr(transformers, name):
            return getattr(transformers, name)
    if wanted or names:
        raise CaptureError(f"{path}: transformers has no {names[0]}; name another with #CLASS")
    return transformers.AutoModel


def _build(cls: Any, config: Any) -> torch.nn.Module:
    build = cls.from_config if hasattr(cls, "from_config") else cls._from_config
    return build(config)


def _inputs(module: Any, config: Any, scenario: Scenario, assumed: list[str]) -> dict[str, Any]:
    batch = scenario.batch or _DEFAULT_BATCH
    if scenario.batch is None:
        assumed.append(f"batch={batch}")
    name = module.main_input_name
    takes = inspect.signature(module.forward).parameters
    text = config.get_text_config()
    tokens = 1 if scenario.phase == "decode" else scenario.seq or _default_tokens(text)
    if scenario.seq is None and scenario.phase != "decode":
        assumed.append(f"seq={tokens}")
    ids = _words(text.vocab_size, batch, tokens) if _vocabulary(text) else None
    values: dict[str, Any] = {}
    if name == "input_ids":
        values[name] = ids
    elif name == "pixel_values" and "spatial_shapes" in takes:
        values |= _patches(config, batch, module_dtype(module), assumed)
    elif shape := _shape(name, config, batch):
        values[name] = torch.randn(shape, dtype=module_dtype(module))
        if name == "pixel_values":
            assumed.append(f"image={shape[-2]}x{shape[-1]}")
    elif name not in {spec.name for spec in scenario.inputs}:  # those are laid over these
        raise CaptureError(f"do not know what {name} looks like; give --input {name}=SHAPE:DTYPE")
    if "decoder_input_ids" in takes and config.is_encoder_decoder:
        values["decoder_input_ids"] = ids
    if "use_cache" in takes:
        values["use_cache"] = scenario.phase != "forward"
        assumed.append(f"use_cache={values['use_cache']}")
    if scenario.trains and "labels" in takes and (labels := _labels(module, config, values)):
        values["labels"], said = labels
        assumed.append(f"labels={said}")
    return values


def _words(known: int, batch: int, tokens: int) -> torch.Tensor:
    """Text without padding and other marks, which lie at the ends of a vocabulary. Its values are
    known under fake tensors, as drawn ones are not: a model may ask how long it is."""
    return torch.arange(batch * tokens).view(batch, tokens) % max(known // 2, 1) + known // 4


def _patches(
    config: Any, batch: int, dtype: torch.dtype, assumed: list[str]
) -> dict[str, torch.Tensor]:
    """Square images that are cut into patches already, with what tells which patches are there, all
    of them. Their sizes are known under fake tensors, since a model reads them."""
    vision = getattr(config, "vision_config", config)
    side = math.isqrt(vision.num_patches)
    assumed.append(f"image={side}x{side} patches")
    places = batch, vision.num_patches
    pixels = vision.num_channels * vision.patch_size**2
    return {
        "pixel_values": torch.randn(*places, pixels, dtype=dtype),
        "pixel_attention_mask": torch.ones(places, dtype=torch.int32),
        "spatial_shapes": torch.tensor([[side, side]] * batch),
    }


def _labels(module: Any, config: Any, values: Mapping[str, Any]) -> tuple[torch.Tensor, str] | None:
    """Labels with which a model computes its own loss, and their kind in words: a word for each
    place of text, a class for each example; None where the model's task is another."""
    name = type(module).__name__
    if name.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")):
        ids = values.get("decoder_input_ids", values.get("input_ids"))
        return None if ids is None else (ids.clone(), "a word for each place")
    if name.endswith("Classification") and "Token" not in name:
        batch = next(iter(values.values())).shape[0]
        return torch.randint(0, config.num_labels, (batch,)), "a class for each example"
    return None


def _shape(name: str, config: Any, batch: int) -> tuple[int, ...]:
    """Shape of an input that is no text, by its name; () where it is not known."""
    if name == "pixel_values":
        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", None) or _DEFAULT_PIXELS
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
        return batch, getattr(vision, "num_channels", 3), height, width
    counts = [getattr(config, count, None) for count in ("num_mel_bins", "max_source_positions")]
    if name == "input_features" and None not in counts:
        return batch, config.num_mel_bins, 2 * config.max_source_positions
    counts = [getattr(config, count, None) for count in ("max_length", "num_mel_bins")]
    if name == "input_values" and None not in counts:  # a spectrogram
        return batch, config.max_length, config.num_mel_bins
    return (batch, _AUDIO_SAMPLES) if name == "input_values" else ()


def _hint(module: Any, config: Any, batch: int, given: Mapping[str, Any]) -> str:
    """The main inputs of parts of a model that it also takes and was not given, as a hint;
    "" for none."""
    takes = inspect.signature(module.forward).parameters
    parts = dict.fromkeys(getattr(part, "main_input_name", "") for part in module.modules())
    dtype = str(module_dtype(module)).removeprefix("torch.")
    told = [
        f"--input {name}={'x'.join(map(str, _shape(name, config, batch))) or 'SHAPE'}:{dtype}"
        for name in parts
        if name in takes and name not in given
    ]
    return f"it takes more inputs: give {' '.join(told)}" if told else ""


def _vocabulary(config: Any) -> bool:
    return isinstance(getattr(config, "vocab_size", None), int)


def _default_tokens(config: Any) -> int:
    names = ("max_target_positions", "max_position_embeddings", "n_positions")
    longest = [getattr(config, name, None) for name in names]
    return min([_DEFAULT_TOKENS, *(n for n in longest if isinstance(n, int) and n > 0)])


def _decoding(
    module: Any,
    config: Any,
    scenario: Scenario,
    kwargs: dict[str, Any],
    assumed: list[str],
) -> dict[str, Any]:
    """Inputs of one token behind so many that the cache is full but for its last place."""
    if "input_ids" not in kwargs or config.is_encoder_decoder:
        raise CaptureError("--phase decode needs a causal language model; use --phase forward")
    length = scenario.kv_len or _default_tokens(config)
    if scenario.kv_len is None:
        assumed.append(f"kv_len={length}")
    position = torch.full((1,), length - 1)
    places = {"position_ids": position[None], "cache_position": position}
    takes = inspect.signature(module.forward).parameters
    carried = _carried(module.eval(), config, kwargs, length, assumed)
    if why := undescribed(signature(carried)):
        raise CaptureError(f"{why}; use --phase prefill")
    return kwargs | carried | {name: place for name, place in places.items() if name in takes}


def _carried(
    module: Any, config: Any, kwargs: dict[str, Any], length: int, assumed: list[str]
) -> dict[str, Any]:
    """Arguments by name that a model hands itself from token to token, as its own call of the
    tokens before leaves them: so each layer has the keys, values and states that it makes. A static
    cache where the model takes one, else what it makes by itself."""
    import transformers

    takes = inspect.signature(module.forward).parameters
    few = {"logits_to_keep": 1} if "logits_to_keep" in takes else {}

    def left(tokens: int, **cache: Any) -> dict[str, Any]:
        prompt = kwargs | few | {"input_ids": kwargs["input_ids"].repeat(1, tokens)}
        with torch.no_grad():
            result = module(**prompt, **cache)
        return {name: value for name, value in result.items() if name in takes}

    before, why = max(length - 1, 1), "forward takes no past_key_values"
    if "past_key_values" in takes:
        static = transformers.StaticCache(config=config, max_cache_len=length)
        try:
            carried = left(before, past_key_values=static)
        except Exception as error:  # noqa: BLE001 however a model with another cache refuses this
            why = f"StaticCache raised {type(error).__name__}"
        else:
            if not carried:
                assumed.append("cache=none: the model keeps nothing from token to token")
            return carried
    try:
        carried = left(1)
        if signature(carried) != signature(left(2)):  # a state is as large behind any number
            carried = left(before)
    except Exception as error:
        raise failure("filling a cache", error, "use --phase prefill") from error
    kinds = ", ".join(type(value).__name__ for value in carried.values())
    assumed.append(f"cache={kinds or 'none'} of the model's own ({why})")
    return carried
