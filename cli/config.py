"""`kvstore config`: what a server would make of its flags, the environment and the file."""

from __future__ import annotations

import typer

from kvstore.cli.exits import EXIT_USAGE, fail
from kvstore.cli.manual import Manual
from kvstore.proto.errors import InvalidRequestError

_AS_SERVER = {"allow_extra_args": True, "ignore_unknown_options": True}

config_app = typer.Typer(
    cls=Manual,
    no_args_is_help=True,
    rich_markup_mode=None,
    help="What kvstore-server would make of these flags, the environment and the file.",
)


@config_app.command(context_settings=_AS_SERVER)
def show(context: typer.Context) -> None:
    """Print each setting as YAML with where it came from. Takes kvstore-server's flags."""
    from kvstore.server.settings.loading import load, show
    from kvstore.server.settings.settings import Settings

    try:
        config, origins = load(Settings, context.args)
    except InvalidRequestError as error:
        fail(error, EXIT_USAGE)
    print(show(config, origins), end="")


@config_app.command(context_settings=_AS_SERVER)
def validate(context: typer.Context) -> None:
    """Print ok, or exit with 2 and what is wrong. Takes kvstore-server's flags."""
    from kvstore.server.settings.settings import load_config

    try:
        load_config(context.args)
    except InvalidRequestError as error:
        fail(error, EXIT_USAGE)
    print("ok")


@config_app.command()
def schema() -> None:
    """Print the JSON schema of the YAML file, for editors and for what generates such files."""
    import json

    from kvstore.server.settings.loading import SHORT_NAMES, settings_schema
    from kvstore.server.settings.settings import Settings

    schema = settings_schema(Settings)
    known = schema["properties"]
    known |= {short: known[name] for short, name in SHORT_NAMES.items()}
    print(json.dumps(schema, indent=2))
