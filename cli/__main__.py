"""Run the command line with ``python -m kvstore.cli``."""

from kvstore.cli.main import main

main()
