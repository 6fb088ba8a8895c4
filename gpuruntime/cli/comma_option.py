# SPDX-License-Identifier: Apache-2.0
"""An option that can be repeated and takes several values separated by commas."""

from __future__ import annotations

from typing import Any

import click


class CommaOption(click.Option):
    """A repeatable option whose values are split at commas, as in the incumbent's command line.

    The value of its environment variable is split too.
    """

    def __init__(self, *arguments: Any, **attributes: Any) -> None:  # noqa: ANN401 (click's)
        super().__init__(*arguments, **{**attributes, "multiple": True})

    def value_from_envvar(self, ctx: click.Context) -> tuple[str, ...] | None:
        """Return the text of the variable, None if it is not set."""
        text = self.resolve_envvar_value(ctx)
        return None if text is None else (text,)

    def type_cast_value(self, ctx: click.Context, value: Any) -> tuple[str, ...]:  # noqa: ANN401
        """Return the values of all occurrences, in order."""
        texts = super().type_cast_value(ctx, value) or ()
        return tuple(word.strip() for text in texts for word in text.split(",") if word.strip())
