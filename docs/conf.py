"""Settings of Sphinx for the site that docs/make_site.py makes. The pages are copies with links of the site."""

project = "thinpipe"
author = "The thinpipe authors"
copyright = "The thinpipe authors, Apache-2.0"
extensions = ["myst_parser", "sphinx_copybutton"]
root_doc = "index"
html_theme = "furo"
html_title = "thinpipe"
html_theme_options = {"top_of_page_buttons": []}  # they would lead to copies
html_copy_source = False
html_show_sourcelink = False
highlight_language = "none"
myst_heading_anchors = 5
"""Headings down to this level have the anchors that they have on GitHub."""
copybutton_exclude = ".linenos, .gp, .go"
