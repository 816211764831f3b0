"""Statements with other statements inside, as text of bash."""

from __future__ import annotations

KINDS = [
    "if", "elif", "and", "or", "case", "for", "c", "while", "function", "return", "subshell",
    "group", "continue", "break", "next", "ifs", "local", "appended", "elements", "unset",
    "removed", "inner", "perhaps local", "hidden", "all", "lines", "pipe", "forever", "two",
    "options", "array",
]  # fmt: skip


def block(kind: str, condition: str, name: str, body: str, other: str) -> str:
    """Return a statement of a kind; a second list of statements may stand behind the first."""
    return {
        "if": f"if {condition}; then\n{body}\nelse\n{other}\nfi",
        "elif": f'if {condition}; then\n{body}\nelif [ -n "${name}" ]; then\n{other}\nfi',
        "and": f"{condition} && {{ {body}\n}}",
        "or": f"{condition} || {{ {body}\n}}",
        "case": f'case "${name}" in\n a|12) {body} ;;\n b*|"")\n{other}\n;;\n *) : ;;\nesac',
        "for": f"for {name} in 1 'b c' ${name}; do\n{body}\ndone",
        "c": f"for ((i = 0; i < 3; i++)); do\n{body}\nR+=($i)\ndone",
        "while": f"n=0\nwhile [ $n -lt 2 ]; do\n{body}\nn=$((n + 1))\ndone",
        "function": f"f() {{\nlocal {name}=l\n{body}\n}}\nf 'x y' ${name}\n{other}",
        "return": f"g() {{\nif {condition}; then return; fi\n{body}\n}}\ng q",
        "subshell": f"( {body} )\n{other}",
        "group": f"{{ {body}\n}} > /dev/null",
        "continue": f"for i in 1 2 3; do if {condition}; then continue; fi\n{body}\ndone",
        "break": f"for i in 1 2; do for j in x y; do {body}\n{condition} && break 2\ndone\n"
        f"{other}\ndone",
        "next": f"for i in 1 2; do until false; do {body}\ncontinue 2\ndone\n{other}\ndone",
        "ifs": f"IFS=,\n{body}\nunset IFS\n{other}",
        "local": f"h() {{\nlocal IFS=${name}\n{body}\n}}\nh 1 2\n{other}",
        "appended": f'if {condition}; then {name}="${name} --q 1"; fi\n{body}\n{name}+=b',
        "unset": f"u() {{\nlocal {name}=l\n{body}\nunset {name}\n{other}\n}}\nu 1",
        "removed": f"v() {{\n{body}\nunset {name}\n}}\nv\n{other}",
        "inner": f"w() {{\nunset {name}\n{body}\n}}\nx() {{ local {name}=l; w; {name}+=m; }}\nx",
        "perhaps local": f"y() {{\nif {condition}; then local {name}; fi\n{body}\n{name}=5\n}}\ny",
        "hidden": f"z() {{\nlocal U={name}\n{body}\n}}\nz\n{other}",
        "all": f"set -a\n{body}\nset +a\n{other}",
        "lines": f"while read -r {name}; do\n{body}\ndone <<< $'1\\n2 3'\n{other}",
        "pipe": f"printf '1\\n2\\n' | {{ read {name}; {body}\nread {name}\n{other}\n}}",
        "forever": f"for ((;;)); do\n{body}\n{condition} && continue\nbreak\ndone",
        "two": f"if {condition}; then k() {{\n{body}\n}}; else k() {{ {name}=$1; }}; fi\nk q",
        "options": f"o() {{\nlocal OPTIND k; while getopts a:b k; do {name}=$OPTARG; done\n"
        f"shift $((OPTIND - 1))\n{body}\n}}\no -a 1 x",
        "array": f"p() {{\nlocal -a R=(1 '2 3')\n{body}\nS=(\"${{R[@]:1}}\")\n}}\np",
        "elements": f"if {condition}; then R+=(--q 'a b'); fi\n{body}\nR+=($U{name})",
    }[kind]
