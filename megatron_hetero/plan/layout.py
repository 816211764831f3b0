"""The one-line form of the asymmetric part of a plan: `tp4:20,tp2:12 @12 | tp1:16,tp1:16 @4`.

    layout  := replica ('|' replica)*
    replica := stage (',' stage)* '@' COUNT ['x' SIZE]
    stage   := 'tp' WIDTH [shares] ['cp' SIZE [shares]] [experts] ':' LAYERS ['z' COUNT]
    experts := 'ep' WIDTH [shares] | 'ep' SIZE ['etp' WIDTH]
    shares  := '(' share (':' share)* ')'

COUNT is the replica's micro-batches per step, SIZE their size in sequences if it is not the job's.
The shares behind `cp` divide every sequence among the tensor-parallel groups of the stage.
`ep` with the WIDTH of the tensor-parallel group deals whole experts out to its devices, equally or
by shares.  `ep` with another SIZE, or with `etp` behind it, deals experts out over the ranks of the
stage, or of equal stages in as many replicas as SIZE x WIDTH ranks take: the two numbers are stock
Megatron's `--expert-model-parallel-size` and `--expert-tensor-parallel-size` (1 if left out).
`z` counts the layers whose weights are divided among the replicas (sharded), the stage's first.
White space is free between tokens.  `parse_layout` and `format_layout` are inverse to each other.
"""

from __future__ import annotations

from typing import NoReturn

from megatron_hetero.errors import PlanFormatError
from megatron_hetero.model.spec import MAX_LAYERS
from megatron_hetero.plan.plan import Layout, ReplicaShape, StageShape

MAX_LAYOUT_CHARACTERS = 64 * 1024
MAX_TENSOR_PARALLEL = 1024
MAX_CONTEXT_PARALLEL = 1024
MAX_EXPERT_PARALLEL = 65_536
MAX_MICRO_BATCHES = 1_000_000
MAX_MICRO_BATCH_SIZE = 1_000_000
MAX_SHARE = 1024
MAX_DEVICES = 65_536
"""A line of text must not be able to ask for more ranks than any cluster has."""

_CARET_CONTEXT = 36
"""Characters of the line shown on each side of an error."""


def parse_layout(text: str) -> Layout:
    """Read a layout line.

    Raises:
        PlanFormatError: the line breaks the grammar or a bound; the message has the column, the
            line and a caret below the place.

    >>> str(parse_layout("tp4:20, tp2(5:3):12@12 |tp1:32 @4"))
    'tp4:20,tp2(5:3):12 @12 | tp1:32 @4'
    """
    if len(text) > MAX_LAYOUT_CHARACTERS:
        raise PlanFormatError(
            f"layout: {len(text)} characters long; at most {MAX_LAYOUT_CHARACTERS} are read. "
            "Put a plan of this size into plan.json and use --hetero-plan."
        )
    return _Parser(text).layout()


def format_layout(layout: Layout) -> str:
    """Write the layout as a line, which `parse_layout` reads."""
    return str(layout)


class _Parser:
    """Recursive descent: a method for each rule of the grammar, at character `position`."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.position = 0

    def layout(self) -> Layout:
        replicas = [self.replica()]
        # The end of the text has to follow the last replica.
        while self.accept("|"):
            replicas.append(self.replica())
        if self.peek():
            self.fail("expected '|' and another replica, or the end of the layout")
        # Bounds of single numbers still allow a product that no cluster has.
        layout = Layout(tuple(replicas))
        if layout.num_devices > MAX_DEVICES:
            self.fail(
                f"the layout uses {layout.num_devices} devices; at most {MAX_DEVICES} are allowed"
            )
        return layout

    def replica(self) -> ReplicaShape:
        stages = [self.stage()]
        while self.accept(","):
            stages.append(self.stage())
        if not self.accept("@"):
            self.fail(
                "expected ',' and another stage, or '@' and the replica's number of micro-batches "
                "(for example 'tp2:4 @8')"
            )
        count = self.number("a number of micro-batches after '@'", MAX_MICRO_BATCHES)
        size = None
        # Without `x` the size is the job's.
        if self.accept("x"):
            size = self.number("a micro-batch size after 'x'", MAX_MICRO_BATCH_SIZE)
        return ReplicaShape(tuple(stages), count, size)

    def stage(self) -> StageShape:
        if not self.accept("tp"):
            self.fail("expected a stage, for example 'tp4:20' (tensor-parallel width : layers)")
        width = self.number("a tensor-parallel width after 'tp'", MAX_TENSOR_PARALLEL)
        # Suffixes are read in the order of the grammar; each is absent in older lines.
        shares = self.shares(width) if self.accept("(") else None
        context, context_shares = 1, None
        if self.accept("cp"):
            context = self.number("a context-parallel size after 'cp'", MAX_CONTEXT_PARALLEL)
            if self.accept("("):
                context_shares = self.shares(context, "context-parallel size")
        experts, groups = self.experts(width) if self.accept("ep") else (None, None)
        if not self.accept(":"):
            self.fail("expected ':' and the stage's number of layers")
        num_layers = self.number("a number of layers after ':'", MAX_LAYERS)
        sharded = 0
        if self.accept("z"):
            sharded = self.number("a number of sharded layers after 'z'", num_layers)
        return StageShape(
            width, num_layers, shares, context, experts, sharded, context_shares, groups
        )

    def experts(self, width: int) -> tuple[tuple[int, ...] | None, tuple[int, int] | None]:
        """Read how experts are dealt out: inside a tensor-parallel group, or over ranks of the
        stage in one or several replicas."""
        start = self.position
        size = self.number("an expert-parallel size after 'ep'", MAX_EXPERT_PARALLEL)
        # `etp` follows the size only for groups over replicas.
        if self.accept("etp"):
            return None, (size, self.number("a width after 'etp'", MAX_TENSOR_PARALLEL))
        # A size equal to the width deals experts out inside the tensor-parallel group.
        if not self.accept("("):
            return ((1,) * width, None) if size == width else (None, (size, 1))
        if size != width:
            self.fail(
                f"shares for an expert-parallel size of {size}; by shares experts are dealt out "
                f"inside the tensor-parallel group, so it is {width}, or the shares are left out",
                start,
            )
        return self.shares(width), None

    def shares(self, width: int, of: str = "tensor-parallel width") -> tuple[int, ...]:
        # A wrong number of shares is shown at the bracket, which has been read.
        start = self.position - 1
        shares = [self.number("a share", MAX_SHARE)]
        while self.accept(":"):
            shares.append(self.number("a share", MAX_SHARE))
        if not self.accept(")"):
            self.fail("expected ':' and another share, or ')'")
        if len(shares) != width:
            self.fail(
                f"a stage of {of} {width} takes {width} shares, not {len(shares)}",
                start,
            )
        return tuple(shares)

    def number(self, what: str, maximum: int) -> int:
        self.skip_space()
        start = self.position
        while self.position < len(self.text) and self.text[self.position] in "0123456789":
            self.position += 1
        digits = self.text[start : self.position]
        if not digits:
            self.fail(f"expected {what}")
        # Length first: int() of an endless row of digits is slow and, past 4300, a ValueError.
        if len(digits.lstrip("0")) > len(str(maximum)) or not 1 <= int(digits) <= maximum:
            shown = digits if len(digits) <= 20 else f"{digits[:17]}..."
            self.fail(f"expected {what} from 1 to {maximum}, not {shown}", start)
        return int(digits)

    def accept(self, token: str) -> bool:
        self.skip_space()
        if not self.text.startswith(token, self.position):
            return False
        self.position += len(token)
        return True

    def peek(self) -> str:
        self.skip_space()
        return self.text[self.position : self.position + 1]

    def skip_space(self) -> None:
        while self.position < len(self.text) and self.text[self.position].isspace():
            self.position += 1

    def fail(self, message: str, position: int | None = None) -> NoReturn:
        """Raise with the column (from 1), the line around it, and a caret under the place."""
        # Without a place the fault is at the next character, which the message shows.
        if position is None:
            found = self.peek()
            position = self.position
            message += f"; found {found!r}" if found else "; the layout ends here"
        # A part of the line on both sides, as a layout may have thousands of characters.
        start = max(0, position - _CARET_CONTEXT)
        stop = position + _CARET_CONTEXT
        # Control characters would move the caret, or the user's terminal.
        line = "".join(c if c.isprintable() else " " for c in self.text[start:stop])
        head, tail = "..." if start else "", "..." if stop < len(self.text) else ""
        caret = " " * (len(head) + position - start) + "^"
        raise PlanFormatError(
            f"layout, column {position + 1}: {message}\n  {head}{line}{tail}\n  {caret}"
        )
