"""One self-contained HTML page about a plan: figures as inline SVG, no network, light and dark."""
