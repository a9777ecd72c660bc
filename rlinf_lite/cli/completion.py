"""`rlinf-lite completion bash|zsh`: print a script for a shell's start-up file, with the names of this installation."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from pydantic import BaseModel

from rlinf_lite.cli.configs import every_config
from rlinf_lite.config.names import schema_keys
from rlinf_lite.config.reasoning import ReasoningConfig
from rlinf_lite.config.schema import Config

_SCRIPT = """\
# rlinf-lite: completion of commands, configs, keys and runs. In {file}: eval "$(rlinf-lite completion {shell})"
{before}_rlinf_lite() {{
    local commands="{commands}"
    local configs="{configs}"
    local language="{language}"
    local keys="{keys}"
    local language_keys="{language_keys}"
    local word="${{COMP_WORDS[COMP_CWORD]}}" command="${{COMP_WORDS[1]}}" words="" before i
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        COMPREPLY=($(compgen -W "$commands" -- "$word"))
        return
    fi
    before="${{COMP_WORDS[COMP_CWORD-1]}}"
    if [ "$word" = "=" ] || [ "$before" = "=" ]; then  # a value, which may be a file
        COMPREPLY=($(compgen -f -- "${{word#=}}"))
        return
    fi
    case "$command" in
        eval|report|compare|export|reward|serve|runs|stop)
            compopt -o filenames 2>/dev/null  # a directory under results/, or any other
            case "$word" in
                */*) COMPREPLY=($(compgen -d -- "$word")) ;;
                *) COMPREPLY=($(compgen -d -- "results/$word") $(compgen -d -- "$word")) ;;
            esac
            return ;;
        init) [ "$COMP_CWORD" -eq 2 ] && COMPREPLY=($(compgen -W "env policy" -- "$word")); return ;;
        completion) COMPREPLY=($(compgen -W "bash zsh" -- "$word")); return ;;
        job) [ "$COMP_CWORD" -eq 2 ] && COMPREPLY=($(compgen -W "list status logs stop" -- "$word")); return ;;
        train|sweep|collect|doctor) ;;
        *) return ;;
    esac
    words="$configs"
    for ((i = 2; i < COMP_CWORD; i++)); do  # keys, once a config is named
        case " $language " in *" ${{COMP_WORDS[i]}} "*) words="$language_keys"; break ;; esac
        case " $configs " in *" ${{COMP_WORDS[i]}} "*) words="$keys"; break ;; esac
    done
    case "$word" in
        -*) COMPREPLY=($(compgen -W "--dry-run --resume --detach --help --help-all" -- "$word")); return ;;
        *.*) [ "$words" = "$configs" ] && words="$keys" ;;
    esac
    COMPREPLY=($(compgen -W "$words" -- "$word"))
    case "${{COMPREPLY[0]}}" in *=) compopt -o nospace 2>/dev/null ;; esac
}}
complete -F _rlinf_lite rlinf-lite
"""


def completion(arguments: Sequence[str]) -> int:
    """Print the script. Returns the exit code 0."""
    parser = argparse.ArgumentParser(prog="rlinf-lite completion", description=__doc__)
    parser.add_argument("shell", choices=["bash", "zsh"])
    print(script(parser.parse_args(arguments).shell), end="")
    return 0


def script(shell: str) -> str:
    """The completion script for a shell. zsh runs the script for bash, with its module bashcompinit."""
    from rlinf_lite.cli import COMMANDS

    found = every_config()
    return _SCRIPT.format(
        shell=shell,
        file=f"~/.{shell}rc",
        before="autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else "",
        commands=" ".join(COMMANDS),
        configs=" ".join(one.name for one in found),
        language=" ".join(one.name for one in found if one.kind == "reasoning"),
        keys=_assignments(Config),
        language_keys=_assignments(ReasoningConfig),
    )


def _assignments(schema: type[BaseModel]) -> str:
    """`key=` for every key that is not a section, separated by spaces."""
    keys = schema_keys(schema)
    sections = {key.rpartition(".")[0] for key in keys}
    return " ".join(dict.fromkeys(f"{key}=" for key in keys if key not in sections))
