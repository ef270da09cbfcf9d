"""The kvstore command, as ``kvstore`` or ``python -m kvstore.cli``.

The commands' own modules register them when they are imported here.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvstore.cli import app, auth, bench, calibrate, chunks, doctor, explain, server, trace
from kvstore.cli.demo import demo
from kvstore.proto.errors import InvalidRequestError, KVStoreError, ModelError, UnknownCodecError

MODULES = (auth, bench, calibrate, chunks, demo, doctor, explain, server, trace)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command in *argv*, or of this process. Ends in SystemExit."""
    try:
        app.root(args=None if argv is None else list(argv), prog_name="kvstore")
    except (InvalidRequestError, ModelError, UnknownCodecError, OSError) as error:
        app.fail(error, app.EXIT_USAGE)
    except KVStoreError as error:
        app.fail(error, app.EXIT_STORE)


if __name__ == "__main__":
    main()
