"""`kvstore config`: what a server makes of its flags, the environment and the file."""

from __future__ import annotations

import typer

from kvstore.cli.app import command, group

group("config", "Administer", "Check and print the settings of kvstore-server.")


@command("config show", exits="0 2", example="kvstore config show --cpu 8GiB", as_server=True)
def config_show(context: typer.Context) -> None:
    """Print each setting as YAML with where it came from. Takes kvstore-server's flags."""
    from kvstore.server.settings.loading import load, show
    from kvstore.server.settings.settings import Settings

    print(show(*load(Settings, context.args)), end="")


@command(
    "config validate",
    exits="0 2",
    example="kvstore config validate --config kvstore.yaml",
    as_server=True,
)
def config_validate(context: typer.Context) -> None:
    """Print ok, or exit with 2 and what is wrong. Takes kvstore-server's flags."""
    from kvstore.server.settings.settings import load_config

    load_config(context.args)
    print("ok")


@command("config schema", exits="0 2", example="kvstore config schema")
def config_schema() -> None:
    """Print the JSON schema of the YAML file, for editors and for what generates such files."""
    import json

    from kvstore.server.settings.loading import SHORT_NAMES, settings_schema
    from kvstore.server.settings.settings import Settings

    schema = settings_schema(Settings)
    known = schema["properties"]
    known |= {short: known[name] for short, name in SHORT_NAMES.items()}
    print(json.dumps(schema, indent=2))
