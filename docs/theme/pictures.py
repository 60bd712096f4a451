"""A picture with a light and a dark source follows the site's palette.

In Markdown it is written as code hosts show it, with ``<picture>``, which knows the system's palette alone. The site
gets both images, marked so that Material hides one.
"""

from __future__ import annotations

import re

PICTURE = re.compile(r'<picture>\s*<source[^>]* srcset="([^"]+)">\s*(<img[^>]* src=")([^"]+)("[^>]*>)\s*</picture>')


def on_page_content(html: str, **_: object) -> str:
    return PICTURE.sub(r"\2\3#only-light\4\2\1#only-dark\4", html)
