"""Words of the commands about a run folder become their settings, or all that is wrong is told at once."""

import pytest

from tpu_train.config.command_settings import ExportSettings, GenerateSettings
from tpu_train.config.problems import ConfigError
from tpu_train.config.settings import parse_settings


def problems(kind: type, *words: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_settings(kind, words)
    return str(caught.value).splitlines()


def test_words_and_defaults_make_settings() -> None:
    parsed = parse_settings(GenerateSettings, ["run_dir=r", "prompt='a, b=c'", "max_tokens=1e2", "top_p=1"])
    assert parsed == GenerateSettings(run_dir="r", prompt="a, b=c", max_tokens=100, top_p=1.0)


def test_everything_wrong_is_told_in_the_order_of_the_words() -> None:
    told = problems(GenerateSettings, "top_p=0", "promt=x", "seed=-1", "prompt=a,b", "temperature=hot", "max_tokens")
    assert [line.partition(";")[0] for line in told] == [
        "command line 'top_p=0': top_p is 0, expected a number above 0 and up to 1",
        "command line 'promt=x': there is no key 'promt'",
        "command line 'seed=-1': seed is -1, expected a number from 0 up to, not including, 2147483648",
        "command line 'prompt=a,b': a value with a comma needs quotes: \"prompt='a, b'\"",
        "command line 'temperature=hot': temperature is 'hot', expected a number",
        told[5].partition(";")[0],
        "command line: run_dir is required and has no value",
    ]
    assert told[5].startswith("command line 'max_tokens': not an override")


def test_key_given_twice_is_refused() -> None:
    (only,) = problems(ExportSettings, "run_dir=a", "hf_dir=b", "run_dir=c")
    assert only == "command line 'run_dir=c': run_dir is given twice, also by command line 'run_dir=a'; keep one"
