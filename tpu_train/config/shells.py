"""Completion in bash, zsh and fish: the script each shell loads, how it asks, and how it is answered.

Key idea: a script does no more than pass on the words and the cursor, in the environment variables that Click made
usual (`_TPU_TRAIN_COMPLETE=complete_bash`, `COMP_WORDS` with one word a line, `COMP_CWORD`). Ours, because Typer's
scripts put a space after `model=` and know nothing of bash, which takes `model=qw` for the three words `model = qw`.
"""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from tpu_train.config.completion import Candidate, Command, complete

_BASH = r"""
_tpu_train_completion() {
    local IFS=$'\n'
    mapfile -t COMPREPLY < <(env _TPU_TRAIN_COMPLETE=complete_bash COMP_WORDS="${COMP_WORDS[*]}" \
        COMP_CWORD="$COMP_CWORD" "${1/#\~/$HOME}" 2>/dev/null)
    if [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *[=.] ]]; then compopt -o nospace; fi
}

complete -o default -F _tpu_train_completion tpu-train
"""

_ZSH = r"""
_tpu_train_completion() {
    local -a answers open closed
    answers=("${(@f)$(env _TPU_TRAIN_COMPLETE=complete_zsh COMP_WORDS="${(F)words}" COMP_CWORD=$((CURRENT - 1)) \
        "${words[1]/#\~/$HOME}" 2>/dev/null)}")
    open=(${${(M)answers:#+*}#+})
    closed=(${${(M)answers:#-*}#-})
    (( $#open )) && _describe -t keys key open -S ''
    (( $#closed )) && _describe -t words word closed
    if (( ! $#open && ! $#closed )); then
        compset -P '*='
        _files
    fi
}

(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }
compdef _tpu_train_completion tpu-train
"""

_FISH = r"""
function __tpu_train_completion
    set -l before (commandline -opc)
    set -l token (commandline -ct)
    set -l answers (env _TPU_TRAIN_COMPLETE=complete_fish \
        COMP_WORDS=(string join \n -- $before "$token" | string collect -N) COMP_CWORD=(count $before) \
        (string replace -r '^~' $HOME -- $before[1]) 2>/dev/null)
    if set -q answers[1]
        printf '%s\n' $answers
    else
        set -l key (string match -r '^[^=]*=' -- $token)
        __fish_complete_path (string replace -r '^[^=]*=' '' -- $token) | string replace -r '^' -- "$key"
    end
end

complete --command tpu-train --no-files --arguments '(__tpu_train_completion)'
"""

SCRIPTS: Mapping[str, str] = {name: text.lstrip() for name, text in {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}.items()}

_SEPARATOR = re.compile("[=:]+")


def answer(shell: str, environ: Mapping[str, str], commands: Mapping[str, Command]) -> str:
    """What the shell's script reads: a candidate a line.

    Args:
        shell: a name in SCRIPTS.
        environ: has COMP_WORDS and COMP_CWORD.
        commands: of the command line.
    """
    words = environ["COMP_WORDS"].split("\n")[: int(environ["COMP_CWORD"]) + 1]
    kept = 0  # characters of the begun word that bash leaves standing before what it puts in
    if shell == "bash":
        last = "" if _SEPARATOR.fullmatch(words[-1]) else words[-1]
        words = _joined(words)
        kept = len(words[-1]) - len(last)
    if shell != "fish":  # its words come without quotes
        words = [_unquoted(word) for word in words]
    _, *before, incomplete = words
    found = complete(before, incomplete, commands)
    return "".join(f"{_line(shell, candidate, kept)}\n" for candidate in found)


def _joined(pieces: Sequence[str]) -> list[str]:
    """Words of bash put together again: it breaks them at `=` and `:`, which become words of their own."""
    words: list[str] = []
    glued = False
    for piece in pieces:
        separator = _SEPARATOR.fullmatch(piece) is not None
        if words[1:] and (separator or glued):
            words[-1] += piece
        else:
            words.append(piece)
        glued = separator
    return words


def _unquoted(word: str) -> str:
    """A word without its quotes; as it is while one is still open."""
    try:
        return "".join(shlex.split(word))
    except ValueError:
        return word


def _line(shell: str, candidate: Candidate, kept: int) -> str:
    word, help_text = candidate
    if shell == "zsh":
        goes_on = "+" if word.endswith(("=", ".")) else "-"
        escaped = word.replace("\\", "\\\\").replace(":", "\\:")
        return f"{goes_on}{escaped}:{help_text}" if help_text else f"{goes_on}{escaped}"
    return f"{word}\t{help_text}" if shell == "fish" and help_text else word[kept:]


def install(shell: str) -> Path:
    """Write a shell's script where it is loaded from; twice is as once.

    Returns:
        The script's file.
    """
    home = Path.home()
    if shell == "fish":  # loads this folder itself
        file = Path(os.environ.get("XDG_CONFIG_HOME") or home / ".config") / "fish/completions/tpu-train.fish"
        start = None
    else:
        file = Path(os.environ.get("XDG_DATA_HOME") or home / ".local/share") / f"tpu-train/completion.{shell}"
        start = home / ".bashrc" if shell == "bash" else Path(os.environ.get("ZDOTDIR") or home) / ".zshrc"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(SCRIPTS[shell], encoding="utf-8")
    if start:
        line = f"source {shlex.quote(str(file))}"
        text = start.read_text(encoding="utf-8") if start.is_file() else ""
        if line not in text.splitlines():
            text += "" if text.endswith("\n") or not text else "\n"
            start.write_text(f"{text}{line}\n", encoding="utf-8")
    return file
