"""A figure as a PNG file, drawn by a browser of this machine.

The figures are SVG with style sheets, which only browsers draw as they are meant.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from pathlib import Path

from megatron_hetero.errors import EnvironmentMismatchError
from megatron_hetero.report.page.figure import Figure

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
# Pixels for a user unit, and seconds for the browser to draw.
_SCALE = 2
_LIMIT_S = 60


def draw_png(figure: Figure, path: Path) -> None:
    """Write a figure at twice its size, in light colours.

    Raises:
        EnvironmentMismatchError: no browser here, or it did not draw.
    """
    # The first browser of the list that this machine has.
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        raise EnvironmentMismatchError(
            f"PNG files are drawn by a browser, and none of {', '.join(BROWSERS)} is installed. "
            "Install one, or use --svg, whose files every browser and most editors open."
        )
    # The browser draws the SVG file in a folder with a fresh profile.
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "figure.svg"
        source.write_text(figure.standalone(), encoding="utf-8")
        drawn = Path(folder) / "figure.png"
        try:
            done = subprocess.run(
                [
                    browser,
                    "--headless=new",
                    "--no-sandbox",
                    "--disable-gpu",
                    "--hide-scrollbars",
                    f"--user-data-dir={folder}/profile",
                    f"--force-device-scale-factor={_SCALE}",
                    f"--window-size={round(figure.width)},{max(round(figure.height), 1)}",
                    f"--screenshot={drawn}",
                    source.as_uri(),
                ],
                capture_output=True,
                text=True,
                timeout=_LIMIT_S,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise EnvironmentMismatchError(
                f"{browser} did not draw {figure.name} within {_LIMIT_S} s; use --svg"
            ) from error
        # The file tells whether the browser has drawn, whatever its exit code.
        if not drawn.exists():
            raise EnvironmentMismatchError(
                f"{browser} did not draw {figure.name} (exit code {done.returncode}): "
                f"{done.stderr.strip()[-300:]}; use --svg"
            )
        shutil.move(drawn, path)
