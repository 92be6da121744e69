"""A Kubernetes manifest that runs the ranks of a configuration, a pod for each machine. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

IMAGE = "vllm/vllm-openai:v0.32.0"
START_LIMIT_S = 3600


class _Script(str):
    """Text that is written down line by line."""


class _Dumper(yaml.SafeDumper):
    """Writes scripts as literal blocks, and equal parts each time in full."""

    def ignore_aliases(self, _data: Any) -> bool:
        return True


_Dumper.add_representer(
    _Script, lambda dumper, text: dumper.represent_scalar("tag:yaml.org,2002:str", str(text), style="|")
)


def manifest(name: str, *, replicas: int, gpus: int, ports: Sequence[int], script: str) -> str:
    """A headless service, by whose name pods find each other before they are ready, and a StatefulSet.

    Args:
        name: of both.
        replicas: machines.
        gpus: of each pod; 0: none.
        ports: of the ranks of each pod.
        script: run by bash in each pod, which knows its own address as POD_IP.
    """
    labels = {"app": name}
    container: dict[str, Any] = {
        "name": "ranks",
        "image": IMAGE,
        "command": ["bash", "-c"],
        "args": [_Script(script)],
        "env": [{"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}}],
        "ports": [{"containerPort": port} for port in ports],
        # No rank answers before the whole group is ready, so any rank of the pod speaks for all.
        "startupProbe": _probe(ports[0], period_s=10, failures=START_LIMIT_S // 10),
        "readinessProbe": _probe(ports[0], period_s=5, failures=3),
        "volumeMounts": [{"name": "shm", "mountPath": "/dev/shm"}],
    }
    if gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": gpus}}
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": labels,
            "ports": [{"name": f"rank-{port}", "port": port} for port in ports],
        },
    }
    stateful_set = {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "metadata": {"name": name},
        "spec": {
            "serviceName": name,
            "replicas": replicas,
            "podManagementPolicy": "Parallel",
            "selector": {"matchLabels": labels},
            "template": {
                "metadata": {"labels": labels},
                "spec": {
                    "containers": [container],
                    "volumes": [{"name": "shm", "emptyDir": {"medium": "Memory"}}],
                },
            },
        },
    }
    documents = (
        yaml.dump(part, Dumper=_Dumper, sort_keys=False, width=10_000) for part in (service, stateful_set)
    )
    return "---\n".join(documents)


def _probe(port: int, *, period_s: int, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": "/health", "port": port},
        "periodSeconds": period_s,
        "failureThreshold": failures,
    }
