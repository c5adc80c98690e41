"""What is wrong with a configuration: collected, then reported all at once."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence


@dataclasses.dataclass(frozen=True)
class Problem:
    """One thing to correct.

    Attributes:
        place: where it was said: `file:line`, or the command-line word; a dotted key where neither is known.
        message: what is wrong with the value received, what is allowed or nearest, what to do.
        keys: dotted keys that it is about: of a refused value its own (what it should be is not known), of a rule
            all that it compared. A rule is not told of values that are not known.
        missing: whether it is only that a required value is still to be given.
    """

    place: str
    message: str
    keys: tuple[str, ...] = ()
    missing: bool = False

    def __str__(self) -> str:
        return f"{self.place}: {self.message}"


class ConfigError(ValueError):
    """The configuration is refused; nothing was started."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        assert problems
        self.problems = tuple(dict.fromkeys(problems))
        super().__init__("\n".join(str(p) for p in self.problems))


def located(problem: Problem, sources: Mapping[str, str]) -> Problem:
    """A problem whose place is a dotted key, placed where that key was set; the message begins with the key."""
    key, message = problem.place, problem.message
    message = message if message.startswith(key) else f"{key}: {message}"
    return dataclasses.replace(problem, place=sources.get(key, key), message=message)


@contextlib.contextmanager
def refused_at(place: str) -> Iterator[None]:
    """What fails inside is a problem of what the user asked for at a place: nothing was started."""
    try:
        yield
    except ConfigError:
        raise
    except (ValueError, OSError) as error:
        raise ConfigError([Problem(place, str(error))]) from error
