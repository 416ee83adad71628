"""Who may use whose blocks: everything that decides what is in an engine's KV, as one KVSpec."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

from tierkv.core.spec import KVSpec
from tierkv.errors import InvalidArgument
from tierkv.integrations.vllm.geometry import Geometry
from tierkv.integrations.vllm.pages import EnginePages
from tierkv.integrations.vllm.settings import Settings
from tierkv.integrations.weights import memory_file, weights_fingerprint

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

NO_FILES = "dummy"
"""vLLM's load format for weights that are made up, always in the same way."""

NOT_CONTENT = ("_name_or_path", "transformers_version")
"""What a model's configuration has in it that says nothing about its KV."""


def refuse_what_cannot_be_told(config: VllmConfig) -> None:
    """Raise InvalidArgument if a block holds what its name would not say."""
    if getattr(config.cache_config, "calculate_kv_scales", False):
        raise InvalidArgument(
            "calculate_kv_scales makes the KV of a run depend on its first request, so no other "
            "run may use it: take scales from the checkpoint, or run without the connector"
        )
    parallel = config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size > 1:
            raise InvalidArgument(
                f"{name} is {size}: with context parallelism a rank holds parts of blocks, which "
                "tierkv does not store; run without it or without the connector"
            )


def spec_of(
    config: VllmConfig,
    caches: KVCacheConfig,
    geometry: Geometry,
    pages: EnginePages,
    settings: Settings,
    ranks: tuple[int, int],
) -> KVSpec:
    """The namespace of a worker of (pipeline, tensor) ``ranks``. Reads the model's weights.

    Names no path: the same model under another one, or started from elsewhere, is the same.
    """
    model = config.model_config
    facts = {
        "weights": _weights(config, settings),
        "model": sorted(_model_facts(model)),
        "cache": _cache_facts(config, caches, geometry, pages),
    }
    encoded = json.dumps(facts, sort_keys=True, default=repr).encode()
    parallel = config.parallel_config
    return KVSpec(
        model=_display_name(model.model),
        packing=_packing(caches, geometry),
        packed_bytes=pages.block_bytes,
        block_tokens=geometry.block_tokens,
        dtype=_kv_dtype(caches),
        fingerprint=xxhash.xxh3_128_hexdigest(encoded),
        tp_rank=ranks[1],
        tp_size=parallel.tensor_parallel_size,
        pp_rank=ranks[0],
        pp_size=parallel.pipeline_parallel_size,
    )


def adapter_fingerprint(path: str) -> str | None:
    """Of a LoRA adapter's files; None if they are not here, so that nothing is known of them."""
    folder = Path(path).expanduser()
    if not folder.exists():
        return None
    config = folder / "adapter_config.json"
    weights = weights_fingerprint(folder, memory_file())
    settings = config.read_bytes() if config.exists() else b""
    return f"{weights}-{xxhash.xxh3_64_hexdigest(settings)}"


def _display_name(model: str) -> str:
    return Path(model).resolve().name if Path(model).exists() else model


def _model_facts(model: ModelConfig) -> Iterator[tuple[str, str]]:
    content = {
        key: value for key, value in model.hf_config.to_dict().items() if key not in NOT_CONTENT
    }
    yield "config", json.dumps(content, sort_keys=True, default=repr)
    yield "dtype", str(model.dtype)
    yield "quantization", str(model.quantization)
    yield "runner", str(model.runner_type)


def _weights(config: VllmConfig, settings: Settings) -> list[str]:
    if settings.weights:
        return [weights_fingerprint(settings.weights, memory_file())]
    models = [config.model_config]
    speculative = config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    if draft is not None and draft.model != config.model_config.model:
        models.append(draft)
    return [_weights_of(model, config.load_config.load_format) for model in models]


def _weights_of(model: ModelConfig, load_format: Any) -> str:
    if str(getattr(load_format, "value", load_format)) == NO_FILES:
        return NO_FILES
    path = Path(model.model)
    if not path.exists():
        path = _downloaded(model)
    return weights_fingerprint(path, memory_file())


def _downloaded(model: ModelConfig) -> Path:
    """Where a model of the hub lies that vLLM has loaded."""
    from huggingface_hub import snapshot_download  # vLLM has it

    try:
        return Path(snapshot_download(model.model, revision=model.revision, local_files_only=True))
    except Exception as error:  # whatever it raises, there is only this to say
        raise InvalidArgument(
            f"the weights of {model.model} are not found on this machine ({error}), so they "
            "cannot be told from others: name their folder by kv_connector_extra_config "
            "tierkv.weights"
        ) from error


def _cache_facts(
    config: VllmConfig, caches: KVCacheConfig, geometry: Geometry, pages: EnginePages
) -> list[str]:
    layers = [layer for column in geometry.layers for layer in column]
    context = config.compilation_config.static_forward_context
    backends = sorted({_backend(context[layer]) for layer in layers if layer in context})
    specs = [
        repr(caches.kv_cache_groups[number].kv_cache_spec) for number in caches.transfer_group_ids
    ]
    return [
        _version(),
        str(config.cache_config.cache_dtype),
        str(getattr(caches, "kv_cache_layout", None)),
        pages.describe(),
        *backends,
        *specs,
    ]


def _backend(layer: Any) -> str:
    """The attention kernels, and on a CPU the instruction set they pack keys for."""
    from vllm.platforms import current_platform

    name = str(layer.get_attn_backend().get_name())
    if not current_platform.is_cpu():
        return name
    instructions = getattr(layer, "isa", None)
    if instructions is None:
        raise InvalidArgument(
            f"attention layers ({name}) do not say which instruction set they pack keys for; "
            "this version of vLLM does so in another way than tierkv knows"
        )
    return f"{name} {instructions}"


def _packing(caches: KVCacheConfig, geometry: Geometry) -> str:
    layout = getattr(caches, "kv_cache_layout", None) or "default"
    return f"vllm {_version()} {layout} x{len(geometry.columns)}"


def _kv_dtype(caches: KVCacheConfig) -> str:
    spec = caches.kv_cache_groups[0].kv_cache_spec
    first = getattr(spec, "first_spec", spec)
    return str(getattr(first, "dtype", "uint8")).removeprefix("torch.")


def _version() -> str:
    import vllm

    return str(vllm.__version__)
