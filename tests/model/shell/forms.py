"""Forms of bash in people's scripts: the script, the words that ours reads, and files beside it.

`RUN` stands for `torchrun pretrain_gpt.py --a`, `?` for a word that is not known, and a `!` at the
end says that a note names something that is not followed.
"""

from __future__ import annotations

Form = tuple[str, str] | tuple[str, str, dict[str, str]]

PROCESSES: dict[str, Form] = {
    "set -o allexport": (
        "A=0\nset -o allexport\nB=1\nset +o allexport\nC=2\n"
        "bash -c 'RUN ${A:-n} ${B:-n} ${C:-n}'",
        "n|1|n"),
    "set -a": ("A=0\nset -a\nB=1\nset +a\nC=2\nbash -c 'RUN ${A:-n} ${B:-n} ${C:-n}'", "n|1|n"),
    "allexport source": (
        "set -a; source ./e.env; set +a\nbash -c 'RUN ${Q:-n} ${R:-n}'",
        "1|2", {"e.env": "Q=1\nR=2\n"}),
    "allexport if": ('if [ "$U" ]; then set -a; fi\nA=1\nbash -c \'RUN ${A:-n}\'', "?"),
    "export in if": ('A=1\nif [ "$U" ]; then export A; fi\nbash -c \'RUN ${A:-n}\'', "?"),
    "export -n": ("export A=1\nexport -n A\nbash -c 'RUN ${A:-n}'", "n"),
    "declare +x": ("export A=1\ndeclare +x A\nbash -c 'RUN ${A:-n}'", "n"),
    "array export": ("export A=(1 2)\nbash -c 'RUN ${A:-n}'", "n"),
    "export local": ("f() { local A=4; export A; bash -c 'RUN ${A:-n}'; }\nf", "4"),
    "export local after": ("f() { local A=4; export A; }; A=1; f\nbash -c 'RUN ${A:-n}'", "n"),
    "local -x": ("f() { local -x A=4; bash -c 'RUN ${A:-n}'; }\nf", "4"),
    "append export": ("export A=1; A+=2\nbash -c 'RUN ${A:-n}'", "12"),
    "unset export reset": ("export A=1; unset A; A=2\nbash -c 'RUN ${A:-n}'", "n"),
    "exported fn": ("run() { RUN $1 ${2:-5}; }\nexport -f run\nbash -c 'run 3'", "3|5"),
    "prefix env nested default": ("NUM=24 bash -c 'RUN ${NUM:-12}'", "24"),
    "prefix env script": ("NUM=24 bash run2.sh 7", "24|7", {"run2.sh": "RUN ${NUM:-12} $1\n"}),
    "env prefix script": ("env NUM=24 bash run2.sh", "24", {"run2.sh": "RUN ${NUM:-12}\n"}),
    "direct script": (
        "export NUM=3\n./run2.sh 7",
        "3|7", {"run2.sh": "#!/bin/bash\nRUN ${NUM:-12} $1\n"}),
    "direct script prefix": (
        "NUM=3 ./run2.sh 7",
        "3|7", {"run2.sh": "#!/bin/bash\nRUN ${NUM:-12} $1\n"}),
    "sbatch script": (
        'sbatch() { "$@"; }; A=4; export A\nsbatch ./r.sh 3',
        "4|3", {"r.sh": "#!/bin/bash\nRUN $A $1\n"}),
    "heredoc bash x": ("X=3\nX=4 bash <<'E'\nRUN ${X:-n}\nE", "4"),
    "heredoc wrapper": ("X=3\nsrun bash -s 7 <<E\nRUN $X \\$1\nE", "3|7"),
    "heredoc pipe": ("X=3\ncat <<E | bash\nRUN $X\nE", "3"),
    "heredoc pipe read": ("X=1\ncat <<E | { read X; RUN $X; }\n5\nE\n:", "5"),
    "cat bash": ("X=3\ncat <<E | bash\nRUN $X \\$X\nE", "3|?"),
    "bash -s": ("bash -s 4 <<'E'\nRUN $1\nE", "4"),
    "bash -s --": ("bash -s -- 4 <<'E'\nRUN $1\nE", "4"),
    "bash -o": ("bash -o pipefail run2.sh 7", "7", {"run2.sh": "RUN $1\n"}),
    "bash -c --": ("bash -c -- 'RUN $1' x 7", "7"),
    "env -u": ("export A=1 B=2\nenv -u A C=3 bash -c 'RUN ${A:-n} ${B:-n} $C'", "n|2|3"),
    "bash -c args": ('bash -c \'RUN $0 $1 "$@"\' x 1 2', "?|1|1|2"),
    "perhaps $0": ("bash -c 'RUN $@' ${R[*]} x y", "?"),
    "echo bash": ('X=3\necho "RUN $X" | bash', "3"),
}  # fmt: skip
SCOPES: dict[str, Form] = {
    "unset global in function": ("X=1\nf() { unset X; }\nf\nRUN ${X:-n}", "n"),
    "unset local in function": (
        "X=1\nf() { local X=2; unset X; echo; X=5; }\nf >/dev/null\nRUN ${X:-n}",
        "1"),
    "unset caller's local": (
        "X=1\ng() { unset X; Y=${X:-n}; }\nf() { local X=2; g; }\nf\nRUN ${X:-n} $Y",
        "1|1"),
    "unset caller's local then set": (
        "X=1\ng() { unset X; X=7; }\nf() { local X=2; g; Y=$X; }\nf\nRUN ${X:-n} $Y",
        "7|7"),
    "local U": ("f() { local U=1; }\nf\nRUN $U z", "?|z"),
    "local U no value": ("f() { local U; U=2; }\nf\nRUN $U z", "?|z"),
    "local under if": ('X=1\nf() { if [ "$U" ]; then local X; fi; X=5; }\nf\nRUN $X', "?"),
    "unset fn by name": ("f() { A=1; }\nA=0\nunset f\nf\nRUN $A", "0"),
    "func in if": ('f() { A=1; }\nif [ "$U" ]; then f() { A=2; }; fi\nf\nRUN $A', "?"),
    "readonly": ("readonly X=1\nX=2\nRUN $X", "1!"),
    "nameref": ("A=1\ndeclare -n r=A\nr=2\nRUN $A $r", "1|2!"),
    "nameref array": (
        'add() { local -n arr=$1; shift; arr+=("$@"); }\n'
        'ARGS=(); add ARGS --num-layers 24\nRUN "${ARGS[@]}"',
        "!"),
    "declare -i": ("declare -i N=3\nN=N+4\nN+=2\nRUN $N", "?"),
    "declare -i later": ("declare -i N\nN=3+4\nRUN $N", "?"),
    "declare -u": ("declare -u N=ab\nN=cd\nRUN $N", "CD"),
    "local -i": ("f() { local -i n=2; n=n*4; A=$n; }\nf\nRUN $A", "?"),
    "typeset -l": ("typeset -l n\nn=ABC\nRUN $n", "abc"),
    "local -a": ('f() { local -a r=(1 \'2 3\'); A=("${r[@]}"); }\nf\nRUN "${A[@]}"', "1|2 3"),
    "local -a from args": ('f() { local -a r=("$@"); A="${r[*]:1}"; }\nf 1 2 3\nRUN $A', "2|3"),
}  # fmt: skip
INPUTS: dict[str, Form] = {
    "getopts fn": (
        'f() { local OPTIND o; while getopts "a:b" o; do case $o in a) A=$OPTARG;; '
        "b) B=1;; esac; done; shift $((OPTIND-1)); C=$1; }\nf -a 3 -b z\nRUN $A $B $C",
        "?|?|?"),
    "read -d": ('read -r -d \'\' X <<EOF\n1 2\n3\nEOF\nRUN "$X"', "?"),
    "read unknown name": ("U1=Y\nY=1; X=1\nread $U1 <<< 5\nRUN $X $Y", "1|5"),
    "mapfile": ('mapfile -t A <<< $\'1\\n2\'\nRUN "${A[@]}"', "1|2"),
    "mapfile default": ('mapfile -t <<< $\'1\\n2\'\nRUN "${MAPFILE[@]}"', "1|2"),
    "mapfile proc": ('mapfile -t A < <(printf \'%s\\n\' 1 2)\nRUN "${A[@]}"', "?"),
    "readarray -d": ('readarray -t -d , A <<< 1,2\nRUN "${A[@]}"', "?"),
    "pipe reads": ("printf '1\\n2\\n' | { read A; read B; RUN $A $B; }", "1|2"),
    "pipe while": ("printf '1\\n2\\n' | { while read A; do B+=$A; done; RUN $B; }", "?"),
    "while herestring": ("while read A; do B+=$A; done <<< $'1\\n2'\nRUN $B", "?"),
    "while read file": ("while read A; do B+=$A; done < f.txt\nRUN $B", "?", {"f.txt": "1\n2\n"}),
    "while procsub": ("while read A; do B+=$A; done < <(printf '1\\n2\\n')\nRUN $B", "?"),
    "group heredoc": ("{ read A; read B; } <<EOF\n1\n2\nEOF\nRUN $A $B", "1|2"),
    "while read const": (
        'X=; while read -r l; do [ "$l" ] && X+="$l "; done <<EOF\n--b 1\n--c 2\nEOF\n'
        "RUN $X",
        "?"),
    "while read kv": (
        'while IFS== read -r k v; do eval "$k=$v"; done <<EOF\nA=1\nB=2\nEOF\n'
        "RUN ${A-n} ${B-n}",
        "1|2"),
    "lastpipe": ("shopt -s lastpipe\nA=1\necho 5 | read A\nRUN $A", "1!"),
    "nocasematch": ("shopt -s nocasematch\ncase ABC in abc) A=1;; *) A=2;; esac\nRUN $A", "2!"),
    "expand_aliases": ("shopt -s expand_aliases\nalias e='echo z'\nX=$(e 1)\nRUN $X", "?!"),
}  # fmt: skip
FILES: dict[str, Form] = {
    "heredoc file": ("cat > m.txt <<EOF\n--b 2\nEOF\nRUN $(cat m.txt)", "?", {"m.txt": "--b 9"}),
    "heredoc source": (
        "cat > env.sh <<'EOF'\nX=2\nEOF\nsource ./env.sh\nRUN $X",
        "2", {"env.sh": "X=9"}),
    "heredoc source, changed": (
        "cat <<EOF > env.sh\nX=2\nEOF\nsed -i s/2/3/ env.sh\n. ./env.sh\nRUN $X",
        "?!", {"env.sh": "X=9"}),
    "heredoc source, more": (
        "cat > env.sh <<E\nX=2\nE\ncat >> env.sh <<E\nX=3\nE\n. ./env.sh\nRUN $X",
        "?!", {"env.sh": "X=9"}),
    "heredoc source, perhaps": (
        'if [ "$U" ]; then cat > env.sh <<E\nX=2\nE\nfi\n. ./env.sh\nRUN $X',
        "?!", {"env.sh": "X=9"}),
    "heredoc source, another folder": (
        "mkdir d; cat > d/env.sh <<E\nX=2\nE\n. ./env.sh\nRUN $X",
        "?!", {"env.sh": "X=9"}),
    "heredoc run": (
        "L=4\ncat > r.sh <<E\nexport N=$L\nRUN \\$1 \\$N $U\nE\nchmod +x r.sh\n"
        "bash ./r.sh 7", "7|4|?"),
    "heredoc run, any name": (
        "T=$PWD/job.$$\ncat <<'E' > $T\nRUN $1\nE\nL=2 bash $T 7", "7"),
    "echo to file": ("echo X=2 > env.sh\n. ./env.sh\nRUN $X", "?!", {"env.sh": "X=9"}),
    "append to file": ("echo X=2 >> env.sh\n. ./env.sh\nRUN $X", "?!", {"env.sh": "X=9"}),
    "sed -i": ("sed -i s/9/2/ env.sh\n. ./env.sh\nRUN $X", "?!", {"env.sh": "X=9\n"}),
    "tee file": ("echo X=2 | tee env.sh >/dev/null\n. ./env.sh\nRUN $X", "?!", {"env.sh": "X=9"}),
    "cp file": (
        "cp other.sh env.sh\n. ./env.sh\nRUN $X",
        "?!", {"env.sh": "X=9", "other.sh": "X=2"}),
    "source args": ("source ./m.sh 8B 2\nRUN $X", "?", {"m.sh": "X=$1-$2\n"}),
    "source restores": (
        "set -- p\nsource ./m.sh 8B\nRUN $X $1",
        "8B|?", {"m.sh": "X=$1; set -- q\n"}),
    "source set args": ("set -- p\nsource ./m.sh\nRUN $1", "q", {"m.sh": "set -- q\n"}),
}  # fmt: skip
VALUES: dict[str, Form] = {
    "default sum": ("L=3\nRUN ${X:-$((L*4))} ${Y-a$((L+1))} ${Z:=$((L*(2+1)))}", "12|a4|9"),
    "default brackets": ("RUN ${X:-$((echo 5); (echo 6))}", "5|6"),
    "eval subst": ('eval "$(echo X=4)"\nRUN $X', "4"),
    "eval multi": ('eval "$(printf \'X=%s\\nY=%s\\n\' 1 2)"\nRUN $X $Y', "1|2"),
    "for ever": ("i=0; for ((;;)); do i=$((i+1)); [ $i -ge 3 ] && break; done\nRUN $i", "3"),
    "for c nested": ("N=2; for ((i=0; i<$((N+1)); i++)); do A+=$i; done\nRUN $A", "?"),
    "for c comma": ("for ((i=0, j=5; i<j; i++, j--)); do A+=$i; done\nRUN $A $i $j", "?|3|2"),
    "slice": ('A=(1 2 3 4)\nRUN "${A[@]:1:2}" "${A[@]: -1}" ${A[*]:2}', "2|3|4|3|4"),
    "indirect": ("A=5; N=A\nRUN ${!N}", "5"),
    "indirect array": ('A=(1 2); N="A[@]"\nRUN "${!N}"', "1|2"),
    "indirect el": ('A=(1 2); N="A[1]"\nRUN "${!N}"', "2"),
    "indices": ("A=(a b c)\nRUN ${!A[@]}", "?"),
    "table keys": (
        "declare -A M=([x]=1 [y]=2 [zeta]=3 [alpha]=4)\n"
        'for k in "${!M[@]}"; do X+="--$k ${M[$k]} "; done\nRUN $X',
        "?"),
    "table values": ('declare -A M=([x]=1 [y]=2 [zeta]=3 [alpha]=4)\nRUN "${M[@]}"', "?|?|?|?"),
    "table quoted keys": (
        "declare -A M=([x]=1 ['y z']=2); i=x; M[\"w\"]=3; M['v v']=4\n"
        "RUN ${M[\"x\"]} ${M['y z']} \"${M[\"y z\"]}\" ${M[\"$i\"]} ${M[w]} ${M[\"v v\"]}",
        "1|2|2|1|3|4"),
    "table quoted keys, changed": (
        "declare -A M=([x]=12)\n"
        "RUN ${M[\"x\"]%2} ${M[\"x\"]:-7} ${M['q']:-7} ${#M[\"x\"]} ${M[\"x$U\"]}",
        "1|12|7|2|?"),
    "quoted index": ('A=(1 2 3); i=2\nRUN ${A["0"]} ${A["$i"]} $(("3" + "2"))', "1|3|5"),
    "table count": ("declare -A M=([x]=1 [y]=2)\nRUN ${#M[@]}", "2"),
    "trap err": ("trap 'X=3' ERR\nX=1\nfalse\nRUN $X", "1!"),
    "trap debug": ("X=1\ntrap 'X=3' DEBUG\nRUN $X", "?!"),
    "arith unknown assign": ("N=1\n(( N = U * 2 ))\nRUN $N", "?"),
    "arith unknown add": ("N=1\n(( N += U ))\nRUN $N", "?"),
    "arith unknown short": ("N=1\n(( U && (N=2) ))\nRUN $N", "?"),
    "arith unknown tern": ("N=1\n(( U ? (N=2) : (N=3) ))\nRUN $N", "?"),
    "arith index assign": ("N=1; A=(a b c)\nY=${A[N=U]}\nRUN $N", "?"),
    "arith comma": ("(( a=1, b=a+2 ))\nc=$((a+=3, b*2))\nRUN $a $b $c", "4|3|6"),
    "arith array": ('A=(1 2 3); (( A[1] += 5 ))\nRUN "${A[@]}"', "1|2|3!"),
    "let": ('let X=3+4 Y=X*2; let "Z = Y - 1"\nRUN $X $Y $Z', "7|14|13"),
    "let unknown": ("X=1; let X=U+1\nRUN $X", "?"),
    "at 2": (
        'set -- 1 "2 3" 4\nRUN "${@:2}" ${@:1:1} "${*:2}" "${@: -1}" ${!#}',
        "2 3|4|1|2 3 4|4|4"),
    "1:?": ("set -- 1\nRUN ${1:?usage} ${#}", "1|1"),
    "regex": (
        "X=llama3-8B; if [[ $X =~ ^llama([0-9]+)-(.*)$ ]]; then Y=${BASH_REMATCH[2]}; fi\n"
        "RUN $Y",
        "?"),
    "regex var": ('X=a1; R="[0-9]+$"; [[ $X =~ $R ]] && Y=1\nRUN ${Y-n}', "1"),
    "printf -v": ("printf -v X '%s-%03d' a 7\nRUN $X", "?"),
    "heredoc dash": ('X=$(cat <<-EOF\n\t--b 2\n\t  z\n\tEOF\n)\nRUN "$X"', "--b 2\n  z"),
    "heredoc and": ("X=1\ncat <<E >/dev/null && X=2\nq\nE\nRUN $X", "?"),
    "heredoc or": ("X=1\nfalse <<E || X=2\nq\nE\nRUN $X", "2"),
    "heredoc quoted": ('A=5; X=$(cat <<\'EOF\'\n--b $A\nEOF\n)\nRUN "$X"', "--b $A"),
    "subst pattern": (
        "X=abcabc\nRUN ${X/#a/z} ${X/%c/z} ${X/b} ${X//b/} ${X/#b/z}",
        "zbcabc|abcabz|acabc|acac|abcabc"),
    "subst ends": (
        'A=(bf16 "lr=1" ""); X=abab\nRUN "${A[@]/#/--}" ${X/%/z} ${X/#a*b/q} ${X/%[ab]/} ${X/#}',
        "--bf16|--lr=1|--|ababz|q|aba|abab"),
    "subst nl": ('X=$\'a\\nb\'\nRUN "${X//$\'\\n\'/ }"', "a b"),
    "tilde colon": ("HOME=/h; X=a:~/b\nRUN $X", "?"),
    "star no slash": ("RUN *.txt", "?", {"f.txt": "", "g.txt": ""}),
    "glob var": ("X='*.txt'\nRUN $X", "?", {"f.txt": "", "g.txt": ""}),
    "bracket glob": ("RUN [fg].txt", "?", {"f.txt": "", "g.txt": ""}),
    "arr glob": ('A=(*.txt)\nRUN "${A[@]}"', "?", {"f.txt": "", "g.txt": ""}),
    "trailing blank": ("RUN 1 \\ \n  --c 3", "1!"),
    "dollar quote": ('RUN $"a b" $\'c\\x41\' $\'\\u00e9\'', "a b|?|?"),
    "length utf8": ("X=é\nRUN ${#X}", "?"),
    "set +B": ("set +B\nRUN {a,b}", "a|b!"),
    "set -k": ("set -k\nRUN 1; bash -c 'RUN ${A:-n}' A=3", "n!"),
    "time": ("X=1; time X=2\nRUN $X", "?"),
    "declare dynamic": ('n=A; declare "$n=5"; declare -g "${n}B=6"\nRUN $A $AB', "5|6"),
    "eval dynamic": ("n=A; eval $n=5; eval X=\\$$n\nRUN $A $X", "5|5"),
    "printf -v --": ("printf -v X -- '--f %d' 7\nRUN $X", "--f|7"),
    "printf dynamic": ("n=A; printf -v $n %s 5\nRUN $A", "5"),
    "unset el": ('A=(1 2 3); unset \'A[1]\'\nRUN "${A[@]}" ${#A[@]}', "?|?"),
    "join ifs sub": ('A=(1 2); X=$(IFS=,; echo "${A[*]}")\nRUN $X', "1,2"),
    "IFS newline": (
        'IFS=$\'\\n\'; X=$\'a b\\nc\'; A=($X); unset IFS\nRUN "${A[0]}" ${#A[@]}',
        "a b|2"),
    "dynamic scope": ("g() { A=3; }\nf() { local A=2; g; B=$A; }; A=1; f\nRUN $A $B", "1|3"),
    "temp env fn": ("A=1; f() { B=$A; }; A=2 f\nRUN $A $B", "1|2"),
    "temp env builtin": ('A=\'a b\'; IFS=, eval \'X=($A)\'\nRUN "${X[@]}"', "a b"),
    "getopt eval set": (
        'eval set -- "-a 3 -- z"; while true; do case $1 in -a) A=$2; shift 2;; --) '
        "shift; break;; esac; done\nRUN $A $1",
        "3|z"),
    "case ;;&": ("case ab in a*) A=1;;& *b) B=2;; *) C=3;; esac\nRUN $A $B ${C-n}", "1|2|n"),
    "case ;;& last": ("case 8b in 8b*) L=12;;& *) L=24;; esac\nRUN $L", "24"),
    "case ;;& unknown": ("case $U in x) L=1;;& *) M=2;; esac\nRUN ${L:-n} $M", "?|2"),
    "case ;;& none": ("case a in a) L=1;;& b) L=2;; esac\nRUN $L", "1"),
    "basename of nothing": ('W=; RUN "$(basename "$W")" $(basename "$W") z', "|z"),
    "basename of slashes": (
        "RUN $(basename /) $(basename //) $(basename / x) $(basename a//b/)", "/|/|/|b"),
    "dirname of slashes": (
        'RUN $(dirname "") $(dirname /) $(dirname a/) $(dirname a//b/) $(dirname /a)', ".|/|.|a|/"),
    "empty default": ('set -- "${W:-}" 8 16\nRUN $# $2', "3|8"),
    "empty default -n": ('A=1; [ -n "${W:-}" ] && A=2; test -n "${W-}" && A=3\nRUN $A', "1"),
    "empty default array": ('A=("${W:-}" 8 16)\nRUN ${#A[@]} ${A[1]}', "3|8"),
    "empty default for": ('N=; for v in "${W:-}" 8; do N=$N.$v; done\nRUN $N', "..8"),
    "empty default args": ('set --; set -- "${@:-}" 8\nRUN $# $2', "2|8"),
    "empty default of args": ('set --; set -- "${W:-$@}" 8\nRUN $# $2', "2|8"),
    "empty default plus": ('W=1; set -- "${W:+}" 8; unset W\nRUN $# $2', "2|8"),
    "empty default bare": ("set -- ${W:-} 8\nRUN $# $1", "1|8"),
    "empty default equal": ('if [ "${W:-}" = "" ]; then A=4; fi\nRUN $A', "4"),
    "empty default inside": ('RUN "a${W:-}b" "${W:-}"', "ab|"),
    "comment in command": ("RUN 1 \\\n  # --b 2 \\\n  --c 3", "1"),
}  # fmt: skip
