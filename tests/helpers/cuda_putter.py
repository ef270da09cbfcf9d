"""A client on a CUDA device: puts chunks from its memory and reads them into pages there.

Prints the outcome of each put, the number of chunks read, and whether all are correct.
"""

from __future__ import annotations

import sys

import numpy as np
import torch
from helpers.device_engine import paged_in, read_pages
from helpers.prompts import SMALL, frame_of, keys_of, tensors_of

from kvstore.client import ClientOptions
from kvstore.client.chunk import DeviceChunk, parents
from kvstore.client.cuda import CudaClient, DeviceRing
from kvstore.proto.device import open_device
from kvstore.proto.frame import header_bytes
from kvstore.proto.types import KVLayout

CHUNK_TOKENS, BLOCK_TOKENS, COUNT, SLOT_BYTES = 16, 8, 5, 4096


def main(address: str) -> None:
    """Put a prompt of COUNT chunks to the server at *address*, after slow work on the device."""
    cuda = torch.device("cuda", 0)
    device = open_device(cuda)
    memory = device.allocate(COUNT * SLOT_BYTES)
    ring = DeviceRing(device, memory)
    layout = KVLayout.of(SMALL, CHUNK_TOKENS)
    head = header_bytes(layout)
    options = ClientOptions(chunk_tokens=CHUNK_TOKENS, deadline_ms=60_000)
    with CudaClient(address, SMALL, options) as client:
        keys = keys_of(client, 1, COUNT)
        frames = [torch.from_numpy(frame_of(key, SMALL)).to(cuda) for key in keys]
        torch.cuda._sleep(200_000_000)  # a forward pass that is still running
        for at, frame in enumerate(frames):
            start = at * SLOT_BYTES
            memory[start + head : start + len(frame)].copy_(frame[head:])
        written = device.current_stream().record()
        chunks = [
            DeviceChunk(key, at * SLOT_BYTES, layout, parent=parent, position=at * CHUNK_TOKENS)
            for at, (key, parent) in enumerate(zip(keys, parents(keys), strict=True))
        ]
        print(*(put.outcome.name for put in client.put_on_device(ring, chunks, written)))
        memory.fill_(0)
        (group,) = SMALL.layer_groups
        blocks = COUNT * CHUNK_TOKENS // BLOCK_TOKENS
        shape = (len(group.layer_ids), 2, blocks, BLOCK_TOKENS, group.kv_heads, group.head_dim)
        pages = torch.zeros(shape, dtype=torch.bfloat16, device=cuda)
        found = read_pages(client, keys, paged_in(pages, range(blocks)))
        rows = pages.view(torch.int16).flatten(2, 3).transpose(2, 3).cpu().numpy()
        right = np.concatenate(
            [np.array(tensors_of(key, SMALL, CHUNK_TOKENS)[0]) for key in keys], axis=3
        )
        print(found, np.array_equal(rows.view(np.uint16), right.view(np.uint16)))
    device.release(memory)


if __name__ == "__main__":
    main(sys.argv[1])
