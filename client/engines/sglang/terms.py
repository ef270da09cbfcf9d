"""What an SGLang engine was started with, as far as its KV depends on it.

SGLang's page hashes cover tokens, cache salts and the ids of adapters, which of those given at the
start are made of their names and paths. Works on SGLang's ServerArgs by its fields, without
importing SGLang.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blake3 import blake3

from kvstore.client.engines.identity import (
    Departures,
    adapter_files,
    files_digest,
    in_words,
    is_exact,
    stated,
)
from kvstore.proto.errors import ModelError
from kvstore.proto.types import DType

_TERMS = (
    *("dtype", "quantization", "quantization_param_path", "kv_cache_dtype", "revision"),
    *("json_model_override_args", "model_impl", "modelopt_quant", "model_loader_extra_config"),
    *("language_model_only", "mm_process_config", "quantize_and_serve", "rl_quant_profile"),
    *("mamba_ssm_dtype", "enable_int8_mamba_checkpoint", "enable_mamba_cache_stochastic_rounding"),
    *("qsa_indexer_dtype", "enable_deepseek_v4_fp4_indexer", "uno_lora_path"),
    *("speculative_draft_model_path", "speculative_draft_model_revision"),
    *("speculative_draft_model_quantization", "load_format", "custom_weight_loader"),
    *("modelopt_checkpoint_restore_path", "enable_quant_communications"),
)
"""Fields of ServerArgs. Draft models are among them as their layers may lie in the same pages."""

NO_ADAPTER = "none"


@dataclass(frozen=True, slots=True)
class EngineTerms:
    """``stated``: the settings that somebody gave and KV depends on; None where nobody says;
    ``kv_cache_dtype`` as it was stated, ``adapters_digest`` of the files of LoRA adapters that
    were given at the start, if any. ``nameless_adapter``: one of them whose files are not here.
    ``model_path``: where the weights come from, which may be served under another name;
    ``commit``: which of a hub's, if stated.
    """

    stated: dict[str, str] | None = None
    kv_cache_dtype: str = ""
    adapters_digest: str = NO_ADAPTER
    nameless_adapter: str = ""
    model_path: str = ""
    commit: str = ""

    def departures(self, adapter_digest: str, stored: DType, quantization: str) -> Departures:
        """Return what the engine does otherwise; *stored*: as what elements it keeps KV.

        Raises ModelError for adapters that have no name.
        """
        found = {"arguments": "unknown"} if self.stated is None else dict(self.stated)
        if found.get("dtype") == stored.name:
            del found["dtype"]  # the layers say so, too
        return Departures("sglang", found, self.adapters(adapter_digest), quantization)

    def adapters(self, stated: str) -> str:
        """Return a name of the adapters, *stated* by the user or found.

        Raises ModelError where files may change under a path that nobody can look at.
        """
        if stated != NO_ADAPTER:
            return stated
        if self.nameless_adapter:
            fix = "its files are not in a folder here: give adapter_digest in the extra config"
            raise ModelError("lora_paths", self.nameless_adapter, fix)
        return self.adapters_digest

    def quantization_of(self, stored: DType) -> str:
        """Return what elements that are *stored* so are. SGLang keeps every kind of fp8 as bytes,
        which do not tell. Raises ModelError where nobody says.
        """
        if stored is not DType.uint8:
            return "none"
        if not self.kv_cache_dtype:
            fix = "nobody says of what type its bytes are: this engine's arguments are not known"
            raise ModelError("dtype", stored.name, fix)
        return f"bytes-of:{self.kv_cache_dtype}"


UNSTATED = EngineTerms()
"""Of pools without an engine around them."""


def terms_of(arguments: Any, *, is_hip: bool = False) -> EngineTerms:
    """Return the terms in *arguments*, a ServerArgs. *is_hip*: AMD's fp8 has another zero.

    Raises ModelError for weights that have no name.
    """
    if getattr(arguments, "load_format", None) == "dummy":
        raise ModelError("load_format", "dummy", "random weights have no name")
    found = stated({name: getattr(arguments, name, None) for name in _TERMS})
    if is_hip:
        found["hip"] = "True"
    revision = found.get("revision", "")
    commit = found.pop("revision") if is_exact(revision) else ""
    kept_as = in_words(getattr(arguments, "kv_cache_dtype", None))
    adapters, nameless = _adapters(arguments)
    path = str(getattr(arguments, "model_path", None) or "")
    return EngineTerms(found, kept_as, adapters, nameless, path, commit)


def _adapters(arguments: Any) -> tuple[str, str]:
    """Return a digest of all adapters' files, and one that has none here."""
    digest, path = blake3(), ""
    paths = sorted(set(_adapter_paths(getattr(arguments, "lora_paths", None))))
    for path in paths:
        if not Path(path).is_dir():
            return NO_ADAPTER, path
        digest.update(files_digest(adapter_files(path)))
    return (digest.hexdigest() if paths else NO_ADAPTER), ""


def _adapter_paths(stated: Any) -> Iterator[str]:
    """Yield the paths in all the forms that ``--lora-paths`` has."""
    if isinstance(stated, Mapping):
        stated = list(stated.values())
    for one in stated or ():
        if isinstance(one, Mapping):
            yield str(one["lora_path"])
        elif isinstance(one, str):
            yield one.partition("=")[2] or one
        else:
            yield str(one.lora_path)


class WeightsEpoch:
    """Which weights an engine's pages are of, where they change while it runs.

    Any thread may ask for names; SGLang flushes from one, with those that store stopped.
    """

    def __init__(
        self,
        version: Callable[[], str],
        agree: Callable[[], bytes],
        *,
        resets_on_flush: bool = True,
    ) -> None:
        """*version*: what SGLang calls the weights by now. *agree* returns bytes that were never
        returned before, and are the same on each rank. *resets_on_flush*: a flush alone, too, may
        come with other weights, of which SGLang tells nobody.
        """
        self._version = version
        self._agree = agree
        self._resets_on_flush = resets_on_flush
        self._known = version()
        self._epoch = b""

    def named(self, hashes: Sequence[str]) -> list[str]:
        """Return what the store calls pages; nothing while some of the pool's are of other weights
        than those that run.
        """
        if self._version() != self._known:
            return []
        epoch = self._epoch
        if not epoch:
            return list(hashes)
        return [blake3(epoch + one.encode()).hexdigest() for one in hashes]

    def flushed(self) -> None:
        """Take note that the engine has no page left: what was stored before is not loaded again.

        A version that is a commit or a digest is a name that engines share.
        """
        agreed, version = self._agree(), self._version()
        if version != self._known and is_exact(version):
            self._epoch = b"version:" + version.encode()
        elif version != self._known or self._resets_on_flush:
            self._epoch = agreed
        self._known = version
