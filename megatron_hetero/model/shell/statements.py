"""Statements of a script, followed in the order in which bash would run each; nothing is run.

A condition that the text does not decide is followed both ways, and what differs is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from megatron_hetero.model.shell.code import Runner
from megatron_hetero.model.shell.commands import run_command, run_declaration, run_unset
from megatron_hetero.model.shell.conditions import both, either, negated, tested
from megatron_hetero.model.shell.expansion import (
    EXPANDERS,
    WordPiece,
    fields,
    pattern,
    pieces,
    value,
)
from megatron_hetero.model.shell.names import assigned_names
from megatron_hetero.model.shell.parameters import calculated
from megatron_hetero.model.shell.patterns import matches
from megatron_hetero.model.shell.state import Shell
from megatron_hetero.model.shell.substitution import substituted
from megatron_hetero.model.shell.tree import bare_source, first_fault, source
from megatron_hetero.model.shell.values import Word, concatenate

if TYPE_CHECKING:
    from tree_sitter import Node

Status = bool | None
"""True if a command succeeds, False if it fails, None if only a running shell knows."""
_SEPARATORS = frozenset({";", "\n", "&", ";;", "comment", "heredoc_body", "file_redirect"})
_OUTPUT = (">", ">>", "&>", "&>>", ">|", ">&")


def run(shell: Shell, node: Node) -> Status:
    """Follow one statement."""
    if shell.flow:
        return None
    shell.step(node)
    shell.deeper(1)
    try:
        return _run(shell, node)
    finally:
        shell.deeper(-1)


def _run(shell: Shell, node: Node) -> Status:
    if node.is_error or node.is_missing or (node.has_error and node.type not in _WITH_BODIES):
        return _not_understood(shell, node)
    statement = _STATEMENTS.get(node.type)
    if statement is not None:
        return statement(shell, node)
    if not node.is_named:
        return None
    return _not_understood(shell, node)


def _not_understood(shell: Shell, node: Node) -> Status:
    """Note a statement that the grammar does not understand, and forget the variables set
    inside."""
    fault = first_fault(node)
    line = shell.line_at(fault)
    text = " ".join(source(node).split())
    shown = text if len(text) < 40 else f"{text[:37]}..."
    outer, shell.where = shell.where, line
    shell.note("", f"`{shown}` is not understood")
    shell.forget(assigned_names(node, shell.functions), "is set in what is not understood")
    shell.where = outer
    return None


def run_all(shell: Shell, nodes: Sequence[Node]) -> Status:
    """Follow statements one after another."""
    status: Status = True
    for i, node in enumerate(nodes):
        if shell.flow:
            break
        if node.type in _SEPARATORS or (not node.is_named and node.type not in ("ERROR",)):
            continue
        following = nodes[i + 1].type if i + 1 < len(nodes) else ""
        if following == "&":
            apart = shell.fork()
            run(apart, node)
            status = True
            continue
        status = run(shell, node)
        if status is False and shell.stops_at_errors and _goes_on(shell) and node.type in _STOPPING:
            _end(shell, "a command fails after `set -e`")
    return status


def _goes_on(shell: Shell) -> bool:
    return not shell.flow


def _end(shell: Shell, why: str) -> None:
    shell.flow = "exit"
    if not shell.context and not shell.is_captured:
        shell.records.ended = f"{shell.where}: {why}"


def _program(shell: Shell, node: Node) -> Status:
    return run_all(shell, node.children)


def _either_way(shell: Shell, ways: Sequence[Callable[[Shell], object]], what: str) -> None:
    """Follow each of some ways on a copy, and merge them.

    Args:
        what: of the statement, "the `if` of line 3".
    """
    context = f"inside {what}" if not what.startswith("after") else what
    branches = []
    for way in ways:
        branch = shell.fork(context)
        way(branch)
        branches.append(branch)
    shell.merge(branches, f"is set {context}")


def _line(shell: Shell, node: Node) -> str:
    return shell.line_at(node).rpartition(":")[2]


def _if(shell: Shell, node: Node) -> Status:
    """Follow `if`: conditions up to the first that holds, or both ways."""
    branches: list[tuple[list[Node], list[Node]]] = []
    otherwise: list[Node] = []
    head: list[Node] = []
    body: list[Node] | None = None
    for child in node.children[1:-1]:
        if child.type == "then":
            body = []
        elif child.type == "elif_clause":
            at = next(i for i, c in enumerate(child.children) if c.type == "then")
            branches.append((child.children[1:at], child.children[at + 1 :]))
        elif child.type == "else_clause":
            otherwise = child.children[1:]
        elif body is None:
            head.append(child)
        else:
            body.append(child)
    return _branch(shell, [(head, body or []), *branches], otherwise, _line(shell, node))


def _branch(
    shell: Shell,
    branches: list[tuple[list[Node], list[Node]]],
    otherwise: list[Node],
    line: str,
) -> Status:
    if not branches:
        return run_all(shell, otherwise)
    (head, body), rest = branches[0], branches[1:]
    holds = _condition(shell, lambda: run_all(shell, head))
    if holds is True:
        return run_all(shell, body)
    if holds is False:
        return _branch(shell, rest, otherwise, line)
    _either_way(
        shell,
        [lambda s: run_all(s, body), lambda s: _branch(s, rest, otherwise, line)],
        f"the `if` of line {line}",
    )
    return None


def _condition(shell: Shell, read: Callable[[], Status]) -> Status:
    """Follow commands whose failure does not end the script."""
    outer, shell.stops_at_errors = shell.stops_at_errors, False
    try:
        return read()
    finally:
        shell.stops_at_errors = outer


def _list(shell: Shell, node: Node) -> Status:
    """Follow `a && b` and `a || b`."""
    parts = [child for child in node.children if child.type not in _SEPARATORS]
    left, operator, right = parts[0], parts[1].type, parts[2]
    status = _condition(shell, lambda: run(shell, left))
    if shell.flow:
        return status
    if status is (operator == "&&"):
        return run(shell, right)
    if status is not None:
        return status
    found: list[Status] = []
    line = _line(shell, right)
    _either_way(
        shell,
        [lambda s: found.append(run(s, right)), lambda s: None],
        f"after && or || on line {line}",
    )
    return (both if operator == "&&" else either)(None, found[0])


def _negated(shell: Shell, node: Node) -> Status:
    return negated(_condition(shell, lambda: run(shell, node.children[-1])))


def _case(shell: Shell, node: Node) -> Status:
    """Follow `case`: the first pattern that fits, or all that may."""
    subject = value(shell, node.children[1])
    items = [child for child in node.children if child.type == "case_item"]
    ways: list[Callable[[Shell], object]] = []
    is_decided = False
    for i, item in enumerate(items):
        fits = _fits(shell, item, subject)
        if fits is False:
            continue
        ways.append(_body_of_case(items[i:]))
        if fits is True:
            is_decided = True
            break
    if not is_decided:
        ways.append(lambda s: None)
    if len(ways) == 1:
        ways[0](shell)
        return True if not is_decided else None
    _either_way(shell, ways, f"the `case` of line {_line(shell, node)}")
    return None


def _body_of_case(items: list[Node]) -> Callable[[Shell], object]:
    def follow(shell: Shell) -> None:
        for item in items:
            at = next(i for i, child in enumerate(item.children) if child.type == ")")
            run_all(shell, item.children[at + 1 :])
            last = item.children[-1].type
            if last == ";;&":
                shell.note("", "`;;&` of a `case` is not understood")
            if last != ";&":
                return

    return follow


def _fits(shell: Shell, item: Node, subject: Word) -> Status:
    at = next(i for i, child in enumerate(item.children) if child.type == ")")
    found: Status = False
    for child in item.children[:at]:
        if child.type in ("|", "("):
            continue
        expression = pattern(shell, pieces(shell, child))
        if expression == "(?s:.*)":
            return True
        if isinstance(expression, Word) or not subject.is_known:
            found = either(found, None)
        else:
            found = either(found, matches(expression, subject.text or ""))
    return found


def _for(shell: Shell, node: Node) -> Status:
    """Follow `for X in ...`, once for each word."""
    if node.children[0].type == "select":
        return _not_understood(shell, node)
    name = source(node.children[1])
    body = node.children[-1]
    has_words = any(child.type == "in" for child in node.children)
    words: list[Word] = list(shell.arguments)
    if has_words:
        at = next(i for i, child in enumerate(node.children) if child.type == "in")
        listed = [c for c in node.children[at + 1 : -1] if c.type not in (";", "\n")]
        words = [word for child in listed for word in fields(shell, child)]
    before = shell.fork()
    if not any(word.may_split for word in words):
        for word in words:
            shell.assign(name, [word])
            run(shell, body)
            if shell.may_leave_loop or _leaves_loop(shell):
                break
        if not shell.may_leave_loop:
            return None
    shell.take(before)
    return _uncertain_loop(shell, node, lambda s: run(s, body), [name])


def _leaves_loop(shell: Shell) -> bool:
    """Return whether the loop ends here, after `break`, `return` or `exit`."""
    if shell.flow == "continue":
        shell.flow = ""
    if shell.flow == "break":
        shell.flow = ""
        return True
    return bool(shell.flow)


def _c_for(shell: Shell, node: Node) -> Status:
    """Follow `for ((i = 0; i < n; i++))`."""
    head = source(node).partition("((")[2].partition("))")[0].split(";")
    body = node.children[-1]
    before = shell.fork()
    if len(head) == 3:
        calculated(shell, head[0])
        while True:
            shell.step(node)
            holds = calculated(shell, head[1]) if head[1].strip() else Word("1", shell.where)
            if not holds.is_known:
                break
            if holds.text == "0":
                return None
            run(shell, body)
            if shell.may_leave_loop:
                break
            if _leaves_loop(shell):
                return None
            if not calculated(shell, head[2]).is_known:
                break
    shell.take(before)
    return _uncertain_loop(shell, node, lambda s: run(s, body), [])


def _while(shell: Shell, node: Node) -> Status:
    """Follow `while` and `until` as long as their condition is known."""
    body = node.children[-1]
    at = len(node.children) - 1
    head = node.children[1:at]
    wanted = node.children[0].type == "while"
    before = shell.fork()
    while True:
        shell.step(node)
        holds = _condition(shell, lambda: run_all(shell, head))
        if shell.flow:
            return None
        if holds is None:
            break
        if holds is not wanted:
            return None
        run(shell, body)
        if shell.may_leave_loop:
            break
        if _leaves_loop(shell):
            return None
    shell.take(before)
    return _uncertain_loop(shell, node, lambda s: (run_all(s, head), run(s, body)), [])


def _uncertain_loop(
    shell: Shell, node: Node, body: Callable[[Shell], object], names: Sequence[str]
) -> Status:
    """Follow a loop with an unknown number of runs: none, or more than one."""
    kind = {"c_style_for_statement": "for", "for_statement": "for"}.get(node.type, "while")
    what = f"the `{kind}` of line {_line(shell, node)}"
    reason = f"is set inside {what}, which is not run"
    set_inside = [*names, *assigned_names(node, shell.functions)]

    def once(branch: Shell) -> None:
        branch.forget([n for n in set_inside if not _only_grows(node, n)], reason)
        body(branch)
        if branch.flow in ("break", "continue"):
            branch.flow = ""

    def never(branch: Shell) -> None:
        del branch

    shell.may_leave_loop = False
    _either_way(shell, [never, once], what)
    shell.may_leave_loop = False
    if any(word in source(node) for word in ("shift", "set --")) and shell.arguments:
        shell.forget_arguments(f"is set inside {what}")
    return None


def _only_grows(node: Node, name: str) -> bool:
    """Return whether a body only appends to a variable: what was in it stays."""
    return f"{name}+=" in source(node) and source(node).count(f"{name}=") == 0


def _group(shell: Shell, node: Node) -> Status:
    if node.children[0].type == "((":
        number = calculated(shell, source(node)[2:-2])
        return None if not number.is_known else number.text != "0"
    return run_all(shell, node.children[1:-1])


def _subshell(shell: Shell, node: Node) -> Status:
    apart = shell.fork()
    status = run_all(apart, node.children[1:-1])
    shell.output = apart.output
    return status if apart.flow != "exit" else None


def _pipeline(shell: Shell, node: Node) -> Status:
    """Follow the parts of a pipeline, each in a shell of its own."""
    parts = [child for child in node.children if child.is_named and child.type != "comment"]
    given: Word | None = None
    for i, part in enumerate(parts):
        apart = shell.fork()
        apart.given = given if i else shell.given
        is_last = i + 1 == len(parts)
        if not is_last:
            apart.is_captured, apart.output = True, []
        status = run(apart, part)
        printed = apart.output
        given = None if printed is None else _joined_output(printed)
        if is_last and shell.is_captured:
            shell.output = apart.output
    del status
    return None


def _joined_output(printed: list[Word]) -> Word:
    return concatenate(printed or [Word("", "")])


def _redirected(shell: Shell, node: Node) -> Status:
    """Follow a statement whose output or input is another file; words may follow the file."""
    body = node.children[0]
    redirections = node.children[1:]
    if body.type.endswith("_redirect"):
        return None
    if not shell.is_captured:
        return _redirected_command(shell, body, redirections)
    hides = any(_hides_output(part) for part in redirections)
    outer = shell.output
    status = _redirected_command(shell, body, redirections)
    if hides:
        shell.output = outer
    return status


def _hides_output(part: Node) -> bool:
    kinds = [child.type for child in part.children]
    descriptor = next((source(c) for c in part.children if c.type == "file_descriptor"), "1")
    return any(kind in _OUTPUT for kind in kinds) and descriptor == "1"


def _redirected_command(shell: Shell, body: Node, redirections: Sequence[Node]) -> Status:
    if body.type == "command":
        shell.step(body)
        return run_command(shell, body, redirections)
    rests = [part for part in redirections if part.type == "heredoc_redirect"]
    for rest in rests:
        for child in rest.children:
            if child.type in ("pipeline", "list", "command"):
                shell.note("", f"`{source(child)}` is not understood")
    return run(shell, body)


def _function(shell: Shell, node: Node) -> Status:
    name = next(source(child) for child in node.children if child.type == "word")
    shell.functions[name] = (node.children[-1], shell.path)
    return True


def _test(shell: Shell, node: Node) -> Status:
    return tested(shell, node)


def _assignment(shell: Shell, node: Node) -> Status:
    return run_command(shell, node, ())


def _assignments(shell: Shell, node: Node) -> Status:
    for child in node.children:
        run_command(shell, child, ())
    return True


def _substitution(shell: Shell, node: Node, is_quoted: bool) -> Iterator[WordPiece]:
    yield WordPiece(substituted(shell, node, run_all), is_quoted)


def _process(shell: Shell, node: Node, is_quoted: bool) -> Iterator[WordPiece]:
    yield WordPiece(Word("/dev/fd/63", shell.where, f"{bare_source(node)} is not run"), True)


Runner.run = staticmethod(run)
EXPANDERS["command_substitution"] = _substitution
EXPANDERS["process_substitution"] = _process
_STATEMENTS: dict[str, Callable[[Shell, Node], Status]] = {
    "program": _program,
    "if_statement": _if,
    "list": _list,
    "negated_command": _negated,
    "case_statement": _case,
    "for_statement": _for,
    "c_style_for_statement": _c_for,
    "while_statement": _while,
    "do_group": _group,
    "compound_statement": _group,
    "subshell": _subshell,
    "pipeline": _pipeline,
    "redirected_statement": _redirected,
    "function_definition": _function,
    "test_command": _test,
    "variable_assignment": _assignment,
    "variable_assignments": _assignments,
    "command": lambda shell, node: run_command(shell, node, ()),
    "declaration_command": run_declaration,
    "unset_command": run_unset,
}
_WITH_BODIES = frozenset(
    [
        "program",
        "if_statement",
        "elif_clause",
        "else_clause",
        "case_statement",
        "for_statement",
        "list",
        "do_group",
        "c_style_for_statement",
        "while_statement",
        "compound_statement",
        "subshell",
        "function_definition",
    ]
)
_STOPPING = frozenset({"command", "test_command", "pipeline", "compound_statement", "subshell"})
