"""The options of the backend: names, values, defaults, where they come from, and the errors that explain a wrong one.

Order of precedence: `DSV4_OPTIONS` in the environment, then `options=` of `torch.compile`, then the default. What the
environment says wins even where it contradicts the call: whoever sets `DSV4_OPTIONS='{"cudagraphs": "off"}'` to find a
fault may be unable to edit the program that asks for `capture_sizes`.
"""

import dataclasses
import difflib
import hashlib
import inspect
import json
import os
import pickle
import uuid
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

__all__ = ["DISABLE_VARIABLE", "OPTIONS_VARIABLE", "OptionError", "Options", "disabled"]

OPTIONS_VARIABLE = "DSV4_OPTIONS"
DISABLE_VARIABLE = "DSV4_DISABLE"

MAX_STREAMS = 16
"""PyTorch hands out 32 streams per device and priority; half of them are left to everybody else in the process."""

CHOICES: dict[str, tuple[str, ...]] = {
    "projections": ("auto", "pack", "streams", "serial", "off"),
    "attention": ("auto", "off"),
    "mhc": ("auto", "tilelang", "triton", "reference", "off"),
    "cudagraphs": ("auto", "off", "full", "piecewise", "full_and_piecewise"),
    "compiler": ("inductor", "eager"),
}

_OF_AUTO = ("cuda", "cpp")
"""Families of mHC kernels that only `auto` takes."""
_SYNONYMS = {
    "off": ("none", "no", "false", "0", "disabled"),  # Dynamo and YAML readers turn a bare `off` into False
    "auto": ("on", "yes", "true", "1", "default", "measured"),
    "reference": ("torch", "pytorch", "eager"),
    "pack": ("fused", "merged"),
    "streams": ("parallel",),
    "eager": ("none", "off"),
}
"""Words that people use for a value."""

_WITHOUT_EFFECT_ON_CODE = frozenset({"dump_dir", "verify", "strict", "capture_memory"})
_SIMILAR = 0.6
"""Similarity below which the nearest name is hardly what was meant, and the message lists them all."""

_UNIDENTIFIED = uuid.uuid4().hex
"""Stands for a value that has no identity outside this process, so that no other process takes its code for its own."""


class OptionError(ValueError):
    """An option that cannot be used. The message is one sentence: what was asked, what was found, what is valid."""


@dataclasses.dataclass(frozen=True)
class Options:
    """How a graph is compiled. Every instance is valid: a wrong value raises `OptionError` when it is made.

    Instances compare equal when they ask for the same, whoever set it; they are hashable and can be pickled.
    """

    projections: str = "auto"
    """How projections on one input run: `auto` (measured), `pack`, `streams`, `serial`, `off`."""
    num_streams: int = 3
    """Auxiliary streams per device, 0 to 16, shared by every compiled graph and model in the process."""
    stream_max_tokens: int = 1024
    """Token count above which nothing leaves the main stream; 0 turns side streams off."""
    mhc: str = "auto"
    """Kernel family for the mHC arithmetic: `auto`, `tilelang`, `triton`, `reference`, `off`."""
    attention: str = "auto"
    """What heads share is multiplied without a copy for each of them: `auto`, `off`."""
    cudagraphs: str = "auto"
    """Capture mode: `auto`, `off`, `full`, `piecewise`, `full_and_piecewise`."""
    capture_sizes: tuple[int, ...] | None = None
    """Token counts captured ahead, ascending and without repeats; `None` captures a size when it is first seen."""
    capture_memory: int | None = None
    """Bytes that the CUDA graphs of the process may take; `None` sets no limit."""
    split_ops: tuple[str, ...] = ()
    """Extra operators to cut the graph at, by qualified name (`vllm::unified_attention`)."""
    branches: bool = False
    """Run independent chains of a piece on side streams where an estimate says that it pays."""
    deterministic: bool = False
    """The results of a row do not depend on the other rows of the batch."""
    verify: int = 0
    """How many first calls are compared with the uncompiled graph."""
    strict: bool = False
    """Raise when a requested optimisation matched nothing or fell back."""
    dump_dir: str | None = None
    """Folder for every graph before and after every pass."""
    compiler: str = "inductor"
    """`inductor`, or `eager` to run the rewritten graph as it is."""
    inductor: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    """Passed on to Inductor unchanged; a copy of what was given, not to be modified."""
    explicit: frozenset[str] = dataclasses.field(default=frozenset(), compare=False, repr=False, kw_only=True)
    """Names of the options that somebody set, be it to the default. Without effect on the compiled code."""

    def __post_init__(self) -> None:
        for name in NAMES:
            object.__setattr__(self, name, _CHECKS[name](name, getattr(self, name)))
        changed = {name for name, default in DEFAULTS.items() if getattr(self, name) != default}
        object.__setattr__(self, "explicit", frozenset(self.explicit) | changed)
        for contradiction in CONTRADICTIONS:
            if contradiction.holds(self):
                raise OptionError(contradiction.message(self))

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any] | None) -> "Options":
        """Options from `options=` of `torch.compile`; `None` and `{}` are the defaults.

        Raises:
            OptionError: an unknown option, a wrong type or value, or two options that contradict each other.
        """
        values = _known(mapping, "options=")
        return cls(**values, explicit=frozenset(values))

    @classmethod
    def resolve(cls, mapping: Mapping[str, Any] | None = None, environ: Mapping[str, str] | None = None) -> "Options":
        """Options of a call with what `DSV4_OPTIONS` in the environment overrides.

        An option of the call that contradicts one from the environment goes back to its default, with a warning.

        Args:
            mapping: `options=` of `torch.compile`.
            environ: the environment, `os.environ` when left out.

        Raises:
            OptionError: as `from_mapping`, for either source, or `DSV4_OPTIONS` is not a JSON object.
        """
        call = _known(mapping, "options=")
        environment = _from_environment(os.environ if environ is None else environ)
        if not environment:
            return cls(**call, explicit=frozenset(call))
        cls(**call)
        cls(**environment)
        for contradiction in CONTRADICTIONS:
            if contradiction.holds(SimpleNamespace(**{**DEFAULTS, **call, **environment})):
                # Each source alone is consistent, so one of the two options is the call's and only the call's.
                name = next(option for option in contradiction.options if option in call and option not in environment)
                _warn_overridden(name, call.pop(name), contradiction)
        values = {**call, **environment}
        return cls(**values, explicit=frozenset(values))

    def to_dict(self) -> dict[str, Any]:
        """Every option and its value, JSON-safe; a value of `inductor` that is not becomes text."""
        values: dict[str, Any] = {name: getattr(self, name) for name in NAMES}
        values["capture_sizes"] = None if self.capture_sizes is None else list(self.capture_sizes)
        values["split_ops"] = list(self.split_ops)
        values["inductor"] = {name: _json_safe(value) for name, value in self.inductor.items()}
        return values

    def fingerprint(self) -> str:
        """Text that two option sets share only if they lead to the same code, the same in every process.

        Part of every cache key. `dump_dir`, `verify` and `strict` do not count. A value of `inductor` counts by its
        `uuid()` if it has one, else by its pickle; one with neither differs in every process and every instance.
        """
        values: dict[str, Any] = {name: getattr(self, name) for name in NAMES if name not in _WITHOUT_EFFECT_ON_CODE}
        values["inductor"] = {name: _identity(value) for name, value in self.inductor.items()}
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


NAMES: tuple[str, ...] = tuple(field.name for field in dataclasses.fields(Options) if field.name != "explicit")
DEFAULTS: dict[str, Any] = {
    field.name: {} if field.name == "inductor" else field.default
    for field in dataclasses.fields(Options)
    if field.name in NAMES
}


def disabled(environ: Mapping[str, str] | None = None) -> bool:
    """Whether `DSV4_DISABLE` makes the backend plain Inductor.

    Raises:
        OptionError: the variable is neither 1, true, yes, on nor 0, false, no, off or empty (in any case).
    """
    text = (os.environ if environ is None else environ).get(DISABLE_VARIABLE, "")
    word = text.strip().lower()
    if word in {"1", "true", "yes", "on"}:
        return True
    if word in {"", "0", "false", "no", "off"}:
        return False
    nearest = _nearest(word, ("1", "true", "yes", "on", "0", "false", "no", "off"))
    raise OptionError(
        f"The environment variable {DISABLE_VARIABLE} must be 1, true, yes or on, or 0, false, no, off or empty, "
        f"and it is {text!r}; the nearest is {nearest!r}."
    )


# ---------------------------------------------------------------------------------------------------- contradictions


class _Contradiction(NamedTuple):
    """Options that ask for opposite things."""

    options: tuple[str, str]
    holds: Callable[[Any], bool]
    advice: str

    def message(self, options: Any) -> str:
        first, second = (f"{name}={getattr(options, name)!r}" for name in self.options)
        return f"The options {first} and {second} contradict each other: {self.advice}."


CONTRADICTIONS = (
    _Contradiction(
        ("projections", "num_streams"),
        lambda options: options.projections == "streams" and options.num_streams == 0,
        'without a stream there is nothing to run projections on; use num_streams=3 or projections="serial"',
    ),
    _Contradiction(
        ("projections", "stream_max_tokens"),
        lambda options: options.projections == "streams" and options.stream_max_tokens == 0,
        'at stream_max_tokens=0 nothing leaves the main stream; use stream_max_tokens=1024 or projections="serial"',
    ),
    _Contradiction(
        ("capture_sizes", "cudagraphs"),
        lambda options: options.capture_sizes is not None and options.cudagraphs == "off",
        'nothing is captured when cudagraphs is off; use cudagraphs="auto" or capture_sizes=None',
    ),
    _Contradiction(
        ("capture_memory", "cudagraphs"),
        lambda options: options.capture_memory is not None and options.cudagraphs == "off",
        'nothing is captured when cudagraphs is off; use cudagraphs="auto" or capture_memory=None',
    ),
    _Contradiction(
        ("inductor", "compiler"),
        lambda options: bool(options.inductor) and options.compiler == "eager",
        'Inductor does not run under the eager compiler; use compiler="inductor" or inductor={}',
    ),
)


def _warn_overridden(name: str, value: Any, contradiction: _Contradiction) -> None:
    other = next(option for option in contradiction.options if option != name)
    warnings.warn(
        f"{OPTIONS_VARIABLE} sets {other}, so {name}={value!r} of the call is not used ({contradiction.advice}).",
        stacklevel=3,
    )


# --------------------------------------------------------------------------------------------- where values come from


def _known(mapping: Mapping[str, Any] | None, source: str) -> dict[str, Any]:
    """`mapping` as a dict, with every name known."""
    if mapping is None:
        return {}
    if not isinstance(mapping, Mapping):
        raise OptionError(
            f"{source} must be a mapping from option names to values, and it is {_found(mapping)}; "
            'an example is {"projections": "auto"}.'
        )
    for name in mapping:
        if name not in NAMES:
            raise OptionError(_unknown(name, source))
    return dict(mapping)


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    text = environ.get(OPTIONS_VARIABLE, "")
    if not text.strip():
        return {}
    try:
        parsed = json.loads(text)
    except json.JSONDecodeError as error:
        raise OptionError(
            f"The environment variable {OPTIONS_VARIABLE} must be a JSON object, and {text!r} is not JSON "
            f'({error}); an example is \'{{"mhc": "triton"}}\'.'
        ) from error
    if not isinstance(parsed, dict):
        raise OptionError(
            f"The environment variable {OPTIONS_VARIABLE} must be a JSON object, and it holds {_found(parsed)}; "
            'an example is \'{"mhc": "triton"}\'.'
        )
    return _known(parsed, OPTIONS_VARIABLE)


def _unknown(name: object, source: str) -> str:
    nearest = _nearest(str(name), NAMES)
    sentence = f"{source} has the unknown option {name!r}; the nearest one is {nearest!r}"
    if difflib.SequenceMatcher(None, str(name).lower(), nearest).ratio() < _SIMILAR:
        sentence += f" (all are: {', '.join(NAMES)}; options of Inductor go into 'inductor')"
    return sentence + "."


def _nearest(word: str, candidates: Sequence[str]) -> str:
    return difflib.get_close_matches(word.lower(), candidates, n=1, cutoff=0.0)[0]


def _found(value: object) -> str:
    return "None" if value is None else f"the {type(value).__name__} {value!r}"


# ------------------------------------------------------------------------------------- one check per kind of option


def _choice(name: str, value: Any) -> str:
    choices = CHOICES[name]
    if isinstance(value, str) and value in choices:
        return str(value)
    listed = ", ".join(repr(choice) for choice in choices)
    raise OptionError(f"Option {name!r} must be one of {listed}, and it is {_found(value)}{_meant(name, value)}.")


def _meant(name: str, value: Any) -> str:
    """The end of a sentence that lists all: the one of the same meaning, beginning or letters, where there is one."""
    choices, word = CHOICES[name], str(value).lower()
    if name == "mhc" and word in _OF_AUTO:
        return f"; the nearest is 'auto', which takes {word!r} where that is the best, and it cannot be asked for"
    meant = [choice for choice, words in _SYNONYMS.items() if choice in choices and word in words]
    begun = [choice for choice in choices if word and choice.startswith(word)]
    alike = difflib.get_close_matches(word, choices, n=1, cutoff=_SIMILAR)
    return f"; the nearest is {near!r}" if (near := next(iter(meant + begun + alike), None)) else ""


def _count(name: str, value: Any) -> int:
    limit = MAX_STREAMS if name == "num_streams" else None
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0 and (limit is None or value <= limit):
        return int(value)
    span = "an int of at least 0" if limit is None else f"an int from 0 to {limit}"
    nearest = DEFAULTS[name]
    number = int(value) if isinstance(value, str) and value.strip().isdecimal() else value
    if isinstance(number, int | float) and not isinstance(number, bool) and number == number:
        nearest = int(max(0, min(number, 2**31 if limit is None else limit)))
    raise OptionError(f"Option {name!r} must be {span}, and it is {_found(value)}; the nearest is {nearest}.")


def _switch(name: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    nearest = str(value).strip().lower() in {"1", "true", "yes", "on"}
    raise OptionError(f"Option {name!r} must be True or False, and it is {_found(value)}; the nearest is {nearest}.")


def _sizes(name: str, value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    if isinstance(value, list | tuple | range):
        wrong = [size for size in value if not isinstance(size, int) or isinstance(size, bool) or size < 1]
        if value and not wrong:
            return tuple(sorted(set(value)))
        found = f"{value!r} holds {_found(wrong[0])}" if wrong else "it is empty"
        valid = sorted({size for size in value if size not in wrong}) or None
    else:
        found = f"it is {_found(value)}"
        valid = [value] if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None
    raise OptionError(
        f"Option {name!r} must be None or a list of token counts of at least 1, and {found}; the nearest is {valid}."
    )


def _bytes(name: str, value: Any) -> int | None:
    if value is None or (isinstance(value, int) and not isinstance(value, bool) and value > 0):
        return value
    nearest = 1 if isinstance(value, int) and not isinstance(value, bool) else None
    if isinstance(value, float) and value > 0 and value == value and value != float("inf"):
        nearest = max(1, int(value))
    raise OptionError(
        f"Option {name!r} must be None or a number of bytes of at least 1, and it is {_found(value)}; "
        f"the nearest is {nearest}."
    )


def _operators(name: str, value: Any) -> tuple[str, ...]:
    rule = f"Option {name!r} must be a list of qualified operator names such as 'vllm::unified_attention'"
    if isinstance(value, str) or not isinstance(value, list | tuple):
        nearest = [_nearest_operator(value)] if isinstance(value, str) or _is_operator(value) else []
        raise OptionError(f"{rule}, and it is {_found(value)}; the nearest is {nearest}.")
    for operator in value:
        if not isinstance(operator, str):
            nearest_name = _nearest_operator(operator)
            raise OptionError(f"{rule}, and {value!r} holds {_found(operator)}; the nearest is {nearest_name!r}.")
        if operator != _qualified(operator):
            raise OptionError(f"{rule}, and it holds {operator!r}; the nearest is {_qualified(operator)!r}.")
    return tuple(dict.fromkeys(value))


def _is_operator(value: Any) -> bool:
    """Whether it is one of torch's, which is not imported here."""
    return type(value).__name__.startswith("OpOverload")


def _nearest_operator(value: Any) -> str:
    return _qualified(str(value)) if isinstance(value, str) or _is_operator(value) else str(value)


def _qualified(name: str) -> str:
    """`name` as `namespace::operator`; in Python people write `torch.ops.vllm.unified_attention.default` as well."""
    namespace, separator, rest = name.partition("::")
    if namespace and separator and rest:
        return name
    words = name.removeprefix("torch.ops.").replace("::", ".").strip(".").split(".")
    return "::".join((words[0], ".".join(words[1:]))) if len(words) > 1 else f"aten::{words[0]}"


def _folder(name: str, value: Any) -> str | None:
    if value is None:
        return None
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if isinstance(path, str) and path:
        return path
    nearest = "'.'" if value == "" else "None"
    raise OptionError(
        f"Option {name!r} must be None or a path (str or os.PathLike), and it is {_found(value)}; "
        f"the nearest is {nearest}."
    )


def _settings(name: str, value: Any) -> dict[str, Any]:
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return dict(value)
    found = f"it is {_found(value)}"
    if isinstance(value, Mapping):
        found = f"it has {_found(next(key for key in value if not isinstance(key, str)))} as a name"
    raise OptionError(
        f"Option {name!r} must be a mapping from Inductor's setting names to values, and {found}; the nearest is {{}}."
    )


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "projections": _choice,
    "num_streams": _count,
    "stream_max_tokens": _count,
    "mhc": _choice,
    "attention": _choice,
    "cudagraphs": _choice,
    "capture_sizes": _sizes,
    "capture_memory": _bytes,
    "split_ops": _operators,
    "branches": _switch,
    "deterministic": _switch,
    "verify": _count,
    "strict": _switch,
    "dump_dir": _folder,
    "compiler": _choice,
    "inductor": _settings,
}


# ------------------------------------------------------------------------------------------- values of other people


def _json_safe(value: Any) -> Any:
    try:
        return json.loads(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError):
        return repr(value)


def _identity(value: Any) -> Any:
    """What stands for a value of `inductor` in a fingerprint, see `Options.fingerprint`."""
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if value is None or isinstance(value, str | bool | int | float):
        return [kind, repr(value)]
    if isinstance(value, list | tuple):
        return [kind, [_identity(item) for item in value]]
    if isinstance(value, Mapping):
        return [kind, sorted((json.dumps(_identity(key)), json.dumps(_identity(item))) for key, item in value.items())]
    try:
        if not isinstance(value, type) and callable(getattr(value, "uuid", None)):
            token = value.uuid()
            # A pass whose uuid is None asks not to be cached.
            return [kind, "uuid", repr(token)] if token is not None else [kind, _UNIDENTIFIED, id(value)]
        content = hashlib.sha256(pickle.dumps(value)).hexdigest()
        # A pickled function or class is only its name.
        named = inspect.isfunction(value) or inspect.ismethod(value) or inspect.isclass(value)
        source = inspect.getsource(value) if named else ""
    except Exception:
        return [kind, _UNIDENTIFIED, id(value)]
    return [kind, "pickle", content, source]
