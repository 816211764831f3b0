"""The lines of Transformer Engine that ask for CUDA, and the replacements of the lines.

The import hook compiles a module from its own source with these few words exchanged; the files
stay as they are. A text that is not found once is another version of the package, and refuses.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_hetero.errors import MegatronVersionError

VERSION = "2.20.2"
"""The version of the package whose lines were read."""


@dataclass(frozen=True)
class Bridge:
    """One exchange of words in a module. `count` is how often they stand there."""

    module: str
    old: str
    new: str
    reason: str
    count: int = 1


_ATTENTION = "transformer_engine.pytorch.attention.dot_product_attention"
_ON_THE_CPU = "tensors are on the CPU"

BRIDGES = (
    Bridge(
        "transformer_engine.common",
        'if "NVTE_PROJECT_BUILDING" not in os.environ or bool(',
        "if False and bool(",
        "CUDA's libraries and the compiled part are not looked for",
    ),
    Bridge(
        "transformer_engine.common",
        '    assert framework in ("jax", "torch"), f"Unsupported framework {framework}"\n',
        "    return\n",
        "our module is imported in the place of the compiled one",
    ),
    Bridge(
        "transformer_engine.pytorch.quantization",
        "    if get_device_compute_capability() >= (9, 0):  # hopper and above\n"
        "        return True, \"\"\n",
        "    return True, \"\"\n",
        "fp8 with one scale for a tensor is there, in torch's own types",
    ),
    Bridge(
        "transformer_engine.pytorch.module.base", "if not inp.is_cuda:", "if False:", _ON_THE_CPU
    ),
    Bridge(
        f"{_ATTENTION}.dot_product_attention",
        "query_layer.is_cuda and key_layer.is_cuda and value_layer.is_cuda",
        "query_layer.is_cpu",
        _ON_THE_CPU,
    ),
    Bridge(
        f"{_ATTENTION}.backends",
        "query_layer.is_cuda and key_layer.is_cuda and value_layer.is_cuda",
        "query_layer.is_cpu",
        _ON_THE_CPU,
        count=2,
    ),
    Bridge(
        f"{_ATTENTION}.backends",
        "x.dtype in [torch.float16, torch.bfloat16] or isinstance(x, QuantizedTensorStorage)",
        "True",
        "fused attention in fp32, so that a comparison is sharp",
    ),
    Bridge(
        f"{_ATTENTION}.utils",
        "    if qkv_dtype not in [torch.bfloat16, torch.float16, torch.float8_e4m3fn] "
        "or qkv_type not in (\n",
        "    if qkv_type not in (\n",
        "fused attention in fp32, so that a comparison is sharp",
    ),
    Bridge(
        f"{_ATTENTION}.context_parallel",
        "    return send_recv_reqs\n",
        "    return [_WaitedOnce(work) for work in send_recv_reqs]\n\n\n"
        "class _WaitedOnce:\n"
        "    def __init__(self, work):\n"
        "        self.work = work\n\n"
        "    def wait(self):\n"
        "        if self.work is not None:\n"
        "            self.work.wait()\n"
        "        self.work = None\n",
        "gloo never ends a second wait for one message, which the ring's backward pass makes",
    ),
    Bridge(
        "transformer_engine.pytorch.cross_entropy",
        "if not inp.is_cuda:",
        "if True:",
        "its kernel is Triton's, for GPUs",
    ),
)


def bridged_modules() -> frozenset[str]:
    """Return the names of the modules in which words are exchanged."""
    return frozenset(bridge.module for bridge in BRIDGES)


def bridged(module: str, source: str) -> str:
    """Return the source of a module with its words exchanged.

    Raises:
        MegatronVersionError: the words are not there as often as they were.
    """
    for bridge in BRIDGES:
        if bridge.module != module:
            continue
        if source.count(bridge.old) != bridge.count:
            raise MegatronVersionError(
                f"{module} is not that of transformer-engine {VERSION}: it has "
                f"{source.count(bridge.old)} times {bridge.old.strip()!r}, not {bridge.count}. "
                f"Install transformer-engine=={VERSION}, or use --transformer-impl local."
            )
        source = source.replace(bridge.old, bridge.new)
    return source
