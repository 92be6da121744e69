"""A configuration becomes a running deployment: check, write, plan, supervise.

The order of start is ranks, gateway, Envoy; the drain before the stop is Envoy's, or that of the groups where
only ranks run here.
"""

from __future__ import annotations

import yaml

from gateway import envoy_admin
from gateway.admin_token import AdminTokenError, read_token
from gateway.config import Config, group_listeners
from gateway.config_groups import EmbeddedGroup, VllmGroup
from gateway.config_types import Listener, endpoint
from gateway.envoy_config import render, to_yaml
from gateway.envoy_process import EnvoyError, locate
from gateway.gateway_groups import GatewayGroups
from gateway.group_keeper import GroupKeeper
from gateway.plan import node_of, plan, rank_units, reachable
from gateway.ports import port_problems
from gateway.progress import Progress
from gateway.run_folder import RunFolder
from gateway.supervisor import MakeGroupKeeper, Supervisor, Work
from gateway.unit import Unit, UnitFailed


class StartFailed(Exception):
    """The deployment did not start or could not go on, and nothing of it is left. The message says why."""


async def run_deployment(config: Config, folder: RunFolder, progress: Progress, work: Work) -> None:
    """Start what the configuration asks for, do `work` while it is kept running, drain and stop it.

    Raises:
        StartFailed: a port is taken, Envoy or the admin API's secret is missing, a process did not start, or
            every group was given up.
    """
    if problems := port_problems(config.listeners()):
        raise StartFailed("\n".join(problems))
    try:
        groups = _gateway_groups(config, gateway_url(config), "supervisor")
        planned = plan(config, folder, locate(config.envoy.binary))
        folder.write_config(yaml.safe_dump(config.model_dump(mode="json", by_alias=True), sort_keys=False))
        folder.write_envoy_config(to_yaml(render(config)))
        supervisor = Supervisor(
            planned.units,
            folder,
            progress,
            lambda: _drain(config, progress),
            _group_keepers(config, groups, progress),
            other_groups=len(config.groups) - len(planned.groups),
        )
        async with groups.talking():
            await supervisor.run(work)
    except (EnvoyError, UnitFailed, AdminTokenError) as error:
        raise StartFailed(str(error)) from None


async def run_ranks(
    config: Config, node: int | None, gateway: str, folder: RunFolder, progress: Progress, work: Work
) -> None:
    """Start the ranks of one machine, do `work` while they are kept running, drain and stop them.

    Args:
        config: with the kind of every model known.
        node: the machine's number among those that groups are spread over; `None` if there are none.
        gateway: base URL of the gateway's admin API, which is told when a group must get no requests.
        folder: where logs go.
        progress: told what happens.
        work: cancelled by a signal.

    Raises:
        StartFailed: a port is taken, the admin API's secret is missing, a process did not start, or every
            group was given up.
    """
    units = rank_units(config, node)
    if not units:
        raise StartFailed("the configuration has no ranks for this machine")
    if problems := port_problems(rank_listeners(config, node)):
        raise StartFailed("\n".join(problems))
    try:
        groups = _gateway_groups(config, gateway, "ranks" if node is None else f"ranks on node {node}")
    except AdminTokenError as error:
        raise StartFailed(str(error)) from None
    names = [unit.group.name for unit in units if unit.group is not None]
    supervisor = Supervisor(
        units,
        folder,
        progress,
        lambda: _drain_groups(config, names, groups, progress),
        _group_keepers(config, groups, progress),
    )
    try:
        async with groups.talking():
            await supervisor.run(work)
    except UnitFailed as error:
        raise StartFailed(str(error)) from None


def rank_listeners(config: Config, node: int | None) -> list[Listener]:
    """Every TCP address that the ranks of one machine listen on."""
    found: list[Listener] = []
    for position, group in enumerate(config.groups):
        path = f"groups[{position}]"
        if isinstance(group, EmbeddedGroup) and node in (None, 0):
            found += group_listeners(group, path)
        elif isinstance(group, VllmGroup) and (here := node_of(group, node)) is not None:
            found += group_listeners(group, path, here)
    return found


def gateway_url(config: Config) -> str:
    """Where the gateway's admin API is, seen from its own machine."""
    return f"http://{endpoint(reachable(config.gateway.admin_host), config.gateway.admin_port)}"


def _gateway_groups(config: Config, admin_url: str, holder: str) -> GatewayGroups:
    return GatewayGroups(admin_url, holder, read_token(config.gateway.admin_token_file))


def _group_keepers(config: Config, groups: GatewayGroups, progress: Progress) -> MakeGroupKeeper:
    def make(unit: Unit) -> GroupKeeper:
        return GroupKeeper(unit, groups, progress, config.supervision, config.gateway.drain_timeout_s)

    return make


async def _drain(config: Config, progress: Progress) -> None:
    admin_url = f"http://{endpoint(reachable(config.envoy.admin_host), config.envoy.admin_port)}"
    timeout_s = config.gateway.drain_timeout_s
    with progress.step("draining") as step:
        left = await envoy_admin.drain(
            admin_url, timeout_s, lambda active: step.show(f"requests under way: {active}")
        )
        step.done(f"{left} requests cut after {timeout_s:g} s" if left else "no request is under way")


async def _drain_groups(config: Config, names: list[str], groups: GatewayGroups, progress: Progress) -> None:
    timeout_s = config.gateway.drain_timeout_s
    with progress.step("draining") as step:
        for name in names:
            await groups.take_out(name, "its ranks are being stopped")
        left = [await groups.wait_until_idle(name, timeout_s) for name in names]
        cut = sum(count or 0 for count in left)
        if None in left:
            step.done("the gateway does not answer, so nobody knows what is under way")
        else:
            step.done(f"{cut} requests cut after {timeout_s:g} s" if cut else "no request is under way")
