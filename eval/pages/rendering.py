"""From values to pages: the templates, their filters, and other people's text made harmless."""

import html
import re
from math import prod
from typing import Any

from quantkit.eval.measuring.number_format import (
    show,
    show_bytes,
    show_difference,
    show_interval,
    show_mean,
)
from quantkit.eval.pages.sentences import gate_remark

#: What pages hold in themselves, by the names that templates use.
_ASSETS = {"style": "style.css", "script": "page.js", "live_script": "live.js"}


def render(template: str, values: dict[str, Any]) -> str:
    """Return a page from ``templates/``; HTML is escaped, unknown names are errors."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("quantkit.eval", "templates"),
        autoescape=jinja2.select_autoescape(["html.j2"], default_for_string=True),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "show": show,
        "interval": show_interval,
        "mean": show_mean,
        "difference": show_difference,
        "mib": show_bytes,
        "seconds": lambda seconds: f"{seconds:.1f} s",
        "remark": gate_remark,
        "product": prod,
        "md": escape_markdown,
        "code": code_span,
        "line": lambda text: " ".join(str(text).split()),
    }
    assets = {name: _asset(environment, file) for name, file in _ASSETS.items()}
    return environment.get_template(template).render(assets | values)


#: What Markdown, its tables and GitHub's links of bare addresses read as more than a letter.
_MARKS = re.compile(r"[\\`*_{}\[\]|~$@]|:(?=//)|(?<=\bwww)\.")


def escape_markdown(text: object) -> str:
    """Return somebody else's text for one line of Markdown, which shows it as it is."""
    plain = html.escape(" ".join(str(text).split()), quote=False)
    return _MARKS.sub(r"\\\g<0>", plain)


def code_span(text: object) -> str:
    """Return somebody else's text between as many backquotes as it takes, for one line."""
    plain = " ".join(str(text).split())
    fence = "`" * (1 + max(map(len, re.findall("`+", plain)), default=0))
    space = " " if plain.startswith("`") or plain.endswith("`") else ""
    return f"{fence}{space}{plain}{space}{fence}"


def _asset(environment: Any, name: str) -> Any:
    from markupsafe import Markup

    source, _, _ = environment.loader.get_source(environment, name)
    return Markup(source)  # noqa: S704  the package's own file, not input
