"""The site's settings: ``make site`` builds it of pages that stand in this repository, into ``outputs/site/html/``.

The source folder is the repository itself, so a page is the one that GitHub shows, and a link leads where it leads
there. Read next: ``docs/guards.py``, what of a page may reach a browser.
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import fedlib  # noqa: E402

project, author, release = "fedlib", "The fedlib maintainers", fedlib.__version__
copyright = f"{author}, Apache-2.0"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.autosummary", "sphinx.ext.viewcode"]
extensions += ["guards", "methods", "play"]  # beside this file
root_doc = "docs/index"
include_patterns = [
    "docs/**",
    "*.md",
    "*/README.md",
    "notebooks/cluster/README.md",
    "outputs/**/*.md",
    "outputs/**/*.ipynb",
]
NO_PAGES = ("runs", "executed", "scratch", "site", "pretraining/[!n]*", "retrained")  # its notebooks are pages
exclude_patterns = [".*", "**/.*", "docs/_*", "outputs/*/findings_*", "outputs/*/tables"]
exclude_patterns += [f"outputs/{name}" for name in NO_PAGES]
templates_path, html_static_path, html_css_files = ["_templates"], ["_static"], ["site.css"]

autosummary_generate = True
autodoc_default_options = {"members": True, "show-inheritance": True, "member-order": "bysource"}
autodoc_typehints_format = "short"
autodoc_inherit_docstrings = False

nb_execution_mode = "off"
nb_ipywidgets_js = {}  # nothing is fetched
myst_enable_extensions = ["html_image"]
myst_heading_anchors = 4

html_theme, html_title, html_copy_source = "pydata_sphinx_theme", "fedlib", False
html_additional_pages = {"index": "redirect.html"}
html_theme_options = {
    "navbar_end": ["theme-switcher"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "secondary_sidebar_items": ["page-toc"],
    "show_toc_level": 2,
}
