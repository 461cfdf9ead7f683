"""Sphinx's configuration of the documentation: `make docs` builds it into build/docs."""

# Sphinx with MyST and Furo, all of which are maintained. MkDocs has had no release since August 2024, and its most used theme,
# Material, is in maintenance only.

import sys
from importlib.metadata import version as installed_version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "outrider"
copyright = "the authors of outrider"
release = version = installed_version("outrider")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton", "from_code"]
exclude_patterns = ["_ext"]
nitpicky = True
# Types in signatures: those of other packages have no page here, and nothing is fetched while the site is built.
nitpick_ignore_regex = [("py:.*", r".*")]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100

html_theme = "furo"
html_title = f"outrider {release}"
html_show_copyright = False
html_show_sphinx = False
html_copy_source = False
copybutton_exclude = ".linenos, .gp, .go"
# Furo's own fonts are those of the system: pages load nothing from other hosts.
