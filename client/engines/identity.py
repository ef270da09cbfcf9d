"""The identity that engines give a model's KV, so that engines with the same weights share it.

An engine passes its weights, its settings and its departures from them. Without departures
nothing of the engine is in the identity. Reads a transformers config by its fields, without
importing transformers.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, TypeAlias

from blake3 import blake3

from kvstore.client.chunk import LayerTensors
from kvstore.client.engines.prefix import least_of
from kvstore.client.options import Access, ClientOptions, TransportName
from kvstore.proto.errors import InvalidRequestError, ModelError
from kvstore.proto.hf_config import OWN_TOKENIZER, rope_parameters
from kvstore.proto.types import (
    MIN_CHUNK_TOKENS,
    DType,
    LayerGroup,
    LayerKind,
    Model,
    RopeParameters,
)

SHARED_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""Architectures whose K and V are alike in all engines: heads, element order and rotation."""
SHARED_ROPES = ("default", "linear", "llama3")
"""Rotations that engines compute alike: SGLang omits yarn's ``attention_factor``."""
_READ_BY_SOME = ("dual_chunk_attention_config", "qk_norm", "bias")
"""Settings that some engines follow and others ignore."""
NO_ROPE = RopeParameters(0.0, 0, "none")

_IN_CACHE = re.compile(r"/models--([^/]+)/snapshots/[0-9a-f]{40}(/.+)?$")
_NAME_DIGITS = 8
_VOLATILE_SETTINGS = (
    "_name_or_path", "dtype", "torch_dtype", "transformers_version", "use_cache",
)  # fmt: skip
"""Config settings left out of the identity; the layer groups state the KV's dtype."""
_UNSTATED = ("None", "auto", "False", "{}", "[]", "")
"""Values of settings that were not given."""


@dataclass(frozen=True)
class Weights:
    """The weights an engine runs."""

    model_id: str
    revision: str
    """See ``weights_name``."""
    folder: Path | None = None
    """The folder of the settings and the tokenizer, if the revision covers them."""

    @cached_property
    def config(self) -> Any:
        """The transformers config in the folder; None if unreadable."""
        if self.folder is None:
            return None
        try:
            from transformers import AutoConfig

            return AutoConfig.from_pretrained(
                self.folder, local_files_only=True, trust_remote_code=False
            )
        except (ImportError, OSError, ValueError, KeyError, TypeError, AttributeError):
            return None


def weights_of(model: str, stated: str = "", commit: str = "") -> Weights:
    """Return the weights of *model*, a folder or a hub name; other arguments as ``weights_name``.

    Copies of a folder share one name, derived from its content; a commit has the same name by hub
    name and in the hub's cache. Raises ModelError.
    """
    revision = weights_name(model, stated, commit)
    files, in_cache = weights_files(model), _IN_CACHE.search(model.rstrip("/"))
    name, folder = short_name(model), None
    if files:
        folder = Path(model)
        name = f"{_model_type(folder)}-{_sample(_marks(files)).hex()[:_NAME_DIGITS]}"
    elif not is_exact(stated):
        folder = _cached_folder(model, commit)
    if in_cache:  # one commit may hold several: checkpoint folders, GGUF files
        name = in_cache[1].replace("--", "/") + (in_cache[2] or "")
    return Weights(name, revision, folder)


def short_name(model: str) -> str:
    """Return *model* without its path, which differs between machines."""
    return Path(model).resolve().name if Path(model).is_dir() else model


def _model_type(folder: Path) -> str:
    try:
        return str(json.loads((folder / "config.json").read_text())["model_type"])
    except (OSError, ValueError, KeyError, TypeError):
        return "weights"


def _cached_folder(model: str, commit: str) -> Path | None:
    """Return the cache folder of the hub's *model* at *commit*."""
    try:
        from huggingface_hub import try_to_load_from_cache

        found = try_to_load_from_cache(model, "config.json", revision=commit)
    except (ImportError, ValueError):
        return None
    return Path(found).parent if isinstance(found, str) else None


@dataclass(frozen=True, slots=True)
class Departures:
    """How an engine departs from the settings beside the weights."""

    engine: str
    stated: dict[str, str] = field(default_factory=dict)
    """The engine's settings that were given, by name."""
    adapter_digest: str = "none"
    quantization: str = "none"
    tokenizer: str = OWN_TOKENIZER


def stated(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return those of *settings* that were given, as text."""
    words = {name: in_words(value) for name, value in settings.items()}
    return {name: word for name, word in words.items() if word not in _UNSTATED}


def in_words(value: Any) -> str:
    """Return *value* as text; a path becomes its file's digest, because the file may change."""
    # A value with a brace is JSON, and may be too long for a path.
    if isinstance(value, str) and value and "{" not in value and Path(value).is_file():
        return f"file:{files_digest([Path(value)]).hex()}"
    return str(value)


def computed_in(dtype: Any, groups: Sequence[LayerGroup]) -> dict[str, str]:
    """Return the dtype an engine computes in, if it differs from the dtype of its KV."""
    name = str(dtype).removeprefix("torch.")
    return {} if all(group.dtype.name == name for group in groups) else {"computed in": name}


def identity_of(
    weights: Weights,
    groups: tuple[LayerGroup, ...],
    rope: RopeParameters,
    config: Any,
    departures: Departures,
) -> Model:
    """Return the identity under which KV of *weights* is interchangeable.

    *config*: the transformers config that the engine runs with; None if unknown. Engines share KV
    if *config* is that of the weights, there are no departures, and the architecture is one of
    SHARED_TYPES with K and V of every token; otherwise the KV is the engine's own.
    """
    is_plain = all(group.kind is LayerKind.attention for group in groups)
    own, running = _facts(weights.config), _facts(config)
    is_own = own is not None and own == running
    is_shared = (
        is_own
        and is_plain
        and config.model_type in SHARED_TYPES
        and rope.scaling in SHARED_ROPES
        and not any(getattr(config, name, None) for name in _READ_BY_SOME)
    )
    revision = weights.revision
    if departures.stated or not is_shared:
        words = json.dumps([departures.engine, running, departures.stated], sort_keys=True)
        revision += f"+settings={blake3(words.encode()).hexdigest()}"
    return Model(
        model_id=weights.model_id,
        model_revision=revision,
        adapter_digest=departures.adapter_digest,
        quantization=departures.quantization,
        layer_groups=groups,
        rope=rope,
        tokenizer_digest=departures.tokenizer,
    )


def _facts(config: Any) -> str | None:
    if config is None:
        return None
    settings = {k: v for k, v in config.to_dict().items() if k not in _VOLATILE_SETTINGS}
    return json.dumps(settings, sort_keys=True, default=str)


def own_rope(config: Any) -> RopeParameters:
    """Return the rotation that *config* states; NO_ROPE if unknown or *config* is None."""
    try:
        return rope_parameters(config)
    except ModelError:
        return NO_ROPE


# --- weights and their files

WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.gguf")
"""Patterns of weight files."""
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt", "tekken.json")
"""Files that define token ids."""
SAMPLE_STRIDE = 1 << 20
"""A sample has a file's first SAMPLE_STRIDE bytes, and SAMPLED bytes of each later stride."""
SAMPLED = 64

EPOCH_BYTES = 16
"""Random bytes that name otherwise unnamed weights."""
_ADAPTER_FILES = ("*.safetensors", "*.bin", "*.pt", "adapter_config.json")

_HEXADECIMAL = re.compile(r"(?<![0-9a-z])[0-9a-f]{7,}(?![0-9a-z])")
_COMMIT = re.compile(r"/snapshots/([0-9a-f]{40})(/|$)")
_FULL_DIGITS = 32

_Marks: TypeAlias = tuple[tuple[Path, int, int], ...]


def is_exact(revision: str) -> bool:
    """Return whether *revision* contains a commit or a digest: seven or more hexadecimal digits.
    Branches and tags move, and several models share a date or a step number."""
    found = _HEXADECIMAL.findall(revision.lower())
    return any(
        len(word) >= _FULL_DIGITS or not (word.isdecimal() or word.isalpha()) for word in found
    )


def weights_name(model: str, stated: str = "", commit: str = "") -> str:
    """Return a name for the weights of *model*, a folder or hub name, that changes when they do.

    *stated*: the revision given by the user. An exact one is used as is, for a folder with a
    sample of its files; any other is resolved: to the commit in a Hugging Face cache path, to a
    digest of a folder's files, or to the *commit* that was downloaded. Raises ModelError if none
    of these applies.
    """
    files = weights_files(model)
    if is_exact(stated):
        return f"{stated}+sample={_sample(_marks(files)).hex()}" if files else stated
    if in_path := _COMMIT.search(model):
        found = in_path[1]
    elif files:
        found = f"weights={_whole(_marks(files)).hex()}"
    else:
        found = commit
    if not found:
        fix = (
            f"give a commit or a digest of the weights: {model!r} is no local folder of weights, "
            "and a branch, a tag or no revision does not identify them"
        )
        raise ModelError("model_revision", stated, fix)
    return f"{stated}+{found}" if stated else found


def weights_files(model: str) -> list[Path]:
    """Return a folder's weight, settings and tokenizer files; [] if *model* is no such folder."""
    folder = Path(model)
    if not model or not folder.is_dir():
        return []
    files = [file for pattern in WEIGHTS for file in folder.glob(pattern)]
    if files:
        beside = (folder / name for name in ("config.json", *TOKENIZERS))
        files += filter(Path.is_file, beside)
    return sorted(files)


def _marks(files: Sequence[Path]) -> _Marks:
    return tuple((file, file.stat().st_size, file.stat().st_mtime_ns) for file in files)


@lru_cache(maxsize=8)
def _whole(marks: _Marks) -> bytes:
    return files_digest([file for file, *_ in marks])


@lru_cache(maxsize=8)
def _sample(marks: _Marks) -> bytes:
    """Return a digest of the names, sizes and sampled bytes of files."""
    digest = blake3()
    for file, size, _ in marks:
        digest.update(f"{file.name}\0{size}\0".encode())
        with file.open("rb", buffering=0) as opened:
            digest.update(opened.read(SAMPLE_STRIDE))
            for at in range(SAMPLE_STRIDE, size, SAMPLE_STRIDE):
                digest.update(os.pread(opened.fileno(), SAMPLED, at))
    return digest.digest()


def files_digest(files: Sequence[Path]) -> bytes:
    """Return a digest of the names and the bytes of *files*, 32 bytes."""
    digest = blake3(max_threads=blake3.AUTO)
    for file in files:
        digest.update(f"{file.name}\0{file.stat().st_size}\0".encode())
        digest.update_mmap(file)
    return digest.digest()


def adapter_files(folder: str) -> list[Path]:
    """Return the files of a LoRA adapter. Raises ModelError if there are none."""
    files = sorted(file for pattern in _ADAPTER_FILES for file in Path(folder).glob(pattern))
    if not files:
        raise ModelError("lora_path", folder, "give a folder with the adapter's weights")
    return files


# --- pages of opaque bytes: only the engine knows their tokens

BYTE_ROWS = MIN_CHUNK_TOKENS
"""A page is stored as BYTE_ROWS rows of one layer."""


def byte_group(page_bytes: int, field: str, name: str = "") -> LayerGroup:
    """Return the layer group of pages of *page_bytes* bytes. Raises ModelError, with *field* and
    *name*, unless they divide into BYTE_ROWS rows."""
    if page_bytes % BYTE_ROWS or not page_bytes:
        fix = f"pages have {page_bytes} bytes: use a multiple of {BYTE_ROWS}"
        raise ModelError(field, name or page_bytes, fix)
    return LayerGroup(LayerKind.mla, DType.uint8, (0,), 1, page_bytes // BYTE_ROWS)


def byte_tensors(page: Any) -> LayerTensors:
    """Return *page*, a torch tensor of bytes, as a chunk's tensors, which alias it. Raises torch's
    RuntimeError if it is not contiguous."""
    return [[[page.view(1, BYTE_ROWS, -1)]]]  # never a copy: data read into it would be lost


# --- settings


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Settings that every connector accepts, by name, in its engine's configuration."""

    address: str = "127.0.0.1:7420"
    model_revision: str = ""
    deadline_ms: int = 2000
    transport: TransportName = "auto"
    accuracy: str = "exact"
    token_file: str = ""
    tls_ca: str = ""
    tls_cert: str = ""
    tls_key: str = ""
    tenant: str = ""

    def __post_init__(self) -> None:
        least_of(self.accuracy)
        for one in fields(self):
            value, kind = getattr(self, one.name), type(one.default)
            if kind in (str, int, bool) and type(value) is not kind:
                raise InvalidRequestError(one.name, value, f"give a value of type {kind.__name__}")

    def options(self, chunk_tokens: int, **more: Any) -> ClientOptions:
        """Return a client's options; *more* are options without a setting here."""
        texts = (self.tls_ca, self.tls_cert, self.tls_key, self.token_file)
        ca, cert, key, token = (Path(text) if text else None for text in texts)
        access = Access(ca=ca, cert=cert, key=key, token_file=token)
        named = {"deadline_ms": self.deadline_ms, "tenant": self.tenant, **more}
        return ClientOptions(self.transport, chunk_tokens, access=access, **named)
