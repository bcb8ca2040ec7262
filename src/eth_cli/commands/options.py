"""Options of the command line: how each sort of value is declared, with its parser.

Each helper takes the option's name, the word that stands for its value in the help, and the help.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer

from eth_cli.commands import arguments
from eth_cli.commands.arguments import LARGEST


def _option(name: str, *names: str, panel: str | None, **settings: Any) -> Any:
    """An option in a section of the help."""
    return typer.Option(name, *names, rich_help_panel=panel, **settings)


def flag(option: str, help: str, panel: str | None = None) -> Any:
    """An option that is there or not."""
    return _option(option, help=help, panel=panel)


def words(option: str, metavar: str, help: str, panel: str | None = None) -> Any:
    """An option that takes words as they are; several times, where its type is a list."""
    return _option(option, metavar=metavar, help=help, panel=panel)


def count(
    option: str,
    metavar: str,
    help: str,
    panel: str | None = None,
    *,
    least: int = 1,
    most: int = LARGEST,
) -> Any:
    """An option that takes a whole number."""
    parser = arguments.whole_number(option, least=least, most=most)
    return _option(option, parser=parser, metavar=metavar, help=help, panel=panel)


def number(option: str, metavar: str, help: str) -> Any:
    """An option that takes a number above 0."""
    parser = arguments.real_number(option)
    return _option(option, parser=parser, metavar=metavar, help=help, panel=None)


def fraction(option: str, metavar: str, help: str, panel: str | None = None) -> Any:
    """An option that takes a part of a whole."""
    parser = arguments.fraction(option)
    return _option(option, parser=parser, metavar=metavar, help=help, panel=panel)


def duration(option: str, metavar: str, help: str, panel: str | None = None) -> Any:
    """An option that takes a time with its unit."""
    parser = arguments.duration(option)
    return _option(option, parser=parser, metavar=metavar, help=help, panel=panel)


def size(option: str, metavar: str, help: str, panel: str | None = None) -> Any:
    """An option that takes a number of bytes with its unit."""
    parser = arguments.size(option)
    return _option(option, parser=parser, metavar=metavar, help=help, panel=panel)


def choice(option: str, choices: Sequence[str], help: str, panel: str | None = None) -> Any:
    """An option that takes one of a few words."""
    parser = arguments.choice(option, choices)
    return _option(option, parser=parser, metavar="|".join(choices), help=help, panel=panel)


def path(option: str, metavar: str, help: str, *names: str, panel: str | None = None) -> Any:
    """An option that takes a path."""
    parser = arguments.path(option)
    return _option(option, *names, parser=parser, metavar=metavar, help=help, panel=panel)


def path_argument(metavar: str, help: str) -> Any:
    """A path that is told by its place."""
    return typer.Argument(parser=arguments.path(metavar), metavar=metavar, help=help)
