"""Renders Envoy's whole configuration from ours.

Must never start Envoy, touch files or read anything but `Config`: the same file always renders the same.
Facts about Envoy stated in comments here and in the other modules named `envoy_…` were observed on Envoy
1.40.0 and are kept true by tests/e2e. envoy/README.md explains every field.
"""

from __future__ import annotations

import yaml

from gateway.config import Config
from gateway.envoy_gateways import ext_proc_cluster
from gateway.envoy_listener import openai_listener
from gateway.envoy_overload import overload_manager
from gateway.envoy_ranks import ranks_cluster
from gateway.envoy_types import Json, ip_address


def render(config: Config) -> dict[str, Json]:
    """Envoy's bootstrap configuration as plain data, ready for JSON or YAML."""
    envoy = config.envoy
    return {
        "node": {"id": "wavegate", "cluster": "wavegate"},
        "admin": {"address": ip_address(envoy.admin_host, envoy.admin_port)},
        "static_resources": {
            "listeners": [openai_listener(envoy, config.gateway.head_names)],
            "clusters": [ranks_cluster(config), ext_proc_cluster(config)],
        },
        "overload_manager": overload_manager(envoy),
    }


def to_yaml(rendered: Json) -> str:
    """The configuration as YAML, in the order it was rendered."""
    return yaml.safe_dump(rendered, sort_keys=False, allow_unicode=True, width=120)
