"""Sphinx: the pages of this folder as a site (`make docs`); warnings are errors there."""

project = "megatron-hetero"
author = "the megatron-hetero authors"
extensions = ["myst_parser"]
root_doc = "index"
# README.md is the list of pages for those who read on the forge; here the toctree is.
exclude_patterns = ["README.md", "schemas"]
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]
html_theme = "furo"
html_title = "megatron-hetero"
html_static_path = []
html_show_sphinx = False
nitpicky = True
