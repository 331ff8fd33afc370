"""`actorflow completion SHELL`: what makes a shell complete commands, options and files.

    actorflow completion bash >> ~/.bashrc
    actorflow completion zsh >> ~/.zshrc
    actorflow completion fish > ~/.config/fish/completions/actorflow.fish

The words are those of the parser at the moment of the call, so a shell asks nobody later.
"""

from __future__ import annotations

import argparse
from typing import Any

SHELLS = ("bash", "zsh", "fish")

_BASH = """\
_actorflow() {{
    local words
    case "${{COMP_WORDS[1]}}" in
{cases}
    *) words="{commands}" ;;
    esac
    [ "$COMP_CWORD" -eq 1 ] && words="{commands}"
    COMPREPLY=($(compgen -W "$words" -- "${{COMP_WORDS[COMP_CWORD]}}"))
}}
complete -o default -F _actorflow actorflow
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument of the command."""
    parser.add_argument("shell", choices=SHELLS)


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Print the text for a shell, and return the exit code."""
    print(completion(parser, options.shell), end="")
    return 0


def completion(parser: argparse.ArgumentParser, shell: str) -> str:
    """Return what a shell reads to complete the commands of a parser."""
    words = words_of(parser)
    if shell == "fish":
        lines = [
            "complete -c actorflow -n __fish_use_subcommand -f -a"
            f" {_quoted(name)} -d {_quoted(text)}"
            for name, text in _texts(parser).items()
        ]
        for command, options in words.items():
            seen = f"'__fish_seen_subcommand_from {command}'"
            lines += [f"complete -c actorflow -n {seen} -a {_quoted(word)}" for word in options]
        return "\n".join(lines) + "\n"
    cases = "\n".join(
        [f'    {command}) words="{" ".join(options)}" ;;' for command, options in words.items()]
    )
    text = _BASH.format(cases=cases, commands=" ".join(words))
    return text if shell == "bash" else f"autoload -U +X bashcompinit && bashcompinit\n{text}"


def words_of(parser: argparse.ArgumentParser) -> dict[str, list[str]]:
    """Return the options of each command; of one with actions those, and all their options."""
    words = {}
    for name, command in commands_of(parser).items():
        inner = commands_of(command)
        parsers = [command, *inner.values()]
        options = [o for one in parsers for o in one._option_string_actions if o.startswith("--")]
        words[name] = list(dict.fromkeys([*inner, *options]))
    return words


def _actions(parser: argparse.ArgumentParser) -> list[Any]:
    # argparse tells nobody of the parsers that it has, but by this attribute.
    return [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]


def commands_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of the commands, or of the actions of a command, by name."""
    return {name: one for action in _actions(parser) for name, one in action.choices.items()}


def _texts(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Return what each command does, by its name."""
    choices = [choice for action in _actions(parser) for choice in action._choices_actions]
    return {choice.dest: choice.help or "" for choice in choices}


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
