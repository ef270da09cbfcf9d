"""LMCache's codecs on tensors in files; runs by path in LMCache's environment.

Each input line is a JSON object, each reply a line of JSON. Tensors are bfloat16 as uint16,
(windows, layers, 2, tokens, kv_heads, head_dim), in ``.npy`` files; each window is a chunk.
CacheGen and fp8 are LMCache's serializers. TurboQuant's are Triton kernels for CUDA; the same
computation is written here in torch, with LMCache's rotation, centroids and sizes.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from hashlib import sha256
from types import SimpleNamespace
from typing import Any

import lmcache.v1.distributed.serde.turboquant.turboquant as turboquant_serde
import lmcache.v1.platform.torch_ops.cachegen_kernels as cachegen_kernels
import numpy as np
import torch
from lmcache.storage_backend.serde.cachegen_basics import CacheGenGPUEncoderOutput
from lmcache.storage_backend.serde.cachegen_decoder import CacheGenDeserializer
from lmcache.storage_backend.serde.cachegen_encoder import CacheGenSerializer
from lmcache.v1.distributed.serde.fp8 import Fp8QuantizationDeserializer, Fp8QuantizationSerializer

Request = dict[str, Any]
Reply = dict[str, float]


def load(request: Request) -> torch.Tensor:
    bits = np.load(request["tensors"], allow_pickle=False)
    return torch.from_numpy(bits.view(np.int16)).view(torch.bfloat16)


def digest(kv: torch.Tensor) -> int:
    data = kv.contiguous().view(torch.int16).numpy().tobytes()
    return int.from_bytes(sha256(data).digest()[:6], "big")


def save(request: Request, windows: list[torch.Tensor]) -> None:
    decoded = torch.stack(windows).to(torch.bfloat16).contiguous()
    np.save(request["decoded"], decoded.view(torch.int16).numpy().view(np.uint16))


def cachegen(request: Request) -> tuple[CacheGenSerializer, CacheGenDeserializer]:
    """Return encoder and decoder for a model, with the bins of LMCache or of the request."""
    config = SimpleNamespace(chunk_size=request["tokens"])
    metadata = SimpleNamespace(model_name=request["model"])
    sides = (
        CacheGenSerializer(config, metadata),
        CacheGenDeserializer(config, metadata, torch.bfloat16),
    )
    if "bins" in request:
        for side in sides:
            side.key_bins = side.value_bins = torch.tensor(request["bins"], dtype=torch.float32)
    return sides


def payload_bytes(stored: bytes) -> int:
    """Return the bytes of CacheGen's tensors: streams, lengths, tables, scales.

    Pickle's constant overhead is not counted.
    """
    parts = CacheGenGPUEncoderOutput.from_bytes(stored)
    tensors = [parts.cdf, parts.max_tensors_key, parts.max_tensors_value]
    for chunk in parts.data_chunks:
        tensors += [chunk.bytestream, chunk.bytestream_lengths]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class InThisThread:
    """Replaces the thread pool, whose overhead on one core exceeds the work."""

    def __enter__(self) -> InThisThread:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def map(self, work: Callable[[Any], Any], tasks: list[Any]) -> Iterator[Any]:
        return map(work, tasks)


def measure_cachegen(request: Request) -> Reply:
    kv = load(request)
    encoder, decoder = cachegen(request)
    stored = [encoder.to_bytes(window) for window in kv]
    save(request, [decoder.from_bytes(data) for data in stored])
    return {"digest": digest(kv), "stored_bytes": sum(map(payload_bytes, stored))}


def time_cachegen(request: Request) -> Reply:
    """Return the processor seconds of one encode and one decode of the first window.

    In LMCache's favour its coder runs in this thread alone.
    """
    cachegen_kernels.ThreadPoolExecutor = InThisThread
    kv = load(request)[0]
    encoder, decoder = cachegen(request)
    stored, encode_s = timed(lambda: encoder.to_bytes(kv))
    _, decode_s = timed(lambda: decoder.from_bytes(stored))
    return {"digest": digest(kv), "encode_s": encode_s, "decode_s": decode_s}


def timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result of *work*, and its processor seconds."""
    started = time.process_time()
    result = work()
    return result, time.process_time() - started


def measure_fp8(request: Request) -> Reply:
    """Encode and decode each window as fp8: a cast, without scales."""
    kv = load(request)
    stored_bytes, decoded = 0, []
    for window in kv:
        source, found = SimpleNamespace(tensor=window), torch.empty_like(window)
        stored = SimpleNamespace(tensor=torch.empty(window.numel(), dtype=torch.uint8))
        stored_bytes += Fp8QuantizationSerializer().serialize(source, stored, None)
        Fp8QuantizationDeserializer().deserialize(stored, SimpleNamespace(tensor=found), None)
        decoded.append(found)
    save(request, decoded)
    return {"digest": digest(kv), "stored_bytes": stored_bytes}


def measure_turboquant(request: Request) -> Reply:
    """Encode and decode each window with a preset of TurboQuant, in all layers.

    Its default skips the first and last two layers, which would leave two of this model. Heads are
    *head_dim* wide, which may differ from the model's.
    """
    kv = load(request)
    config = turboquant_serde.TurboQuantSerdeConfig(
        request["preset"], request["head_dim"], skip_first_layers=0, skip_last_layers=0
    )
    layers, tokens = kv.shape[1], kv.shape[3]
    merged = kv.reshape(len(kv), layers, 2, tokens, -1, request["head_dim"])
    decoded = torch.empty_like(merged)
    for layer in range(layers):
        tables = turboquant_serde._make_tq_tensors_for_layer(config, layer, torch.device("cpu"))
        decoded[:, layer, 0] = turbo_keys(merged[:, layer, 0].float(), config, *tables)
        decoded[:, layer, 1] = turbo_values(merged[:, layer, 1].float(), config.value_quant_bits)
    save(request, list(decoded.reshape(kv.shape)))
    shape = torch.Size((2, layers, tokens, kv[0, 0, 0, 0].numel()))
    stored = turboquant_serde._serialized_nbytes_for_shape(shape, torch.bfloat16, config)
    return {"digest": digest(kv), "stored_bytes": len(kv) * stored}


def turbo_keys(
    keys: torch.Tensor,
    config: Any,
    rotation: torch.Tensor,
    midpoints: torch.Tensor,
    centroids: torch.Tensor,
) -> torch.Tensor:
    """Return *keys*, (..., head_dim), after ``_tq_fused_store_mse`` and ``_tq_full_dequant_kv``."""
    norms = keys.norm(dim=-1, keepdim=True)
    rotated = (keys / (norms + 1e-8)) @ rotation
    found = centroids[torch.bucketize(rotated, midpoints, right=True)]
    if config.norm_correction:
        found = found * torch.rsqrt(found.square().sum(-1, keepdim=True) + 1e-16)
    restored = (norms.half().float() * found).half().float()
    back: torch.Tensor = (restored @ rotation.T).half().float()
    return back


def turbo_values(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Return *values* after ``_store_quantized_value`` and ``_tq_full_dequant_kv``."""
    most = (1 << bits) - 1
    low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
    step = ((high - low) / most).clamp_min(1e-8)
    codes = ((values - low) / step + 0.5).floor().clamp(0, most)
    return (codes * step.half().float() + low.half().float()).half().float()


WORK: dict[str, Callable[[Request], Reply]] = {
    "cachegen": measure_cachegen,
    "time_cachegen": time_cachegen,
    "fp8": measure_fp8,
    "turboquant": measure_turboquant,
}


def main() -> None:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    print(json.dumps({"ready": 1}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(WORK[request["do"]](request)), flush=True)


if __name__ == "__main__":
    main()
