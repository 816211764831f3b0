"""Variables of functions: local ones, which hide those of the script, and `unset`."""

from __future__ import annotations

from megatron_hetero.model.shell.held import Hidden
from megatron_hetero.model.shell.state import Shell


def make_local(shell: Shell, name: str) -> bool:
    """Make a variable local to the function, which keeps the old value aside; return whether the
    variable is new there."""
    if not shell.locals or name in shell.locals[-1]:
        return False
    kind = shell.kinds.pop(name, "")
    if "r" in kind:
        shell.note("", f"{name} is read-only, and is made local here")
    export = shell.exported.pop(name, None)
    hidden = Hidden(shell.variables.get(name), name in shell.unset, export, kind)
    shell.locals[-1][name] = hidden
    # A local variable without a value has the export of the outer one, and is else like a new one.
    if export is not None:
        shell.exported[name] = export
    return True


def restore(shell: Shell, name: str, hidden: Hidden) -> None:
    """Give a name the variable again that a local one hid."""
    shell.variables.pop(name, None)
    shell.exported.pop(name, None)
    shell.kinds.pop(name, None)
    shell.unset -= {name}
    if hidden.variable is not None:
        shell.variables[name] = hidden.variable
    if hidden.is_unset:
        shell.unset |= {name}
    if hidden.export is not None:
        shell.exported[name] = hidden.export
    if hidden.kind:
        shell.kinds[name] = hidden.kind


def unset(shell: Shell, name: str) -> None:
    """Follow `unset` of a variable, or of a function where there is no variable."""
    is_local = [name in scope for scope in shell.locals]
    if name not in shell.variables and name in shell.functions and not any(is_local):
        del shell.functions[name]
        return
    # The local variable of a caller goes, and the one behind it is seen again.
    if any(is_local) and not is_local[-1]:
        scope = next(scope for scope in reversed(shell.locals) if name in scope)
        restore(shell, name, scope.pop(name))
        return
    shell.remove(name)
