"""The kvstore command, as ``kvstore`` or ``python -m kvstore.cli``.

Importing the commands' modules registers them.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.cli import app, auth, bench, calibrate, chunks, doctor, explain, server
from kvstore.cli.demo import demo
from kvstore.proto.errors import InvalidRequestError, KVStoreError, ModelError, UnknownCodecError

MODULES = (auth, bench, calibrate, chunks, demo, doctor, explain, server)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command in *argv*, by default this process's arguments. Raises SystemExit."""
    try:
        app.root(args=None if argv is None else list(argv), prog_name="kvstore")
    except (InvalidRequestError, ModelError, UnknownCodecError, OSError) as error:
        app.fail(error, app.EXIT_USAGE)
    except KVStoreError as error:
        app.fail(error, app.EXIT_STORE)


if __name__ == "__main__":
    main()
