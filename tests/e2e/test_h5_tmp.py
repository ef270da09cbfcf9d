import pytest
from prompts import *
@pytest.mark.parametrize("transport", ["shm","grpc"]*10)
def test_round(server, transport):
    client = server.connect(transport)
    keys = keys_of(client, 3, 4)
    with server.unchanged():
        pass
    client.put(chunks_of(client, keys))
    got = client.get(keys)
    assert all(is_right(client, k, g) for k, g in zip(keys, got, strict=True))
def test_proc(server_process):
    s = server_process("--cpu","16MiB","--tiers","cpu"); s.start(); assert s.recovered_chunks==0
    s.kill(); s.start(); assert s.terminate()==0, s.errors
    assert "clean" in s.output
