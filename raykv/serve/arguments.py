"""Arguments of the applications: what the `args` of a Serve configuration may say."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from raykv.base import deadlines
from raykv.base.errors import SettingError
from raykv.base.settings import load_settings
from raykv.serve.command import plan_serve

Name = Annotated[str, Field(min_length=1, pattern=r"^[\w.-]+$")]

_MAX_SHOWN = 80
"""Characters of a wrong value that an error shows."""


class Strict(BaseModel):
    """Arguments; an unknown one is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class RouterArguments(Strict):
    """Which replica a request goes to, see `raykv.serve.router.round_robin`.

    `policy`: "kv" asks RayKV where a prompt is, with `kwargs` as in `raykv.serve.router.settings`;
    "power_of_two" is Ray's default; "prefix" remembers texts (Ray's); "round_robin" takes turns; a
    class is any other request router by its import path, which gets `kwargs`.
    """

    policy: Literal["kv", "power_of_two", "prefix", "round_robin"] | str = "power_of_two"
    kwargs: dict[str, Any] = Field(default_factory=dict)


class ModelArguments(Strict):
    """A model and the replicas that serve it."""

    model: str
    """Its name, see `raykv.serve.models.find_model`; each replica looks for it on its node."""
    name: Name | None = None
    """Name of the deployment. Default: the last part of the model."""
    engine_args: dict[str, Any] = Field(default_factory=dict)
    """Options of `vllm serve` by name, underscores for hyphens: `max_model_len: 32768`."""
    raykv: dict[str, Any] | None = Field(default_factory=dict)
    """Settings of RayKV; `null` serves without it."""
    deployment: dict[str, Any] = Field(default_factory=dict)
    """Options of the Serve deployment: `num_replicas`, `autoscaling_config`, ..."""
    router: RouterArguments = Field(default_factory=RouterArguments)

    @property
    def deployment_name(self) -> str:
        """The name of its deployment."""
        return self.name or self.model.rstrip("/").rpartition("/")[2]

    @property
    def served_names(self) -> list[str]:
        """What requests call the model."""
        given = self.engine_args.get("served_model_name") or [self.model]
        return [given] if isinstance(given, str) else list(given)

    @model_validator(mode="after")
    def _check_engine(self) -> ModelArguments:
        if not self.deployment_name:
            raise ValueError("`model` has no last part to name the deployment after: give `name`")
        if "name" in self.deployment:
            raise ValueError("`name` belongs beside `deployment`, not in it")
        try:
            load_settings(plan_of(self, ray_address=None).transfer["kv_connector_extra_config"])
        except SettingError as error:
            raise ValueError(str(error)) from error
        return self


class IngressArguments(Strict):
    """What takes the HTTP requests in front of the replicas."""

    deployment: dict[str, Any] = Field(default_factory=dict)
    max_body_bytes: int = Field(default=64 << 20, gt=0)
    """The ingress refuses a longer request with 413."""
    attempts: int = Field(default=2, ge=1)
    """How many replicas may die while serving one request: it may be what kills them."""
    replica_wait_s: float = Field(default=deadlines.REPLICA_WAIT_S, gt=0, le=86_400)
    """A request that no replica takes within this time (all are busy, dead or not started yet)
    gets 503 and `Retry-After`. If `min_replicas` is 0, set more than a replica takes to start. This
    does not limit how long an answer takes."""
    max_held_bytes: int = Field(default=1 << 30, gt=0)
    """Of all requests in one ingress replica; it refuses any beyond this with 503."""


class ApplicationArguments(Strict):
    """Arguments of an application: `models`, or one model's arguments beside `ingress`."""

    ingress: IngressArguments = Field(default_factory=IngressArguments)

    @property
    def _named(self) -> Sequence[ModelArguments]:
        """Each model, with its names."""
        raise NotImplementedError

    @model_validator(mode="before")
    @classmethod
    def _one_model(cls, given: Any) -> Any:
        """One model goes into a list like several."""
        if not isinstance(given, Mapping) or "models" in given:
            return given
        model = {key: value for key, value in given.items() if key != "ingress"}
        return {"models": [model], **{k: v for k, v in given.items() if k == "ingress"}}

    @model_validator(mode="after")
    def _distinct(self) -> ApplicationArguments:
        for what, names in (
            ("deployment", [model.deployment_name for model in self._named]),
            ("served model", [name for model in self._named for name in model.served_names]),
        ):
            for name in names:
                if names.count(name) > 1:
                    raise ValueError(f"two {what}s are called {name!r}: rename one of them")
        return self


class AppArguments(ApplicationArguments):
    """Arguments of `build_app`."""

    models: list[ModelArguments] = Field(min_length=1)

    @property
    def _named(self) -> Sequence[ModelArguments]:
        return self.models


_Arguments = TypeVar("_Arguments", bound=Strict)


def parse(kind: type[_Arguments], args: Mapping[str, Any]) -> _Arguments:
    """`args` as read from YAML.

    Raises:
        SettingError: naming each place that is wrong.
    """
    try:
        return kind.model_validate(args)
    except ValidationError as error:
        wrong = [f"{_place(each['loc'], args)}: {_complaint(each)}" for each in error.errors()]
        raise SettingError(f"arguments of the application: {'; '.join(wrong)}") from error


def _place(loc: tuple[int | str, ...], args: Any) -> str:
    """Where a mistake is in the user's text, in which one model needs no list."""
    if isinstance(args, Mapping) and "models" not in args and loc[:2] == ("models", 0):
        loc = loc[2:]
    return ".".join(map(str, loc)) or "args"


def _complaint(error: Any) -> str:
    value = repr(error["input"])
    shown = value if len(value) <= _MAX_SHOWN else f"{value[:_MAX_SHOWN]}..."
    match error["type"]:
        case "missing":
            return "is needed"
        case "extra_forbidden":
            return "is an unknown argument; raykv.serve.arguments lists the known ones"
        case "value_error":
            return str(error["ctx"]["error"])
        case _:
            message = error["msg"]
            return f"{message[0].lower()}{message[1:]}, not {shown}"


def plan_of(model: ModelArguments, ray_address: str | None, **settings: str) -> Any:
    """What vLLM is started with; see `raykv.serve.command.ServePlan`.

    `settings` are those settings of RayKV that only the replica knows.
    """
    engine_args = dict(model.engine_args)
    transfer = engine_args.pop("kv_transfer_config", None) or {}
    if isinstance(transfer, Mapping):
        own = dict(transfer.get("kv_connector_extra_config") or {})
        extra = {**own, **(model.raykv or {}), **settings}
        transfer = {**transfer, "kv_connector_extra_config": extra}
    engine_args["kv_transfer_config"] = transfer
    return plan_serve(model.model, to_flags(engine_args), ray_address=ray_address, pool_bytes=None)


def complaints(error: ValidationError) -> str:
    """Each place, and what is wrong with it."""
    return "; ".join(
        f"{'.'.join(map(str, each['loc'])) or 'args'}: {each['msg']}" for each in error.errors()
    )


def to_flags(options: Mapping[str, Any]) -> list[str]:
    """Flags of `vllm serve` for options named with underscores.

    A true value is a flag alone, a false one its `--no-` form; a list gives several values, a
    mapping is JSON, and None leaves the option out.

    Raises:
        SettingError: a name or a value is invalid.
    """
    flags: list[str] = []
    for name, value in options.items():
        if not name.replace("_", "").replace("-", "").isalnum():
            raise SettingError(f"engine_args: {name!r} is not an option of vLLM")
        flag = f"--{name.replace('_', '-')}"
        if value is None:
            continue
        if value is True:
            flags.append(flag)
        elif value is False:
            flags.append(f"--no-{flag[2:]}")
        elif isinstance(value, Mapping):
            flags += [flag, json.dumps(value)]
        elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
            flags += [flag, *map(_text, value)]
        else:
            # One word, so that a value may begin with a hyphen.
            flags.append(f"{flag}={_text(value)}")
    return flags


def _text(value: Any) -> str:
    if isinstance(value, str | int | float):
        return str(value)
    raise SettingError(f"engine_args: {value!r} is an invalid value for an option of vLLM")
