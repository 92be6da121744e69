"""envoy/README.md mentions all that `wavegate envoy-config` emits, and the names Envoy and gateway share."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from ext_proc import protocol_names
from ext_proc.refusals import DROP_REASON_HEADER
from gateway.config import Config
from gateway.envoy_config import render
from gateway.envoy_local_replies import local_replies
from gateway.envoy_modes import EnvoyMode
from gateway.envoy_parts import Part
from gateway.envoy_route import RANK_HEADER
from tests.builders_envoy_files import BY_HAND, ENVOY, SAMPLES
from tests.builders_modes import connection_manager

REFERENCE = (ENVOY / "README.md").read_text()
Path = tuple[str, ...]

PLUMBING = {"typed_config", "typed_extension_config", "@type"}
"""What wraps every extension: explained once."""
DATA = {"json_format"}
"""Fields whose content is ours rather than Envoy's."""

GROUPS = [{"engine": "embedded", "name": "g0", "data_parallel_size": 2}]
EVERYTHING: Mapping[str, Any] = {
    "gateway": {
        "ext_proc_listen": "unix:/run/ext_proc.sock",
        "ext_proc_tls": {"cert": "/g/cert.pem", "key": "/g/key.pem", "client_ca": "/g/ca.pem"},
        "sessions": {"header": "x-chat"},
    },
    "envoy": {
        "standby_gateways": ["10.0.0.2:9002"],
        "ext_proc_tls": {
            "ca": "/e/ca.pem",
            "server_names": ["gateway.example", "10.0.0.2"],
            "cert": "/e/cert.pem",
            "key": "/e/key.pem",
        },
    },
}


def rendered(mode: EnvoyMode, options: Mapping[str, Any]) -> Any:
    """The configuration of two ranks in this mode."""
    envoy = {**options.get("envoy", {}), "mode": mode}
    return render(Config.model_validate({"groups": GROUPS, **options, "envoy": envoy}))


def all_rendered() -> Iterator[Any]:
    """Every mode, with no option and with all of them."""
    for mode in EnvoyMode:
        yield rendered(mode, {})
        yield rendered(mode, EVERYTHING)


def fields(value: Any, path: Path = ()) -> Iterator[Path]:
    """The path of every field that holds a value, without what wraps extensions."""
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            if key == "name" and str(inner).startswith("envoy."):
                continue  # of an extension: see `names_of_extensions`
            if key in DATA:
                yield (*path, key)
            else:
                yield from fields(inner, path if key in PLUMBING else (*path, *key.split(".")))
    elif isinstance(value, Sequence) and not isinstance(value, str) and value:
        for inner in value:
            yield from fields(inner, path)
    else:
        yield path


def mentioned(text: str) -> set[Path]:
    """The names in `code spans`, as paths: `a.b` is (a, b)."""
    spans = re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    words = (word for span in spans for word in re.split(r"[^A-Za-z0-9_.-]+", span))
    return {tuple(word.split(".")) for word in words if word}


def unmentioned(paths: set[Path], text: str) -> set[str]:
    """Fields that the text does not mention: a name that stands in several places needs one before it."""
    parents = defaultdict(set)
    for path in paths:
        parents[path[-1]].add(path[-2:-1])
    by_name = defaultdict(list)
    for mention in mentioned(text):
        by_name[mention[-1]].append(mention)
    return {
        ".".join(path)
        for path in paths
        if not any(
            _is_within(mention, path) and (len(mention) > 1 or len(parents[path[-1]]) == 1)
            for mention in by_name[path[-1]]
        )
    }


def _is_within(mention: Path, path: Path) -> bool:
    """Whether the mention's names occur in the path, in order."""
    rest = iter(path)
    return all(name in rest for name in mention)


def names_of_extensions(value: Any) -> Iterator[str]:
    """Which of Envoy's extensions are used."""
    if isinstance(value, Mapping):
        if isinstance(name := value.get("name"), str) and name.startswith("envoy."):
            yield name
        for inner in value.values():
            yield from names_of_extensions(inner)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for inner in value:
            yield from names_of_extensions(inner)


def test_every_field_is_mentioned() -> None:
    emitted = {path for configuration in all_rendered() for path in fields(configuration)}
    assert unmentioned(emitted, REFERENCE) == set()


def test_a_new_field_would_be_missed() -> None:
    configuration = rendered(EnvoyMode.ONE_MESSAGE, {})
    configuration["static_resources"]["clusters"][0]["dns_lookup_family"] = "V4_ONLY"
    configuration["static_resources"]["clusters"][0]["metadata"] = {"interval": "1s"}
    assert unmentioned(set(fields(configuration)), REFERENCE) == {
        "static_resources.clusters.dns_lookup_family",
        "static_resources.clusters.metadata.interval",
    }


def test_every_extension_is_mentioned() -> None:
    used = {name for configuration in all_rendered() for name in names_of_extensions(configuration)}
    assert {name for name in used if f"`{name}`" not in REFERENCE} == set()


def test_every_key_of_the_access_log_is_explained() -> None:
    (log, _) = connection_manager(rendered(EnvoyMode.ONE_MESSAGE, {}))["access_log"]
    keys = log["typed_config"]["log_format"]["json_format"]
    section = REFERENCE.partition("### Its fields")[2].partition("\n#")[0]
    assert {key for key in keys if f"`{key}`" not in section} == set()


def test_every_flag_and_code_of_envoys_own_answers_is_mentioned() -> None:
    mappers: Any = local_replies(Config.model_validate({"groups": GROUPS}).envoy)["mappers"]
    codes = {one["body_format_override"]["json_format"]["error"]["code"] for one in mappers}
    flags = set(mappers[1]["filter"]["response_flag_filter"]["flags"])
    assert {flag for flag in flags if (flag,) not in mentioned(REFERENCE)} == set()
    assert {code for code in codes if (code,) not in mentioned(REFERENCE)} == set()


SHARED = {
    value
    for name, constant in vars(protocol_names).items()
    if name.isupper()
    for value in ([constant] if isinstance(constant, str) else constant)
}


@pytest.mark.parametrize("name", sorted({*SHARED, RANK_HEADER, DROP_REASON_HEADER, "x-data-parallel-rank"}))
def test_every_header_and_key_is_mentioned(name: str) -> None:
    section = REFERENCE.partition("## Headers and metadata")[2].partition("\n## ")[0]
    assert f"`{name}`" in section


@pytest.mark.parametrize("mode", EnvoyMode)
def test_every_mode_is_compared(mode: EnvoyMode) -> None:
    table = REFERENCE.partition("### What each sends and costs")[2].partition("\n|---")[0]
    assert f"`{mode}`" in table


def test_every_file_is_linked() -> None:
    files = {*SAMPLES, *(f"snippets/{part.value}.yaml" for part in Part), *(f"snippets/{n}" for n in BY_HAND)}
    assert {name for name in files if f"]({name})" not in REFERENCE} == set()


def test_its_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", REFERENCE):
        place, _, anchor = target.partition("#")
        assert not place or (ENVOY / place).exists(), target
        assert not anchor or anchor in _anchors(), target


def _anchors() -> set[str]:
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", REFERENCE, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^a-z0-9 _-]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_its_snippets_are_those_of_the_files() -> None:
    """What is quoted of the examples is there, line by line."""
    quoted = "".join(re.findall(r"```yaml\n(.*?)```", REFERENCE, flags=re.DOTALL))
    for name in ("listener-tls.yaml", "api-keys.yaml"):
        lines = (ENVOY / "snippets" / name).read_text().splitlines()
        kept = [one.strip().strip("- ") for one in lines if one.strip() and not one.strip().startswith("#")]
        missing = [
            line for line in kept if line not in quoted and "team-b" not in line and "-too" not in line
        ]
        assert missing == [], name


def test_tests_that_it_names_exist() -> None:
    tests = ENVOY.parent / "tests"
    folder = ""
    for named in re.findall(r"`((?:tests/[a-z0-9]+/)?test_[a-z_]+\.py)`", REFERENCE):
        path = named.removeprefix("tests/")
        folder = path.partition("/")[0] if "/" in path else folder
        assert (tests / folder / path.rpartition("/")[2]).exists(), named
