"""What a command line got wrong, and every other error of a command, in the words of our errors.

Typer checks options by their annotations. What it says of them is not shown: an error has the same
form wherever it is found, `command: what must be WANT, got GOT; FIX`.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import typer

from counterpoint.cli.shared.files import why
from counterpoint.errors import CounterpointError, InputError, PlanError, UnsupportedError

DONE, FAILED, REFUSED, STOPPED = 0, 1, 2, 130
# newer releases of typer hold a click of their own: what a bad parameter is derived from is both's
UsageError: type[Exception] = typer.BadParameter.__mro__[1]


def meant(got: str, among: Sequence[str]) -> str:
    """ "did you mean 'plan'?", or "" where nothing is near."""
    near = get_close_matches(got, among, 1)
    return f"did you mean {near[0]!r}?" if near else ""


@contextmanager
def told(name: str, words: Sequence[str], function: Callable[..., Any]) -> Generator[None]:
    """Show an error of a command as one line on stderr, and end with its exit code.

    Args:
        name: of the command.
        words: what stands behind it.
        function: the command.
    """
    try:
        yield
    except KeyboardInterrupt:
        _end("\nstopped", STOPPED)  # behind what the terminal shows of Ctrl-C
    except UsageError as error:
        _end(_refused(name, words, _parameters(function), error), REFUSED)
    except InputError as error:
        _end(_named(name, str(error), _parameters(function)), REFUSED)
    except (PlanError, UnsupportedError) as error:
        _end(f"{name}: {error}", REFUSED)
    except CounterpointError as error:
        _end(f"{name}: {error}", FAILED)
    except BrokenPipeError:  # of `counterpoint plan ... | head`
        raise
    except OSError as error:
        want, got = "free to be read and written", f"{error.filename or 'none'}: {why(error)}"
        _end(str(InputError(name, "files", want=want, got=got)), REFUSED)


def _end(text: str, code: int) -> None:
    typer.echo(text, err=True)
    raise typer.Exit(code)


def _option(name: str) -> str:
    """The option that typer makes of an argument's name."""
    return f"--{name.replace('_', '-')}"


class _Parameter(NamedTuple):
    """An option or argument of a command."""

    shown: str  # "--ranks", "OP"
    kind: Any  # of its values
    declared: Any  # by typer.Option or typer.Argument


def _parameters(function: Callable[..., Any]) -> dict[str, _Parameter]:
    """Those of a command, by the names that its function has for them."""
    found: dict[str, _Parameter] = {}
    for name, hint in get_type_hints(function, include_extras=True).items():
        if get_origin(hint) is Annotated:
            kind, declared = get_args(hint)
            option = isinstance(declared, typer.models.OptionInfo)
            # in an annotation, the first of the names that an option declares is its default
            names = (declared.default, *(declared.param_decls or ()), _option(name))
            own = next(n for n in names if isinstance(n, str)).partition("/")[0]
            found[name] = _Parameter(own if option else name.upper(), kind, declared)
    return found


def _named(name: str, text: str, parameters: Mapping[str, _Parameter]) -> str:
    """An error of the library as one of the command: what it passed on is an option of its own."""
    op, _, rest = text.partition(": ")
    argument, _, tail = rest.partition(" ")
    if op == name or not tail:
        return text
    options = (p.shown for p in parameters.values() if p.shown == _option(argument))
    return f"{name}: {next(options, argument)} {tail}"


def _refused(
    name: str, words: Sequence[str], parameters: Mapping[str, _Parameter], error: Any
) -> str:
    """What typer refuses: a missing or unknown option, a wrong value, or a word too many."""
    see = f"see `counterpoint{f' {name}' * (name != 'counterpoint')} --help`"
    options = {p.shown: p for p in parameters.values() if p.shown.startswith("--")}
    refused = parameters.get(getattr(getattr(error, "param", None), "name", ""))
    unknown = getattr(error, "option_name", None)
    what, want, got, fix = "words", "those that its help shows", "none", see
    if refused is not None:
        what, given = refused.shown, _given(refused.shown, words)
        want, fix = ("given", see) if given is None else _wanted(refused, given)
        got = "none" if given is None else repr(given)
    elif unknown in options:
        what, flag = unknown, options[unknown].kind is bool
        want, given = f"given with{'out' * flag} a value", _given(unknown, words)
        got = "none" if given is None else repr(given)
    elif unknown is not None:
        what, want, got = "options", f"of {', '.join(options)}", repr(unknown)
        fix = meant(unknown, list(options)) or see
    elif error.ctx is not None:
        _, extra, _ = error.ctx.command.make_parser(error.ctx).parse_args(list(words))
        got = repr(" ".join(extra))
    return str(InputError(name, what, want=want, got=got, fix=fix))


def _given(option: str, words: Sequence[str]) -> str | None:
    """What was typed as the value of an option; None where nothing was."""
    for i, word in enumerate(words):
        if word.startswith(f"{option}="):
            return word.removeprefix(f"{option}=")
        if word == option and i + 1 < len(words):
            return words[i + 1]
    return None


def _wanted(parameter: _Parameter, given: str) -> tuple[str, str]:
    """What an option takes, and what may be meant."""
    if get_origin(parameter.kind) is Literal:
        among = get_args(parameter.kind)
        return f"one of {', '.join(among)}", meant(given, among)
    if parameter.kind is not int:  # typer looks whether a path that is there can be read
        return "a path that this user may read", ""
    low, high = parameter.declared.min, parameter.declared.max
    if low is None or high is None:
        return f"a whole number{'' if low is None else f' of {low} or more'}", ""
    return f"a whole number from {low} to {high}", ""
