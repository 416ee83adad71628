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
from tierkv.integrations.vllm.logs import log
from tierkv.integrations.vllm.pages import EnginePages
from tierkv.integrations.vllm.settings import Settings
from tierkv.integrations.weights import memory_file, weights_fingerprint

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

NO_FILES = "dummy"
"""vLLM's load format for weights that are made up, always in the same way."""

FROM_FOLDER = frozenset(
    {
        "auto",
        "bitsandbytes",
        "fastsafetensors",
        "gguf",
        "hf",
        "instanttensor",
        "mistral",
        "npcache",
        "pt",
        "runai_streamer",
        "runai_streamer_sharded",
        "safetensors",
        "sharded_state",
    }
)
"""vLLM's load formats whose weights lie in the model's own folder."""

MEDIA_SETTINGS = (
    "mm_processor_kwargs",
    "mm_device_do_normalize",
    "mm_encoder_attn_dtype",
    "video_pruning_rate",
    "video_pruning_method",
)
"""What decides what an engine makes of media, beside the media and the weights."""

ADAPTER_SETTINGS = ("target_modules", "enable_tower_connector_lora")
"""What decides where an adapter has effect, beside its files. None by default."""

MEDIA_FILES = "*processor_config.json"
CODE_FILES = "*.py"

NOT_CONTENT = ("_name_or_path", "transformers_version")
"""What a model's configuration has in it that says nothing about its KV."""


def refuse_what_cannot_be_told(
    config: VllmConfig, caches: KVCacheConfig, *, hears_of_sleep: bool
) -> None:
    """Raise InvalidArgument if a block holds, or may hold, what its name would not say.

    ``hears_of_sleep``: whether this vLLM says when it gives its KV memory away.
    """
    if getattr(config.cache_config, "calculate_kv_scales", False):
        raise InvalidArgument(
            "calculate_kv_scales makes the KV of a run depend on its first request, so no other "
            "run may use it: take scales from the checkpoint, or run without the connector"
        )
    if config.model_config.is_diffusion:
        raise InvalidArgument(
            "a diffusion model changes the KV of tokens after it was computed: tierkv stores what "
            "depends on the tokens before only; run this model without the connector"
        )
    parallel = config.parallel_config
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        size = getattr(parallel, name, 1)
        if size > 1:
            raise InvalidArgument(
                f"{name} is {size}: with context parallelism a rank holds parts of blocks, which "
                "tierkv does not store; run without it or without the connector"
            )
    if caches.needs_kv_cache_zeroing and config.use_v2_model_runner:
        raise InvalidArgument(
            "this KV cache has several precisions, and vLLM's Model Runner V2 zeroes new blocks "
            "of it before it says so, while a save may still read them: set "
            "VLLM_USE_V2_MODEL_RUNNER=0, or run without the connector"
        )
    if config.model_config.enable_sleep_mode and not hears_of_sleep:
        raise InvalidArgument(
            "enable_sleep_mode: this version of vLLM does not say when it gives its KV memory "
            "away, which a save may still read; use 0.33, or run without one of both"
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
        "model": sorted(_model_facts(config)),
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
        tenant=settings.tenant,
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


def _model_facts(config: VllmConfig) -> Iterator[tuple[str, str]]:
    model = config.model_config
    content = {
        key: value for key, value in model.hf_config.to_dict().items() if key not in NOT_CONTENT
    }
    yield "config", json.dumps(content, sort_keys=True, default=repr)
    yield "dtype", str(model.dtype)
    yield "quantization", str(model.quantization)
    yield "quantization settings", repr(getattr(model, "quantization_config", None))
    yield "classes", repr(sorted(getattr(model, "model_class_overrides", {}).items()))
    yield "runner", str(model.runner_type)
    # Some models scale positions or attention by whether this is above a bound of theirs.
    yield "longest", str(model.max_model_len)
    media = getattr(model, "multimodal_config", None)
    if media is not None:
        for name in MEDIA_SETTINGS:
            yield name, repr(getattr(media, name, None))
        yield "media files", _small_files(config, MEDIA_FILES)
    if model.trust_remote_code:
        yield "code", _small_files(config, CODE_FILES)
    adapters = config.lora_config
    if adapters is not None:
        for name in ADAPTER_SETTINGS:
            if value := getattr(adapters, name, None):
                yield name, repr(value)


def _small_files(config: VllmConfig, pattern: str) -> str:
    """What is in the files of the model's folder that have such names."""
    digest = xxhash.xxh3_128()
    folder = _folder(config.model_config, config)
    if folder is not None:
        for file in sorted(folder.rglob(pattern)):
            content = file.read_bytes()
            digest.update(f"{file.relative_to(folder).as_posix()}\0{len(content)}\0".encode())
            digest.update(content)
    return digest.hexdigest()


def _weights(config: VllmConfig, settings: Settings) -> list[str]:
    if settings.weights:
        return [weights_fingerprint(settings.weights, memory_file())]
    models = [config.model_config]
    speculative = config.speculative_config
    draft = getattr(speculative, "draft_model_config", None)
    if draft is not None and draft.model != config.model_config.model:
        models.append(draft)
    return [_weights_of(model, config) for model in models]


def _weights_of(model: ModelConfig, config: VllmConfig) -> str:
    load_format: Any = config.load_config.load_format
    name = str(getattr(load_format, "value", load_format))
    if name == NO_FILES:
        return NO_FILES
    known = name in FROM_FOLDER and not _elsewhere(model)
    folder = _folder(model, config) if known else None
    if folder is None:
        raise InvalidArgument(
            f"the weights of {model.model} (load_format {name!r}) are not found in a folder on "
            "this machine, so they cannot be told from others: name a file or folder that tells "
            "them by kv_connector_extra_config tierkv.weights"
        )
    return weights_fingerprint(folder, memory_file())


def _elsewhere(model: ModelConfig) -> bool:
    """Whether vLLM streams the weights from another place than the model's configuration."""
    return bool(getattr(model, "model_weights", ""))


def _folder(model: ModelConfig, config: VllmConfig) -> Path | None:
    """Where the model lies: a folder, or one file. None if it does not lie here."""
    path = Path(model.model)
    if path.exists():
        return path
    from huggingface_hub import snapshot_download  # vLLM has it

    try:
        found = snapshot_download(
            model.model,
            revision=model.revision,
            cache_dir=config.load_config.download_dir,
            local_files_only=True,
        )
    except Exception as error:  # whatever it raises: it is not here
        log.debug("%s is not found in the cache of the hub: %s", model.model, error)
        return None
    return Path(found)


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
