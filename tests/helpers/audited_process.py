"""A process that uses a server and reports events that load or run code.

``python audited_process.py FOLDER`` prints one line for each such event of Python's audit hooks in
a second run; the first run loads all modules.
"""

from __future__ import annotations

import sys
from pathlib import Path

from helpers.local_server import LocalServer
from helpers.prompts import assert_reads, chunks_of, keys_of

RUNS_CODE = {
    "pickle.find_class",
    "marshal.loads",
    "marshal.load",
    "code.__new__",
    "compile",
    "exec",
    "ctypes.dlopen",
    "os.system",
    "subprocess.Popen",
    "import",
}
TRANSPORTS = ("shm", "tcp", "grpc")


def use(server: LocalServer, seed: int) -> None:
    """Use the server through each transport."""
    for number, transport in enumerate(TRANSPORTS):
        client = server.connect(transport)  # type: ignore[arg-type]
        keys = keys_of(client, seed + number, 4)
        client.put_chunks(chunks_of(client, keys), durable=True)
        assert_reads(client, keys)
        client.lease(keys=keys).release()
        client.stat(keys=keys)
        client.status()
        client.delete(keys=keys)
        client.close()


def main(folder: Path) -> None:
    """Run twice, the second time under a hook; then trigger the hook as a control."""
    server = LocalServer(folder, "--bulk", "127.0.0.1:0", "--codec", "disk=lossless")
    use(server, 1)
    seen: list[str] = []
    is_armed = [True]

    def hook(event: str, args: tuple[object, ...]) -> None:
        if is_armed[0] and event in RUNS_CODE:
            seen.append(f"{event} {str(args)[:200]}")

    sys.addaudithook(hook)
    use(server, 100)
    during = list(seen)
    compile("1 + 1", "<control>", "eval")
    is_armed[0] = False
    server.close()
    print(*during, f"control {len(seen) - len(during)}", sep="\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
