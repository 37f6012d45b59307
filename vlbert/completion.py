"""Print what has a shell complete the commands of vlbert, their recipes, fields and options.

    eval "$(python -m vlbert.completion bash)"        in ~/.bashrc
    eval "$(python -m vlbert.completion zsh)"         in ~/.zshrc, below compinit

Commands and options are found in the sources. Recipes and fields need the modules that define them, some of which
import torch: what these define is kept in ~/.cache/vlbert (XDG_CACHE_HOME), until a source changes.
"""

import contextlib
import dataclasses
import hashlib
import importlib
import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from storage.programs import make_parser
from storage.settings import default_of, field_values
from vlbert.commands import COMMANDS, source_of

# What a command takes as field=value: those of a dataclass, or those of the recipe that is its first argument.
FIELDS = {
    "collect": "storage.collect.plan:CollectSettings",
    "detect": "detectors.config:DetectionConfig",
    "evaluate": "vlbert.recipes:RECIPES",
    "forget": "vlbert.evaluation.forget:ForgetSettings",
    "plan": "vlbert.recipes:RECIPES",
    "replay": "vlbert.evaluation.replay:ReplaySettings",
    "train": "vlbert.recipes:RECIPES",
    "train-detector": "detectors.recipes:RECIPES",
    "whence": "vlbert.evaluation.whence:WhenceSettings",
}
# What else may be a command's first argument.
FIRST = {
    "catalog": "storage.catalog.__main__:COMMANDS",
    "compare": "vlbert.comparison.plans:PLANS",
    "completion": "vlbert.completion:SCRIPTS",
}

# --candidates prints whole words. Bash wants what stands behind the = of one, where it breaks words there.
SCRIPTS = {
    "bash": r"""
_vlbert() {
    local typed=${COMP_LINE:0:COMP_POINT} IFS=$'\n'
    COMPREPLY=($("$1" completion --candidates "$typed" 2> /dev/null))
    [[ ${COMPREPLY[0]} == *[=.] ]] && compopt -o nospace
    [[ ${typed##* } == *=* && $COMP_WORDBREAKS == *=* ]] && COMPREPLY=("${COMPREPLY[@]#*=}")
}
complete -o default -F _vlbert vlbert
""",
    "zsh": r"""
_vlbert() {
    local -a found=(${(f)"$("${words[1]}" completion --candidates "${(j: :)words[1,CURRENT]}" 2> /dev/null)"})
    if (( $#found )); then
        compadd -S '' -- ${(M)found:#*[=.]}
        compadd -- ${found:#*[=.]}
    else
        compset -P '*='
        _files
    fi
}
compdef _vlbert vlbert
""",
}


def candidates(words: Sequence[str]) -> list[str]:
    """What the last of the words may become; a field ends with =, and one with fields of its own with a dot."""
    *before, typed = words
    if not before:
        return _beginning(typed, [*COMMANDS, "--help", "--version"])
    command, *given = before
    if command not in COMMANDS:
        return []
    if typed.startswith("-"):
        return _beginning(typed, _options(command))
    given = [word for word in given if not word.startswith("-")]
    recipe = FIELDS.get(command, "").endswith(":RECIPES")
    if command in FIRST or (recipe and not given):
        return [] if given else _beginning(typed, _defined(FIELDS.get(command) or FIRST[command])["names"])
    fields = _defined(FIELDS[command])["fields"].get(given[0] if recipe else "", {}) if command in FIELDS else {}
    name, separator, value = typed.partition("=")
    if separator:
        return [f"{name}={one}" for one in _beginning(value, fields.get(name, ()))]
    return _beginning(typed, dict.fromkeys(_next_part(field, typed) for field in fields))


def _beginning(typed: str, words: Iterable[str]) -> list[str]:
    return [word for word in words if word.startswith(typed)]


def _next_part(field: str, typed: str) -> str:
    """`data.` of the field data.root where nothing was typed, and `data.root=` behind data."""
    dot = field.find(".", len(typed))
    return f"{field}=" if dot < 0 else field[: dot + 1]


def _options(command: str) -> list[str]:
    source = source_of(COMMANDS[command]).read_text(encoding="utf-8")
    return [*dict.fromkeys(re.findall(r'\(\s*"(--[a-z][a-z-]*)"', source)), "--help"]


def _defined(target: str) -> dict[str, Any]:
    """_describe(target), from its file where that is as new as all sources."""
    house = Path(__file__).parents[1]
    sources = [file for room in ("vlbert", "detectors", "training", "storage") for file in (house / room).rglob("*.py")]
    stamp = [len(sources), max(file.stat().st_mtime_ns for file in sources)]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "vlbert"
    file = cache / f"completion-{hashlib.sha256(f'{house} {target}'.encode()).hexdigest()[:16]}.json"
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        saved = json.loads(file.read_text(encoding="utf-8"))
        if saved["stamp"] == stamp:
            return saved
    found = _describe(target) | {"stamp": stamp}
    with contextlib.suppress(OSError):  # it works without, slowly
        cache.mkdir(parents=True, exist_ok=True)
        written = file.with_suffix(f".{os.getpid()}")
        written.write_text(json.dumps(found), encoding="utf-8")
        written.replace(file)
    return found


def _describe(target: str) -> dict[str, Any]:
    """`names` of what MODULE:NAME defines; by name, or "" of a dataclass, `fields` with the values they may have."""
    module, _, name = target.partition(":")
    found = getattr(importlib.import_module(module), name)
    if isinstance(found, type):
        needed = [one.name for one in dataclasses.fields(found) if default_of(one) is dataclasses.MISSING]
        fields = {field: values for field, values in field_values(found).items() if field not in needed}
        return {"names": [], "fields": {"": fields}}  # what is needed is an argument by its place
    fields = {key: field_values(recipe()) for key, recipe in found.items()} if name == "RECIPES" else {}
    return {"names": list(found), "fields": fields}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = make_parser("vlbert.completion", __doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("shell", nargs="?", choices=SCRIPTS)
    which.add_argument("--candidates", metavar="LINE", help="what the last word of a command line may become")
    options = parser.parse_args(arguments)
    if options.candidates is None:
        print(SCRIPTS[options.shell])
        return
    _, *words = options.candidates.split()
    if not words or options.candidates[-1].isspace():
        words.append("")
    print("\n".join(candidates(words)))


if __name__ == "__main__":
    main()
