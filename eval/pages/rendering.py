"""Pages as HTML: one template, with style and script inside."""

import re
from typing import Any

from quantkit.eval.measuring.pictures import GAIN
from quantkit.eval.pages.page import Page

#: What pages hold in themselves, by the names that the template uses.
_ASSETS = {"style": "style.css", "script": "page.js", "live_script": "live.js"}


def to_html(page: Page) -> str:
    """Return a page as one file; text is escaped, unknown names are errors."""
    import jinja2
    from quantkit.eval.measuring.number_format import show

    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("quantkit.eval", "templates"),
        autoescape=jinja2.select_autoescape(["html.j2"], default_for_string=True),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"show": show, "spans": _with_code}
    assets = {name: _asset(environment, file) for name, file in _ASSETS.items()}
    text = environment.get_template("page.html.j2").render(page=page, gain=GAIN, **assets)
    # Blank lines between macros: a page is known as quantkit's by its first bytes.
    return text.lstrip()


def _with_code(text: str) -> Any:
    """Return escaped text, what stands between backquotes as code."""
    from markupsafe import Markup, escape

    return Markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", str(escape(text))))  # noqa: S704  escaped


def _asset(environment: Any, name: str) -> Any:
    from markupsafe import Markup

    source, _, _ = environment.loader.get_source(environment, name)
    return Markup(source)  # noqa: S704  the package's own file, not input
